"""The trainer room's activities: prepare, load, train, save, check.

The worker holds no tensors. It hands files to the trainer process and commits the results. A crash
or a hung kernel in that process does not stop the heartbeat here, and a process that ends while it
writes leaves nothing committed. Every write is keyed by (run, kind, step), so a repeated activity
adopts what an earlier attempt committed, if its own process made the same bits (`fencing`).

A checkpoint is adopted or committed as a whole: the trainer's state together with the run's durable
state. An adopted checkpoint may hold the run's state of an earlier moment at the same step. A run
can be restored from it just as well: within an attempt the step only rises, so both moments follow
the same batches, and the trainer's bits are compared. A restored run repeats what the run did
between the two moments, and nothing of that was trained up to this step.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from temporalio import activity
from temporalio.exceptions import ApplicationError

from ratchet.activities.contracts import names
from ratchet.activities.contracts.checks import CheckInput, CheckResult, without_secrets
from ratchet.activities.contracts.redact import redacted_end
from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.training import (
    CheckpointResult,
    LoadTrainerInput,
    LoadTrainerResult,
    PolicyResult,
    PreparePolicyInput,
    SaveCheckpointInput,
    TrainStepInput,
    TrainStepResult,
)
from ratchet.activities.envs import rendering
from ratchet.activities.hosting.scratch import working_folder
from ratchet.activities.inference.transfers import transfer_of
from ratchet.activities.runtime import machine
from ratchet.activities.runtime.children import as_parent, child_env, module_command
from ratchet.activities.runtime.context import WorkerContext, attempt_token
from ratchet.activities.runtime.failing import final
from ratchet.activities.runtime.heartbeat import heartbeats
from ratchet.activities.storage import fencing, keys, policies, retention
from ratchet.activities.storage.keys import MODEL_CONFIG, RUN_STATE_FILE, TRAINER_FILE
from ratchet.activities.storage.store import ArtifactStore
from ratchet.activities.storage.token_logprobs import SCHEMA_VERSION as TOKEN_LOGPROBS_SCHEMA
from ratchet.activities.training import check, disk, memory, smollm2
from ratchet.activities.training.client import (
    DiskFailed,
    NonFinite,
    OutOfMemory,
    StateMismatch,
    TrainerClient,
    TrainerFailed,
    TrainerGone,
)
from ratchet.activities.training.policy import digest, recipe_of
from ratchet.configs.model import DEFAULT_POLICY, SMOLLM2, version_named
from ratchet.configs.run import RunConfig
from ratchet.configs.upgrades import config_document, read_config

MAY_DIFFER = (RUN_STATE_FILE, TRAINER_FILE)
"""Files of a checkpoint that may differ between two attempts: the run's state at that moment, and a
record that says how long the last step took. Weights and optimizer must have the same bits."""
OUTPUT_TAIL = 2000
HEADLINE = ("loss", "mismatch_kl", "entropy", "grad_norm", "lr")
"""The trainer's metrics that a workflow gets; the store has all of them."""


def _out_of_memory(store: ArtifactStore, run_id: str, config: RunConfig, said: str) -> str:
    ref = store.require(keys.weights(run_id, 0))
    shape = memory.Shape.read(json.loads(store.read_file(ref, MODEL_CONFIG)))
    room, gpu = check.memory_for_trainer(config)
    return memory.exhausted(shape, config, said, room=room, gpu=gpu)


@contextlib.contextmanager
def _trainer_errors(store: ArtifactStore, run_id: str, config: RunConfig) -> Iterator[None]:
    """Turns errors of the trainer process into those that a workflow branches on."""
    killed = machine.out_of_memory_kills()
    try:
        yield
    except OutOfMemory as error:
        raise final(
            names.TRAINER_LOST, _out_of_memory(store, run_id, config, str(error))
        ) from error
    except TrainerGone as error:
        if machine.out_of_memory_kills() == killed:
            raise final(names.TRAINER_LOST, error) from error
        said = "the kernel killed a process of this worker's control group for memory"
        raise final(names.TRAINER_LOST, _out_of_memory(store, run_id, config, said)) from error
    except (StateMismatch, fencing.Nondeterministic) as error:
        raise final(names.TRAINER_LOST, error) from error
    except DiskFailed as error:
        raise final(names.STORE_FAILED, error) from error
    except (NonFinite, TrainerFailed) as error:
        # A ValueError is about the request itself: every attempt would raise it again.
        if isinstance(error, TrainerFailed) and error.kind != "ValueError":
            raise
        raise final(names.BAD_INPUT, error) from error


class TrainerActivities:
    """Run by workers of the trainer role."""

    def __init__(self, ctx: WorkerContext) -> None:
        self.ctx = ctx

    # -- version 0 --------------------------------------------------------------------------

    @activity.defn(name=names.PREPARE_POLICY)
    async def prepare_policy(self, input: PreparePolicyInput) -> PolicyResult:
        """Makes or loads the policy that the run starts from, and commits it as version 0."""
        async with heartbeats():
            key = keys.weights(input.run_id, 0)
            ref = await asyncio.to_thread(self.ctx.store.committed, key)
            if ref is None:
                ref = await self._commit_version_0(input.run_id, key)
            folder = await asyncio.to_thread(self.ctx.store.fetch_folder, ref)
            about = json.loads((folder / keys.POLICY_FILE).read_text())
            config = await asyncio.to_thread(self.ctx.config, input.run_id)
            problem = await asyncio.to_thread(rendering.problem_aside, config.model, folder)
            problem = problem or rendering.chat_problem(config, folder)
            if problem is not None:
                raise ApplicationError(problem, type=names.BAD_INPUT, non_retryable=True)
        return PolicyResult(ref, about["parameters"], about["origin"])

    async def _commit_version_0(self, run_id: str, key: str) -> ArtifactRef:
        store, attempt = self.ctx.store, attempt_token()
        config = await asyncio.to_thread(self.ctx.config, run_id)
        cache = self._cache_key(config)
        if cache and (cached := await asyncio.to_thread(store.committed, cache)):
            return await asyncio.to_thread(store.copy, cached, key, attempt=attempt)
        async with self._scratch("prepare") as scratch:
            out = scratch / "policy"
            await self._prepare(config, scratch, out)
            if cache:
                await asyncio.to_thread(store.put_folder, cache, out, attempt=attempt)
            return await asyncio.to_thread(store.put_folder, key, out, attempt=attempt)

    @staticmethod
    def _cache_key(config: RunConfig) -> str | None:
        model = config.model
        if model.name == SMOLLM2:
            return keys.policy_cache(smollm2.SHA256) if smollm2.source() == smollm2.WHEEL else None
        if model.name != DEFAULT_POLICY:
            return None
        env = model.warm_start_env
        return keys.policy_cache(digest(recipe_of(env), env, config.seed))

    def _version(self, run_id: str, step: int, folder: Path) -> dict[str, Any]:
        """The part of an order that names another run's version; raises BAD_INPUT if the store no
        longer has it.
        """
        store = self.ctx.store
        try:
            policies.fetch(store, run_id, step, folder)
        except policies.NoVersion as error:
            raise final(names.BAD_INPUT, error) from error
        about = policies.about(store, run_id)
        return {"folder": str(folder), "base": about["base"], "license": about["license"]}

    async def _prepare(self, config: RunConfig, scratch: Path, out: Path) -> None:
        order = {
            "name": config.model.name,
            "revision": config.model.revision,
            "env": config.model.warm_start_env,
            "seed": config.seed,
            "renderer": config.model.renderer,
            "lowered": "bfloat16" in (config.trainer.compute_dtype, config.inference.dtype),
        }
        if (version := version_named(config.model.name)) is not None:
            order |= await asyncio.to_thread(self._version, *version, scratch / "version")
        (scratch / "order.json").write_text(json.dumps(order))
        errors = scratch / "errors.log"
        argv = module_command("ratchet.activities.training.prepare")
        argv += ["--order", str(scratch / "order.json"), "--out", str(out)]
        with errors.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *argv,
                cwd=scratch,
                env=child_env({"TQDM_DISABLE": "1"}, as_parent()),
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
            raise final(names.BAD_INPUT, problem)
        if code != 0:
            tail = redacted_end(errors.read_text(errors="replace"), OUTPUT_TAIL)
            raise RuntimeError(f"preparing {config.model.name!r} ended with code {code}:\n{tail}")

    # -- steps ------------------------------------------------------------------------------

    @activity.defn(name=names.LOAD_TRAINER)
    async def load_trainer(self, input: LoadTrainerInput) -> LoadTrainerResult:
        """Loads a checkpoint, or version 0, into the trainer process.

        Raises CorruptArtifact if it is damaged, NewerSchema if a newer build wrote it.
        """
        store = self.ctx.store
        async with heartbeats():
            config = await asyncio.to_thread(self.ctx.config, input.run_id, input.revision)
            start = keys.weights(input.run_id, 0)
            source = input.checkpoint or input.weights
            ref = await asyncio.to_thread(store.require, start) if source is None else source
            folder = await asyncio.to_thread(store.fetch_folder, ref)
            base = None
            if config.trainer.lora is not None and input.checkpoint is not None:
                first = await asyncio.to_thread(store.require, start)
                base = await asyncio.to_thread(store.fetch_folder, first)
            with _trainer_errors(store, input.run_id, config):
                loaded = await TrainerClient(input.trainer.address).load(
                    folder,
                    config_document(config),
                    checkpoint=input.checkpoint is not None,
                    base=base,
                )
        return LoadTrainerResult(loaded.step)

    @activity.defn(name=names.TRAIN_STEP)
    async def train_step(self, input: TrainStepInput) -> TrainStepResult:
        """Trains one batch by one revision of the config. Commits the weights of the new version,
        the metrics, and the log-probabilities that the batch's tokens had before the step.

        If the same batch was trained before with the same bits, all of that is adopted.
        """
        store, attempt = self.ctx.store, attempt_token()
        async with heartbeats(), self._scratch(f"step-{input.step}") as scratch:
            config = await asyncio.to_thread(self.ctx.config, input.run_id, input.revision)
            data = await asyncio.to_thread(store.get, input.batch)
            batch, out = scratch / "batch.parquet", scratch / "weights"
            scores = scratch / "token_logprobs.parquet"
            await asyncio.to_thread(batch.write_bytes, data)
            with _trainer_errors(store, input.run_id, config):
                client = TrainerClient(input.trainer.address)
                metrics = await client.step(
                    input.step,
                    batch,
                    out,
                    config=config_document(config),
                    revision=input.revision,
                    token_logprobs=scores,
                )
                key = keys.weights(input.run_id, input.step)
                transfer, began = transfer_of(config, store), time.monotonic()
                ref = await asyncio.to_thread(
                    transfer.prepare, key, out, epoch=input.trainer.epoch, attempt=attempt
                )
                metrics["time/push/prepare"] = time.monotonic() - began
                metrics["weights/bytes"] = float(ref.size)
            reported = keys.train_metrics(input.run_id, input.step, input.batch.sha256)
            scored = keys.token_logprobs(input.run_id, input.step)
            if ref.key != key:
                reported = fencing.variant(reported, input.trainer.epoch)
                scored = fencing.variant(scored, input.trainer.epoch)
            metrics_ref = await asyncio.to_thread(
                store.put_json, reported, metrics, attempt=attempt
            )
            # A process that was restored at this very step has no scores.
            if scores.exists():
                await asyncio.to_thread(self._put_scores, scored, scores, attempt)
            await asyncio.to_thread(self._prune_weights, input, config)
        headline = {name: metrics[name] for name in HEADLINE if name in metrics}
        return TrainStepResult(input.step, ref, headline, metrics_ref)

    def _prune_weights(
        self, input: TrainStepInput | SaveCheckpointInput, config: RunConfig
    ) -> None:
        store, needed = self.ctx.store, {*input.needed}
        if config.trainer.lora is not None:
            # An adapter's checkpoint is restored together with the merged weights of its step.
            needed |= retention.checkpointed(store, input.run_id)
        keep = config.retention.weights
        retention.prune_weights(store, input.run_id, input.step, keep, needed)

    def _put_scores(self, key: str, file: Path, attempt: str) -> None:
        schema = TOKEN_LOGPROBS_SCHEMA
        self.ctx.store.put(key, file.read_bytes(), attempt=attempt, schema=schema)

    @activity.defn(name=names.SAVE_CHECKPOINT)
    async def save_checkpoint(self, input: SaveCheckpointInput) -> CheckpointResult:
        """Commits the trainer's state and the run's state as one checkpoint, or adopts the one that
        an earlier attempt committed with the same bits.
        """
        store = self.ctx.store
        async with heartbeats(), self._scratch(f"checkpoint-{input.step}") as scratch:
            config = await asyncio.to_thread(self.ctx.config, input.run_id, input.revision)
            await asyncio.to_thread(self._require_space, input, config)
            out = scratch / "checkpoint"
            with _trainer_errors(store, input.run_id, config):
                await TrainerClient(input.trainer.address).save(input.step, out)
                await asyncio.to_thread((out / RUN_STATE_FILE).write_text, input.run_state)
                key = keys.checkpoint(input.run_id, input.step)
                ref = await asyncio.to_thread(
                    fencing.commit,
                    self.ctx.store,
                    key,
                    out,
                    epoch=input.trainer.epoch,
                    attempt=attempt_token(),
                    ignored=MAY_DIFFER,
                )
            await asyncio.to_thread(self._prune, input, config)
        return CheckpointResult(input.step, ref)

    def _prune(self, input: SaveCheckpointInput, config: RunConfig) -> None:
        store, kept = self.ctx.store, config.checkpoint
        steps = retention.prune_checkpoints(
            store, input.run_id, input.step, kept.keep_last, kept.keep_every
        )
        if config.trainer.lora is not None:
            self._prune_weights(input, config)
        if config.retention.batches == "checkpoint":
            retention.prune_batches(store, input.run_id, steps[0])
        rollouts = config.retention.rollouts
        if rollouts != "all" and input.step >= rollouts:
            states = retention.states_of(store, input.run_id, steps[0])
            states.append(json.loads(input.run_state).get("state", {}))
            retention.prune_rollouts(store, input.run_id, input.step, rollouts, states, steps[0])

    def _require_space(self, input: SaveCheckpointInput, config: RunConfig) -> None:
        """Raises NO_SPACE if a disk cannot hold the checkpoint. One that an earlier attempt
        committed needs no further space.
        """
        store = self.ctx.store
        if store.committed(keys.checkpoint(input.run_id, input.step)):
            return
        weights = store.require(keys.weights(input.run_id, input.step))
        adapter = store.manifest(weights).get(keys.ADAPTER_FILE)
        bytes_each = memory.BYTES[config.inference.dtype]
        trained = weights.size // bytes_each if adapter is None else adapter[1] // 4
        size = disk.checkpoint_bytes(trained, config.trainer.optim) + len(input.run_state)
        places = {"scratch": shutil.disk_usage(self.ctx.home).free, "store": store.free_bytes()}
        where = {"scratch": str(self.ctx.home), "store": store.url}
        for place, free in places.items():
            # Scratch folder and store usually share one disk, which then holds it twice.
            need = 2 * size
            if free is not None and free < need:
                raise ApplicationError(
                    f"the checkpoint of step {input.step} needs {need / 2**20:.1f} MiB, and "
                    f"{where[place]} has {free / 2**20:.1f} MiB free: free some space there, or "
                    "lower checkpoint.keep_last and retention.weights",
                    type=names.NO_SPACE,
                )

    # -- preflight --------------------------------------------------------------------------

    @activity.defn(name=names.CHECK_MODEL)
    async def check_model(self, input: CheckInput) -> CheckResult:
        """Returns the problems of the sections `model` and `trainer`, and estimates of what they
        take. A user's mistake is a problem in the result, never an exception.
        """
        config, store = read_config(input.config), self.ctx.store
        async with heartbeats():
            problems = await asyncio.to_thread(check.check_model, config, restored=input.restored)
            if input.restored:
                return CheckResult(without_secrets(problems))
            problems += await asyncio.to_thread(check.check_version, config, store)
            if problems:
                return CheckResult(without_secrets(problems))
            shape = await asyncio.to_thread(check.shape_of, config, store)
            if shape is None:
                return CheckResult()
            problems = check.check_disk(config, shape, store)
            estimates = check.estimates(config, shape)
            return CheckResult(without_secrets(problems), estimates=estimates)

    # -- private ----------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _scratch(self, name: str) -> AsyncIterator[Path]:
        """A folder for this attempt alone, removed at the end."""
        with working_folder(self.ctx.scratch("training"), name) as folder:
            yield folder
