"""Trains recorded batches again and compares the results bit for bit.

    python -m ratchet.activities.training.replay RUN [--from STEP] [--to STEP] [--store URL]

A trainer process does what it does in a run: it loads a checkpoint (or version 0), then trains each
batch by the revision of the config that the run used for it. After each step the exported weights
must equal those that the run committed, and at each checkpoint the whole state must: weights,
optimizer and random numbers. Where the run was resumed or forked, the trainer is saved and loaded
again, as it was then. Where trainers on different hardware committed several states of a step, one
of them must be matched.

On a CPU the bits are the same for the same torch and the same numbers of ranks and threads. Without
--threads the config's number counts, or else that of the first checkpoint. On a GPU some kernels
add in no fixed order; only a run with trainer.deterministic, which avoids them, gives the same bits
twice. Each attempt is trained in its own mode, unless --deterministic or --no-deterministic sets
one for all.

The last line of output is one JSON object. Exit status: 0 the same bits, 1 a difference, 2 not
replayable.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from ratchet.activities.contracts.hosting import HostInput
from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.hosting.process import ServerProcess, describe_exit
from ratchet.activities.runtime.children import hide_rooms
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.storage import keys
from ratchet.activities.storage.keys import (
    ADAPTER_FILE,
    OPTIMIZER_FILE,
    OPTIMIZER_FOLDER,
    TRAINER_FILE,
)
from ratchet.activities.storage.store import CorruptArtifact, StoreUnavailable
from ratchet.activities.training.bits import WEIGHTS, Difference, first_difference
from ratchet.activities.training.client import (
    DiskFailed,
    Loaded,
    NonFinite,
    TrainerClient,
    TrainerFailed,
    TrainerGone,
)
from ratchet.activities.training.recording import NotReplayable, Plan, RecordedStep, plan
from ratchet.activities.training.server import process_spec
from ratchet.configs.home import home_folder
from ratchet.configs.run import RunConfig
from ratchet.configs.trainer import TrainerConfig
from ratchet.configs.upgrades import config_document
from ratchet.configs.versions import NewerSchema

SAME, DIFFERENT, FAILED = 0, 1, 2
EXPECTED = (
    *(NotReplayable, CorruptArtifact, StoreUnavailable, DiskFailed),
    *(NewerSchema, TrainerFailed, TrainerGone, TimeoutError, ValueError),
)
"""Failures whose message explains them."""
PROBED_EVERY_S = 0.1

Say = Callable[[str], None]


@dataclass
class Outcome:
    """The result of a replay. `compared` has {step, kind, key, equal} for each comparison.

    `first_difference` has step, kind, key and the fields of `Difference`; the replay ends there.
    """

    run: str
    start: int
    stop: int
    steps: int = 0
    compared: list[dict[str, Any]] = field(default_factory=list)
    first_difference: dict[str, Any] | None = None
    loaded: Loaded | None = None

    @property
    def equal(self) -> bool:
        """Whether all comparisons found the same bits."""
        return self.first_difference is None

    def as_json(self) -> dict[str, Any]:
        """The last line of output."""
        assert self.loaded is not None
        return {
            "run": self.run,
            "from": self.start,
            "to": self.stop,
            "steps": self.steps,
            "compared": self.compared,
            "equal": self.equal,
            "first_difference": self.first_difference,
            "device": self.loaded.device,
            "deterministic": self.loaded.deterministic,
            "torch_threads": self.loaded.torch_threads,
            "torch_version": self.loaded.torch_version,
        }


@contextlib.asynccontextmanager
async def trainer_process(
    ctx: WorkerContext, config: TrainerConfig
) -> AsyncIterator[TrainerClient]:
    """A trainer process under a keeper during the block; yields its client.

    Raises TrainerGone if it does not come up.
    """
    host = HostInput(run_id="replay", role="trainer", index=0, queue="")
    spec = process_spec(ctx.home, host, 1, config)
    process = ServerProcess(spec, home=ctx.home, run="replay", host="trainer", epoch=1)
    await process.start()
    deadline = time.monotonic() + spec.start_timeout_s
    try:
        while not await spec.probe():
            if process.exited.is_set() or time.monotonic() > deadline:
                how = describe_exit(process.code) if process.exited.is_set() else "silent"
                raise TrainerGone(f"the trainer process did not start: {how}\n{process.log_tail()}")
            await asyncio.sleep(PROBED_EVERY_S)
        yield TrainerClient(spec.address)
    finally:
        await process.stop(0)


class Replay:
    """One replay of a plan; `run` is called once.

    `threads` and `deterministic` override the configs of the attempts; None: the configs hold.
    """

    def __init__(
        self,
        ctx: WorkerContext,
        chosen: Plan,
        say: Say,
        *,
        threads: int | None = None,
        deterministic: bool | None = None,
    ) -> None:
        self._ctx = ctx
        self._plan = chosen
        self._threads = threads
        self._deterministic = deterministic
        self._say = say
        self._outcome = Outcome(chosen.run, chosen.start, chosen.steps[-1].step)

    async def run(self) -> Outcome:
        """Trains the plan's steps until one differs. Each attempt gets a separate process, since a
        process keeps its mode for life.
        """
        chosen = self._plan
        self._threads = self._threads or await asyncio.to_thread(self._recorded_threads)
        state, checkpoint = await self._fetched(chosen.state), chosen.from_checkpoint
        self._say(f"from {chosen.state.key}")
        for attempt, group in groupby(chosen.steps, key=lambda step: step.attempt):
            steps = list(group)
            if steps[0] is not chosen.steps[0]:
                self._say(f"{attempt} goes on from step {steps[0].step - 1}")
            trainer = (await self._config(steps[0])).trainer
            async with trainer_process(self._ctx, trainer) as client:
                await self._load(client, state, steps[0], checkpoint=checkpoint)
                shutil.rmtree(self._ctx.scratch("handover"))
                for step in steps:
                    await self._train(client, step)
                    if not self._outcome.equal:
                        return self._outcome
                if steps[-1] is not chosen.steps[-1]:
                    state, checkpoint = self._ctx.scratch("handover") / attempt, True
                    await client.save(steps[-1].step, state)
        return self._outcome

    async def _train(self, client: TrainerClient, step: RecordedStep) -> None:
        with tempfile.TemporaryDirectory(dir=self._ctx.scratch("replay")) as scratch:
            await self._train_in(Path(scratch), client, step)

    async def _train_in(self, scratch: Path, client: TrainerClient, step: RecordedStep) -> None:
        batch, out = scratch / "batch.parquet", scratch / "weights"
        batch.write_bytes(await asyncio.to_thread(self._ctx.store.get, step.batch))
        config = config_document(await self._config(step))
        try:
            await client.step(step.step, batch, out, config=config, revision=step.revision)
        except NonFinite as error:
            self._differs(step, "step", step.batch.key, Difference("", str(error)))
            return
        self._outcome.steps += 1
        if not step.weights and not step.checkpoints:
            self._say(f"step {step.step}: trained; the run kept nothing to compare it with")
        if step.weights:
            await self._compare(step, "weights", step.weights, out, scratch)
        if step.checkpoints and self._outcome.equal:
            saved = scratch / "checkpoint"
            await client.save(step.step, saved)
            await self._compare(step, "checkpoint", step.checkpoints, saved, scratch)

    async def _compare(
        self, step: RecordedStep, kind: str, refs: list[ArtifactRef], ours: Path, scratch: Path
    ) -> None:
        state = [ADAPTER_FILE, OPTIMIZER_FILE, f"{OPTIMIZER_FOLDER}/*.safetensors"]
        state = state if kind == "checkpoint" else []
        patterns = [WEIGHTS, *state]
        result: list[tuple[ArtifactRef, Difference]] = []
        for ref in refs:
            theirs = await self._fetched(ref, scratch / "theirs")
            different = await asyncio.to_thread(_compare, ours, theirs, patterns)
            if different is None:
                self._say(f"step {step.step}: same {kind} ({ref.key})")
                row = {"step": step.step, "kind": kind, "key": ref.key, "equal": True}
                self._outcome.compared.append(row)
                return
            result.append((ref, different))
        ref, different = result[-1]
        self._differs(step, kind, ref.key, different)

    def _differs(self, step: RecordedStep, kind: str, key: str, result: Difference) -> None:
        row = {"step": step.step, "kind": kind, "key": key}
        self._outcome.compared.append({**row, "equal": False})
        self._outcome.first_difference = {**row, **asdict(result)}
        self._say(f"step {step.step}: {kind} differs from {key}: {result.tensor} {result.what}")

    # -- what is recorded ---------------------------------------------------------------------

    async def _load(
        self, client: TrainerClient, folder: Path, step: RecordedStep, *, checkpoint: bool
    ) -> None:
        config, base = await self._config(step), None
        if checkpoint and config.trainer.lora is not None:
            first = self._ctx.store.require(keys.weights(step.attempt, 0))
            base = await self._fetched(first, self._ctx.scratch("base"))
        document = config_document(config)
        self._outcome.loaded = await client.load(folder, document, checkpoint=checkpoint, base=base)
        for warning in self._outcome.loaded.warnings:
            self._say(f"warning: {warning}")

    async def _config(self, step: RecordedStep) -> RunConfig:
        config = await asyncio.to_thread(self._ctx.config, step.attempt, step.revision)
        asked = {"threads": self._threads, "deterministic": self._deterministic}
        update = {key: value for key, value in asked.items() if value is not None}
        trainer = config.trainer.model_copy(update=update)
        return config.model_copy(update={"trainer": trainer})

    async def _fetched(self, ref: ArtifactRef, cache: Path | None = None) -> Path:
        place = cache or self._ctx.scratch("begin")
        return await asyncio.to_thread(self._ctx.store.fetch_folder, ref, place)

    def _recorded_threads(self) -> int | None:
        """The number of threads of the run's trainer, if the config leaves it to torch."""
        chosen = self._plan
        if self._ctx.config(chosen.steps[0].attempt).trainer.threads is not None:
            return None
        later = [ref for step in chosen.steps for ref in step.checkpoints]
        for ref in [chosen.state, *later] if chosen.from_checkpoint else later:
            place = self._ctx.scratch("threads")
            folder = self._ctx.store.fetch_folder(ref, place)
            threads = int(json.loads((folder / TRAINER_FILE).read_text())["torch_threads"])
            shutil.rmtree(place)
            return threads
        return None


def _compare(ours: Path, theirs: Path, patterns: list[str]) -> Difference | None:
    result = (first_difference(ours, theirs, pattern) for pattern in patterns)
    return next((different for different in result if different is not None), None)


def default_store() -> str:
    """The store of the stack that RATCHET_STORE or RATCHET_HOME names."""
    home = home_folder()
    return os.environ.get("RATCHET_STORE") or f"file://{home}/store"


async def _replay(options: argparse.Namespace, home: Path, say: Say) -> Outcome:
    ctx = WorkerContext(home=home, store_url=options.store, own_queue="")
    chosen = await asyncio.to_thread(plan, ctx.store, options.run, options.start, options.stop)
    return await Replay(
        ctx, chosen, say, threads=options.threads, deterministic=options.deterministic
    ).run()


def main(arguments: list[str] | None = None) -> int:
    """Replays what the command line names; returns the exit status."""
    parser = argparse.ArgumentParser(description="Train recorded batches again, and compare bits.")
    parser.add_argument("run", help="a run (its newest attempt), or one attempt, such as RUN+2")
    parser.add_argument("--from", dest="start", type=int, help="step of a checkpoint, or 0")
    parser.add_argument("--to", dest="stop", type=int, help="last step")
    parser.add_argument("--store", default=default_store(), help="URL of the artifact store")
    parser.add_argument("--threads", type=int, help="CPU threads of the trainer")
    parser.add_argument(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        help="the trainer's mode on a GPU; by default that of the run's config",
    )
    options = parser.parse_args(arguments)

    def say(line: str) -> None:
        print(line, flush=True)

    try:
        with tempfile.TemporaryDirectory(prefix="ratchet-replay-") as home:
            outcome = asyncio.run(_replay(options, Path(home), say))
    except EXPECTED as error:
        print(f"replay: {str(error) or type(error).__name__}", file=sys.stderr)
        return FAILED
    except Exception:
        # Python would end with status 1, which means that bits differ.
        traceback.print_exc()
        return FAILED
    say(json.dumps(outcome.as_json()))
    return SAME if outcome.equal else DIFFERENT


if __name__ == "__main__":
    hide_rooms()
    sys.exit(main())
