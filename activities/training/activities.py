"""The trainer room's activities: prepare, load, train, save, check.

The worker holds no tensors. It hands files to a process and commits what comes back; a crash or
a hung kernel there leaves the heartbeat here alone. Every write is keyed by (run, kind, step), so
a repeated activity adopts what an earlier attempt committed.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.context import WorkerContext, attempt_token
from activities.contracts import names
from activities.contracts.checks import CheckInput, CheckResult
from activities.contracts.training import (
    CheckpointResult,
    LoadTrainerInput,
    LoadTrainerResult,
    PolicyResult,
    PreparePolicyInput,
    SaveCheckpointInput,
    TrainStepInput,
    TrainStepResult,
)
from activities.hosting.heartbeat import heartbeats
from activities.storage import keys
from activities.storage.refs import ArtifactRef
from activities.storage.store import free_bytes
from activities.training import check, retention
from activities.training.client import (
    NonFinite,
    StateMismatch,
    TrainerClient,
    TrainerFailed,
    TrainerGone,
)
from activities.training.policy import digest, recipe_of
from configs.model import DEFAULT_POLICY
from configs.run import RunConfig

ROOT = Path(__file__).resolve().parents[2]
RUN_STATE_FILE = "run_state.json"
CHECKPOINT_PARTS = 3
"""A checkpoint is about this many times its weights: weights and two moments."""
OUTPUT_TAIL = 2000
HEADLINE = ("loss", "mismatch_kl", "entropy", "grad_norm", "lr")
"""The trainer's metrics that a workflow is told; the store has all of them."""


@contextlib.contextmanager
def _trainer_errors() -> Iterator[None]:
    """Turns what the trainer process answers into errors that a workflow branches on."""
    try:
        yield
    except (TrainerGone, StateMismatch) as error:
        raise ApplicationError(str(error), type=names.TRAINER_LOST, non_retryable=True) from error
    except NonFinite as error:
        raise ApplicationError(str(error), type=names.BAD_INPUT, non_retryable=True) from error
    except TrainerFailed as error:
        # A ValueError is about what was asked for, and is the same on every attempt.
        if error.kind != "ValueError":
            raise
        raise ApplicationError(str(error), type=names.BAD_INPUT, non_retryable=True) from error


class TrainerActivities:
    """Carried out by workers of the trainer role."""

    def __init__(self, ctx: WorkerContext) -> None:
        self.ctx = ctx

    # -- version 0 --------------------------------------------------------------------------

    @activity.defn(name=names.PREPARE_POLICY)
    async def prepare_policy(self, given: PreparePolicyInput) -> PolicyResult:
        """Makes, loads or finds the policy the run starts from and commits it as version 0."""
        async with heartbeats():
            key = keys.weights(given.run_id, 0)
            ref = await asyncio.to_thread(self.ctx.store.committed, key)
            if ref is None:
                ref = await self._commit_version_0(given.run_id, key)
            folder = await asyncio.to_thread(self.ctx.store.fetch_folder, ref)
            about = json.loads((folder / "policy.json").read_text())
        return PolicyResult(ref, about["parameters"], about["origin"])

    async def _commit_version_0(self, run_id: str, key: str) -> ArtifactRef:
        store, attempt = self.ctx.store, attempt_token()
        config = await asyncio.to_thread(self.ctx.config, run_id)
        cache = self._cache_key(config)
        if cache and (cached := await asyncio.to_thread(store.committed, cache)):
            folder = await asyncio.to_thread(store.fetch_folder, cached)
            return await self._put_prepared(key, folder, attempt)
        async with self._scratch("prepare") as scratch:
            out = scratch / "policy"
            await self._prepare(config, scratch, out)
            if cache:
                await asyncio.to_thread(store.put_folder, cache, out, attempt=attempt)
            return await asyncio.to_thread(store.put_folder, key, out, attempt=attempt)

    async def _put_prepared(self, key: str, folder: Path, attempt: str) -> ArtifactRef:
        """Commits the content of a stored folder under another key, its manifest left out."""
        async with self._scratch("prepare") as scratch:
            copy = scratch / "policy"
            ignore = shutil.ignore_patterns("manifest.json")
            await asyncio.to_thread(shutil.copytree, folder, copy, ignore=ignore)
            return await asyncio.to_thread(self.ctx.store.put_folder, key, copy, attempt=attempt)

    @staticmethod
    def _cache_key(config: RunConfig) -> str | None:
        model = config.model
        if model.name != DEFAULT_POLICY:
            return None
        env = model.warm_start_env
        return keys.policy_cache(digest(recipe_of(env), env, config.seed, model.dtype))

    async def _prepare(self, config: RunConfig, scratch: Path, out: Path) -> None:
        order = {
            "name": config.model.name,
            "env": config.model.warm_start_env,
            "seed": config.seed,
            "dtype": config.model.dtype,
        }
        (scratch / "order.json").write_text(json.dumps(order))
        errors = scratch / "errors.log"
        argv = [sys.executable, "-m", "activities.training.prepare"]
        argv += ["--order", str(scratch / "order.json"), "--out", str(out)]
        with errors.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *argv,
                cwd=ROOT,
                env={**os.environ, "TQDM_DISABLE": "1"},
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert process.stdout is not None
        problem = ""
        try:
            async for line in process.stdout:
                # Libraries print too.
                message = json.loads(line) if line.startswith(b'{"') else {}
                problem = message.get("problem", problem)
                if "progress" in message:
                    activity.logger.info(message["progress"])
            code = await process.wait()
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if problem:
            raise ApplicationError(problem, type=names.BAD_INPUT, non_retryable=True)
        if code != 0:
            tail = errors.read_text(errors="replace")[-OUTPUT_TAIL:]
            raise RuntimeError(f"preparing {config.model.name!r} ended with code {code}:\n{tail}")

    # -- steps ------------------------------------------------------------------------------

    @activity.defn(name=names.LOAD_TRAINER)
    async def load_trainer(self, given: LoadTrainerInput) -> LoadTrainerResult:
        """Puts the process into the state of a checkpoint, or of version 0."""
        store = self.ctx.store
        async with heartbeats():
            config = await asyncio.to_thread(self.ctx.config, given.run_id)
            start = keys.weights(given.run_id, 0)
            source = given.checkpoint or given.weights
            ref = await asyncio.to_thread(store.require, start) if source is None else source
            folder = await asyncio.to_thread(store.fetch_folder, ref)
            with _trainer_errors():
                step = await TrainerClient(given.trainer.address).load(
                    folder, config.model_dump(mode="json"), checkpoint=given.checkpoint is not None
                )
        return LoadTrainerResult(step)

    @activity.defn(name=names.TRAIN_STEP)
    async def train_step(self, given: TrainStepInput) -> TrainStepResult:
        """Trains one batch and commits the weights of the version that results, and the metrics.

        A step trained again on the same batch adopts the metrics of the first time.
        """
        store, attempt = self.ctx.store, attempt_token()
        async with heartbeats(), self._scratch(f"step-{given.step}") as scratch:
            config = await asyncio.to_thread(self.ctx.config, given.run_id)
            data = await asyncio.to_thread(store.get, given.batch)
            batch, out = scratch / "batch.parquet", scratch / "weights"
            await asyncio.to_thread(batch.write_bytes, data)
            with _trainer_errors():
                client = TrainerClient(given.trainer.address)
                metrics = await client.step(given.step, batch, out)
            ref = await asyncio.to_thread(
                store.put_folder, keys.weights(given.run_id, given.step), out, attempt=attempt
            )
            metrics_ref = await asyncio.to_thread(
                store.put_json,
                keys.train_metrics(given.run_id, given.step, given.batch.sha256),
                metrics,
                attempt=attempt,
            )
            await asyncio.to_thread(
                retention.prune_weights, store, given.run_id, given.step, config.retention.weights
            )
        headline = {name: metrics[name] for name in HEADLINE if name in metrics}
        return TrainStepResult(given.step, ref, headline, metrics_ref)

    @activity.defn(name=names.SAVE_CHECKPOINT)
    async def save_checkpoint(self, given: SaveCheckpointInput) -> CheckpointResult:
        """Commits the trainer's state and the run's state as one checkpoint."""
        store = self.ctx.store
        key = keys.checkpoint(given.run_id, given.step)
        async with heartbeats(), self._scratch(f"checkpoint-{given.step}") as scratch:
            config = await asyncio.to_thread(self.ctx.config, given.run_id)
            ref = await asyncio.to_thread(store.committed, key)
            if ref is None:
                await asyncio.to_thread(self._require_space, given)
                out = scratch / "checkpoint"
                with _trainer_errors():
                    await TrainerClient(given.trainer.address).save(given.step, out)
                (out / RUN_STATE_FILE).write_text(given.run_state)
                ref = await asyncio.to_thread(store.put_folder, key, out, attempt=attempt_token())
            await asyncio.to_thread(
                retention.prune_checkpoints,
                store,
                given.run_id,
                given.step,
                config.checkpoint.keep_last,
            )
        return CheckpointResult(given.step, ref)

    def _require_space(self, given: SaveCheckpointInput) -> None:
        store = self.ctx.store
        weights = store.require(keys.weights(given.run_id, given.step)).size
        size = CHECKPOINT_PARTS * weights + len(given.run_state)
        places = {"scratch": shutil.disk_usage(self.ctx.home).free, "store": free_bytes(store)}
        where = {"scratch": str(self.ctx.home), "store": store.url}
        for place, free in places.items():
            # Both lie on one disk as a rule.
            need = 2 * size
            if free is not None and free < need:
                raise ApplicationError(
                    f"checkpoint of step {given.step} needs {need / 2**20:.1f} MiB and "
                    f"{where[place]} has {free / 2**20:.1f} MiB free: free some space there, or "
                    "lower checkpoint.keep_last and retention.weights",
                    type=names.NO_SPACE,
                )

    # -- preflight --------------------------------------------------------------------------

    @activity.defn(name=names.CHECK_MODEL)
    async def check_model(self, given: CheckInput) -> CheckResult:
        """Finds what is wrong with the model section; raises nothing for a user's mistake."""
        config = RunConfig.model_validate(given.config)
        async with heartbeats():
            return CheckResult(problems=await asyncio.to_thread(check.check_model, config))

    # -- private ----------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _scratch(self, name: str) -> AsyncIterator[Path]:
        """A folder of this attempt's own, gone afterwards."""
        parent = self.ctx.scratch("training")
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent))
        try:
            yield folder
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
