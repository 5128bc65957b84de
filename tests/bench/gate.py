"""`make bench-gate`: whether the gate tells right weights from wrong ones, and what it costs.

For each of MODELS (random smollm2) and DTYPES (float32 bfloat16) one real engine takes COUNT (200)
versions, each of which one step of AdamW at lr 1e-6 made of the one before, and passes the gate
with them. Then COUNT pushes at each of three places are wrong: in the exported files, in the
stream into `load_weights`, and in what the engine holds after it has loaded. In turns all tensors
are stale, half of them, or one whose bits really differ. Each is pushed once and verified as a run
does it.

The last line of stdout is one JSON object: by model and dtype how many right pushes passed and how
many wrong ones were refused at each place, and how many of those by bits; the seconds of a check,
of its longest call, which is what holds generation up, and the largest canary differences of right
weights. Exits with 1 if a right push is refused or a wrong one passes.

RATCHET_SMOLLM2 names a folder with SmolLM2. THREADS (1) is what an engine computes with.
"""

import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
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
KINDS = ("stale", "half", "one")


@dataclass
class Timed:
    """An engine as transfers see it, and how long each call of it took."""

    inner: Any
    seconds: list[float] = field(default_factory=list)

    @property
    def model(self) -> str:
        return str(self.inner.model)

    @property
    def url(self) -> str:
        return str(self.inner.url)

    async def post(self, path: str, **body: Any) -> Any:
        began = time.monotonic()
        answer = await self.inner.post(path, **body)
        self.seconds.append(time.monotonic() - began)
        return answer

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
    calls: list[float] = field(default_factory=list)
    diffs: list[tuple[float, float]] = field(default_factory=list)

    def folder(self, version: int) -> Path:
        return self.home / f"v{version}"

    def step(self) -> Path:
        """The next version; the one before stays, others go."""
        if self.version:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.add_(torch.randn_like(parameter).sign(), alpha=LR)
        folder = self.folder(self.version)
        export(self.model, self.tokenizer, folder, self.dtype)
        for file in self.folder(self.version - 2).glob("*"):
            file.unlink()
        self.version += 1
        return folder

    def wrong(self, kind: str) -> list[str]:
        """Tensors of the last version whose bits are others than in the one before."""
        new, old = (load_file(self.folder(self.version - n) / WEIGHTS) for n in (1, 2))
        changed = [name for name in new if not torch.equal(new[name], old[name])]
        share = {"stale": len(changed), "half": len(changed) // 2, "one": 1}[kind]
        return self.rng.sample(changed, max(share, 1))

    async def push(
        self, engine: Timed, transfer: StoreTransfer, folder: Path, place: str
    ) -> Verdict:
        """One push, with a fault at `place`, and its check."""
        names = self.wrong(KINDS[self.version % len(KINDS)]) if place else []
        before = str(self.folder(self.version - 2))
        weights = Fetched(folder, gate.read_expected(folder))
        if place == "files":
            tensors, old = load_file(folder / WEIGHTS), load_file(f"{before}/{WEIGHTS}")
            save_file(tensors | {name: old[name] for name in names}, folder / WEIGHTS)
        if place == "stream":
            await engine.rpc("fault_in_stream", names=names, folder=before)
        async with activities._paused(engine, f"{self.version}.1a"):  # type: ignore[arg-type]
            await transfer.push(engine, weights)
        if place == "held":
            await engine.rpc("fault_in_held", names=names, folder=before)
        engine.seconds.clear()
        began = time.monotonic()
        verdict = await transfer.verify(engine, weights, self.tolerance)
        self.checks.append(time.monotonic() - began)
        self.calls.append(max(engine.seconds))
        return verdict

    async def run(self, count: int, ctx: WorkerContext, threads: str) -> dict[str, Any]:
        """All pushes; the last version's folder is left wrong by a fault in files alone."""
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
                "train": {"env": [{"id": "reverse-text"}]},
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
        results: dict[str, Any] = {
            "tolerance": str(measured),
            "right": 0,
            "passed": 0,
            "problems": [],
        }
        async with _engine(ctx, ref, threads) as engine:
            transfer = StoreTransfer(ctx.store)
            for place in ("", *PLACES):
                refused = by_bits = 0
                for _ in range(count):
                    self.step()
                    if place and self.version < 2:
                        self.step()
                    verdict = await self.push(
                        engine, transfer, self.folder(self.version - 1), place
                    )
                    refused += not verdict.passed
                    by_bits += bool(verdict.bits.wrong)
                    if verdict.bits.unread or verdict.passed == bool(place):
                        results["problems"].append([place, str(verdict), verdict.bits.unverified])
                    if not place:
                        self.diffs.append((verdict.diff, verdict.mean))
                    if place == "files":
                        # The next version is compared with this one.
                        export(
                            self.model, self.tokenizer, self.folder(self.version - 1), self.dtype
                        )
                if place:
                    results[place] = {"wrong": count, "refused": refused, "by_bits": by_bits}
                else:
                    results |= {"right": count, "passed": count - refused}
                print(place or "right", results, file=sys.stderr, flush=True)
        return results | {
            "compared": verdict.bits.compared,
            "check_s": _spread(self.checks),
            "longest_call_s": _spread(self.calls),
            "largest_difference": max(largest for largest, _ in self.diffs),
            "largest_mean_difference": max(mean for _, mean in self.diffs),
        }


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    places = {"median": 0.5, "p95": 0.95, "max": 1.0}
    last = len(ordered) - 1
    return {name: round(ordered[round(share * last)], 4) for name, share in places.items()}


@asynccontextmanager
async def _engine(ctx: WorkerContext, ref: Any, threads: str) -> AsyncIterator[Timed]:
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
            yield Timed(activities._Engine(client, spec.model))
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
