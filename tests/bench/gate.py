"""`make bench-gate`: whether the gate tells right weights from wrong ones, and what it costs.

For each of MODELS (random smollm2) and DTYPES (float32 bfloat16) one real engine takes COUNT (200)
versions, each of which one step at lr 1e-6 made of the one before, and passes the gate with them.
Then each is pushed wrong at each of three places: in the exported files, in the stream into
`load_weights`, and in what the engine holds after it has loaded. In turns all tensors whose bits
really differ from those of the version before are stale, half of them, or one. Each is pushed once
and verified as a run does it.

The last line of stdout is one JSON object: by model and dtype how many right pushes passed and how
many wrong ones were refused at each place, and how many of those by bits; the seconds of a check,
and the largest canary differences of right weights. Then PAUSES (20) checks run while the engine
samples: how long the tokens of one request are apart, at most, and how long without a check. Exits
with 1 if a right push is refused or a wrong one passes.

RATCHET_SMOLLM2 names a folder with SmolLM2. THREADS (1) is what an engine computes with.
"""

import asyncio
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import torch
import transformers
from safetensors.torch import load_file, save_file

from ratchet.activities.contracts.hosting import HostInput
from ratchet.activities.contracts.weights import Verdict
from ratchet.activities.hosting.process import ServerProcess
from ratchet.activities.inference import activities, gate
from ratchet.activities.inference.engine import engine_spec
from ratchet.activities.inference.store_transfer import Fetched, StoreTransfer
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.storage import keys
from ratchet.activities.training import smollm2
from ratchet.activities.training.model import export
from ratchet.configs.run import RunConfig
from ratchet.configs.upgrades import config_document
from tests import ROOT
from tests.bench import gate_faults
from tests.e2e.policies import random_policy

RUN = "gate"
LR = 1e-6
WEIGHTS = "model.safetensors"
PLACES = ("files", "stream", "held")
KINDS: tuple[Callable[[int], int], ...] = (lambda n: n, lambda n: max(n // 2, 1), lambda n: 1)
"""How many of the tensors that changed are wrong: stale, half-loaded, one."""


class Engine(activities._Engine):
    """An engine as activities see it, with faults."""

    async def rpc(self, method: str, **kwargs: Any) -> Any:
        return await self.post("/collective_rpc", json={"method": method, "kwargs": kwargs})


@dataclass
class Bench:
    """One model in one dtype on one engine."""

    home: Path
    dtype: str
    model: Any
    tokenizer: Any
    rng: random.Random
    version: int = 0
    checks: list[float] = field(default_factory=list)
    diffs: list[tuple[float, float]] = field(default_factory=list)

    def folder(self, version: int) -> Path:
        return self.home / f"v{version}"

    def step(self) -> Path:
        """The next version; the one before stays, others go."""
        if self.version:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    signs = torch.randint_like(parameter, 2).mul_(2).sub_(1)
                    parameter.add_(signs, alpha=LR)
        folder = self.folder(self.version)
        export(self.model, self.tokenizer, folder, self.dtype)
        for file in self.folder(self.version - 2).glob("*"):
            file.unlink()
        self.version += 1
        return folder

    async def push(
        self,
        engine: Engine,
        transfer: StoreTransfer,
        place: str = "",
        names: Sequence[str] = (),
    ) -> Verdict:
        """Pushes the last version, `names` of which come as in the one before at `place`, and
        checks it.
        """
        new, old = self.folder(self.version - 1), self.folder(self.version - 2)
        expected = gate.read_expected(new)
        if place == "files":
            new = self._mixed(new, old, names)
        if place == "stream":
            await engine.rpc("fault_in_stream", names=names, folder=str(old))
        weights = Fetched(new, expected)
        async with activities._paused(engine, f"{self.version}.1a"):  # type: ignore[arg-type]
            await transfer.push(engine, weights)
        if place == "held":
            await engine.rpc("fault_in_held", names=names, folder=str(old))
        began = time.monotonic()
        verdict = await transfer.verify(engine, weights, self.tolerance)
        self.checks.append(time.monotonic() - began)
        return verdict

    async def pauses(self, engine: Engine, transfer: StoreTransfer, count: int) -> dict[str, Any]:
        """How far apart the tokens of a request are at most, during each of `count` checks and
        during as many times without one, and the seconds of those checks.
        """
        folder = self.folder(self.version - 1)
        weights = Fetched(folder, gate.read_expected(folder))
        checks: list[float] = []
        gaps: dict[bool, list[float]] = {True: [], False: []}
        async with _sampling(engine) as stamps:
            for checked in [True, False] * count:
                while len(stamps) < 2:
                    await asyncio.sleep(0.01)
                del stamps[:-1]
                began = time.monotonic()
                if checked:
                    await transfer.verify(engine, weights, self.tolerance)
                    checks.append(time.monotonic() - began)
                else:
                    await asyncio.sleep(fmean(checks))
                seen = len(stamps)
                while len(stamps) == seen:
                    await asyncio.sleep(0.01)
                gaps[checked].append(max(b - a for a, b in pairwise(stamps)))
        return {
            "check_s": _spread(checks),
            "gap_s": _spread(gaps[True]),
            "gap_without_check_s": _spread(gaps[False]),
        }

    def changed(self) -> list[str]:
        """Tensors of the last version whose bits are others than in the one before."""
        new, old = (load_file(self.folder(self.version - n) / WEIGHTS) for n in (1, 2))
        return [name for name in new if not torch.equal(new[name], old[name])]

    def _mixed(self, new: Path, old: Path, names: Sequence[str]) -> Path:
        mixed = self.home / "mixed"
        mixed.mkdir(exist_ok=True)
        for file in new.iterdir():
            if file.name != WEIGHTS:
                shutil.copy(file, mixed)
        tensors, before = load_file(new / WEIGHTS), load_file(old / WEIGHTS)
        save_file(tensors | {name: before[name] for name in names}, mixed / WEIGHTS)
        return mixed

    async def run(self, count: int, ctx: WorkerContext, threads: str) -> dict[str, Any]:
        """All pushes: of each version a right one, and a wrong one at each place."""
        inference = {
            "dtype": self.dtype,
            "kv_cache_gib": 0.25,
            "extra_args": [
                "--worker-extension-cls",
                f"{gate_faults.__name__}.{gate_faults.Faults.__name__}",
            ],
        }
        config = RunConfig.model_validate(
            {
                "max_steps": 1,
                "train": {"env": [{"id": "reverse-text"}], "sampling": {"max_tokens": 32}},
                "trainer": {"seq_len": 256},
                "inference": inference,
            }
        )
        ctx.store.put_json(keys.config(RUN), config_document(config))
        first = ctx.scratch("first")
        export(self.model, self.tokenizer, first, served=[self.dtype], noise=True)
        ref = ctx.store.put_folder(keys.weights(RUN, 0), first, attempt="bench")
        measured = gate.measured_tolerance(config, gate.read_expected(first).canary.noise)
        assert measured is not None
        self.tolerance = measured
        tally = Counter[str]()
        problems = []
        async with _engine(ctx, ref, threads) as engine:
            transfer = StoreTransfer(ctx.store)
            self.step()
            for number in range(count):
                self.step()
                changed = self.changed()
                for turn, place in enumerate(("", *PLACES)):
                    share = KINDS[(number + turn) % len(KINDS)](len(changed)) if place else 0
                    wrong = self.rng.sample(changed, share)
                    verdict = await self.push(engine, transfer, place, wrong)
                    tally[place or "passed"] += verdict.passed != bool(place)
                    tally[f"{place} by bits"] += bool(verdict.bits.wrong)
                    if verdict.bits.unread or verdict.passed == bool(place):
                        problems.append([place, str(verdict), verdict.bits.unverified])
                    if not place:
                        self.diffs.append((verdict.diff, verdict.mean))
                if not (number + 1) % 20:
                    print(number + 1, dict(tally), file=sys.stderr, flush=True)
            pauses = await self.pauses(engine, transfer, int(os.environ.get("PAUSES", "20")))
        results: dict[str, Any] = {"right": count, "passed": tally["passed"], "problems": problems}
        results |= {"tolerance": str(measured)}
        for place in PLACES:
            caught = {"refused": tally[place], "by_bits": tally[f"{place} by bits"]}
            results[place] = {"wrong": count} | caught
        return results | {
            "compared": verdict.bits.compared,
            "check_s": _spread(self.checks),
            "beside_sampling": pauses,
            "largest_difference": max(largest for largest, _ in self.diffs),
            "largest_mean_difference": max(mean for _, mean in self.diffs),
        }


@asynccontextmanager
async def _sampling(engine: Engine) -> AsyncIterator[list[float]]:
    """The engine samples one request after the other; yields when their tokens came."""
    stamps: list[float] = []
    body = {"model": engine.model, "prompt": [1, 2, 3, 4], "ignore_eos": True}

    async def sample(client: httpx.AsyncClient) -> None:
        while True:
            wanted = body | {"max_tokens": 150, "stream": True}
            async with client.stream("POST", "/v1/completions", json=wanted) as answer:
                async for line in answer.aiter_lines():
                    if line:
                        stamps.append(time.monotonic())

    async with httpx.AsyncClient(base_url=engine.url, timeout=600) as client:
        task = asyncio.create_task(sample(client))
        try:
            yield stamps
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    places = {"median": 0.5, "p95": 0.95, "max": 1.0}
    last = len(ordered) - 1
    return {name: round(ordered[round(share * last)], 4) for name, share in places.items()}


@asynccontextmanager
async def _engine(ctx: WorkerContext, ref: Any, threads: str) -> AsyncIterator[Engine]:
    host = HostInput(RUN, "engine", 0, "q", weights=ref)
    spec = await engine_spec(ctx, host, 1)
    env = {"OMP_NUM_THREADS": threads, "PYTHONPATH": str(ROOT)}
    spec = replace(spec, env=spec.env | env)
    process = ServerProcess(spec, home=ctx.home, run=RUN, host=host.host_id, epoch=1)
    try:
        await process.start()
        while not await spec.probe():
            assert not process.exited.is_set(), process.log_tail(4000)
            await asyncio.sleep(0.25)
        async with httpx.AsyncClient(base_url=spec.address, timeout=600) as client:
            yield Engine(client, spec.model)
    finally:
        await process.stop()


def _model(name: str, scratch: Path) -> tuple[Any, Any]:
    return random_policy(0, 256) if name == "random" else smollm2.make(scratch)


async def measure(model: str, dtype: str, count: int, seed: int = 0) -> dict[str, Any]:
    """One engine's share of the bench."""
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory(prefix="ratchet-gate-") as home:
        folder = Path(home)
        ctx = WorkerContext(home=folder, store_url=str(folder / "store"), own_queue="own")
        bench = Bench(folder, dtype, *_model(model, folder), random.Random(seed))
        return await bench.run(count, ctx, os.environ.get("THREADS", "1"))


def good(result: dict[str, Any]) -> bool:
    """Whether every right push passed, and every wrong one was refused for its bits."""
    refused = all(result[place]["by_bits"] == result[place]["wrong"] for place in PLACES)
    return refused and result["passed"] == result["right"] and not result["problems"]


def main() -> int:
    """Entry point; returns the exit status."""
    transformers.logging.disable_progress_bar()
    count, seed = (int(os.environ.get(*key)) for key in (("COUNT", "200"), ("SEED", "0")))
    results = {}
    for model in os.environ.get("MODELS", "random smollm2").split():
        for dtype in os.environ.get("DTYPES", "float32 bfloat16").split():
            results[f"{model} {dtype}"] = asyncio.run(measure(model, dtype, count, seed))
    ok = all(good(result) for result in results.values())
    print(json.dumps({"count": count, "results": results, "ok": ok}), flush=True)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
