"""Engine and trainer on one GPU: a random Qwen3 trains for some steps, each version goes through
the gate, and the recorded batches are trained again.

Real parts: the trainer process, the engine as a run starts it, store, transfer, gate. There is no
Temporal server and no environment: this drives them step by step, for what only a GPU can show.
"""

import asyncio
import contextlib
import random
import shutil
import statistics
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from ratchet.activities.contracts.hosting import HostInput
from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.hosting.process import ServerProcess
from ratchet.activities.hosting.spec import ServerSpec
from ratchet.activities.inference.engine import engine_spec
from ratchet.activities.inference.store_transfer import StoreTransfer
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.storage import keys
from ratchet.activities.storage.batch import Sample, encode_batch
from ratchet.activities.training.bits import WEIGHTS, first_difference
from ratchet.activities.training.client import Loaded, TrainerClient
from ratchet.activities.training.memory import GIB, Shape, trainer_parts
from ratchet.activities.training.server import process_spec
from ratchet.configs.run import RunConfig
from ratchet.configs.trainer import TrainerConfig
from ratchet.configs.upgrades import config_document
from tests.gpu import compat
from tests.gpu.drained import Drained, Reply, measured

RUN = "one-gpu"
PLAIN_STEPS = 3
"""Steps without deterministic mode, which is slower: what a run takes by default."""
SHARE_OF_STEPS = 0.55
"""Of the time there is; the rest is for the replay."""


@dataclass(frozen=True)
class Size:
    """A random Qwen3, and a batch for it: `groups` prompts of `prompt` tokens, to each of which
    `members` replies of `reply` tokens are sampled.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    groups: int
    members: int
    prompt: int
    reply: int
    micro_batch_tokens: int
    dtype: str

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.prompt + self.reply


SIZES = {
    "0.6b": Size(28, 1024, 16, 8, 128, 3072, 151936, 8, 8, 64, 448, 8192, "bfloat16"),
    # The vocabulary is larger than the tokenizer's, as above.
    "tiny": Size(2, 64, 2, 1, 32, 128, 1000, 2, 4, 8, 24, 256, "float32"),
}


def make_model(size: Size, folder: Path, seed: int) -> None:
    """Writes version 0: random weights, with fingerprints, canary and the noise of kernels."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from ratchet.activities.training.model import export
    from ratchet.activities.training.tokenizer import build_tokenizer

    torch.manual_seed(seed)
    tokenizer = build_tokenizer(size.length)
    about = Qwen3Config(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=max(4096, size.length),
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(about).float().eval()
    export(model, tokenizer, folder, "float32", served=[size.dtype], noise=True)


def config_of(size: Size, steps: int, folder: Path, *, deterministic: bool) -> RunConfig:
    """The config that trainer and engine get."""
    return RunConfig.model_validate(
        {
            "max_steps": steps,
            "model": {"name": str(folder)},
            "train": {
                "env": [{"id": "reverse-text"}],
                "batch_size": size.groups * size.members,
                "group_size": size.members,
                "sampling": {"max_tokens": size.reply},
            },
            "trainer": {
                "seq_len": size.length,
                "micro_batch_tokens": size.micro_batch_tokens,
                "compute_dtype": size.dtype,
                "deterministic": deterministic,
                "optim": {"lr": 1e-5},
            },
            "inference": {
                "dtype": size.dtype,
                "gpu_memory_utilization": 0.35,
                "kv_cache_gib": 0.25,
                "max_num_seqs": size.groups * size.members,
            },
        }
    )


@contextlib.asynccontextmanager
async def serving(ctx: WorkerContext, spec: ServerSpec, host: HostInput) -> AsyncIterator[None]:
    """A server that is healthy, and gone afterwards."""
    process = ServerProcess(spec, home=ctx.home, run=RUN, host=host.host_id, epoch=1)
    try:
        await process.start()
        while not await spec.probe():
            if process.exited.is_set():
                raise RuntimeError(f"{spec.name} ended:\n{process.log_tail(6000)}")
            await asyncio.sleep(0.25)
        yield
    finally:
        await process.stop()


@contextlib.asynccontextmanager
async def training(
    ctx: WorkerContext, run: RunConfig, first: Path, index: int
) -> AsyncIterator[tuple[TrainerClient, Loaded]]:
    """A trainer process with version 0."""
    host = HostInput(RUN, "trainer", index, "q")
    trainer: TrainerConfig = run.trainer
    spec = process_spec(ctx.home, host, 1, trainer)
    async with serving(ctx, spec, host):
        client = TrainerClient(spec.address)
        yield client, await client.load(first, config_document(run), checkpoint=False)


def to_samples(prompts: list[list[int]], replies: list[list[Reply]], step: int) -> list[Sample]:
    """A batch. A reply's reward is its share of even tokens, its advantage the reward less the
    group's mean.
    """
    samples = []
    for number, (prompt, group) in enumerate(zip(prompts, replies, strict=True)):
        rewards = [
            sum(t % 2 == 0 for t in reply.token_ids) / len(reply.token_ids) for reply in group
        ]
        mean = statistics.fmean(rewards)
        for place, (reply, reward) in enumerate(zip(group, rewards, strict=True)):
            before, count = len(prompt), len(reply.token_ids)
            samples.append(
                Sample(
                    group=f"train/{step}.{number}",
                    rollout=place,
                    env="reverse-text",
                    reward=reward,
                    temperature=1.0,
                    token_ids=prompt + reply.token_ids,
                    loss_mask=[False] * before + [True] * count,
                    logprobs=[0.0] * before + reply.logprobs,
                    advantages=[0.0] * before + [reward - mean] * count,
                    versions=[-1] * before + [reply.version] * count,
                )
            )
    return samples


@dataclass
class Measured:
    """What the program reports; `problems` say what did not hold."""

    steps: int = 0
    problems: list[str] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    rollouts_s: list[float] = field(default_factory=list)
    commit_s: list[float] = field(default_factory=list)
    pushes: list[dict[str, Any]] = field(default_factory=list)


class Program:
    """One measurement in the folder `home`, of at most `limit_s` seconds."""

    def __init__(self, size: Size, home: Path, *, steps: int, seed: int, limit_s: float) -> None:
        self.size, self.steps, self.seed = size, steps, seed
        self.limit_s, self.began = limit_s, time.monotonic()
        self.ctx = WorkerContext(home=home, store_url=str(home / "store"), own_queue="own")
        self.batches = home / "batches"
        self.batches.mkdir(parents=True)
        self.found = Measured()
        self.last: ArtifactRef | None = None

    async def run(self) -> dict[str, Any]:
        """Trains, replays and measures; returns the report."""
        model = self.ctx.home / "model"
        if not (model / keys.CANARY_FILE).exists():
            make_model(self.size, model, self.seed)
        self._say("version 0 is there")
        self.config = config_of(self.size, self.steps, model, deterministic=True)
        store = self.ctx.store
        store.put_json(keys.config(RUN), config_document(self.config))
        self.first = StoreTransfer(store).prepare(keys.weights(RUN, 0), model, epoch=1, attempt="a")
        folder = store.fetch_folder(self.first)
        async with contextlib.AsyncExitStack() as stack:
            (trainer, loaded), engine = await asyncio.gather(
                stack.enter_async_context(training(self.ctx, self.config, folder, 0)),
                stack.enter_async_context(self._engine()),
            )
            self._say("trainer and engine are up")
            await self._steps(trainer, engine)
        plain = config_of(self.size, self.steps, model, deterministic=False)
        async with contextlib.AsyncExitStack() as stack:
            (same, _), (other, _) = await asyncio.gather(
                stack.enter_async_context(training(self.ctx, self.config, folder, 1)),
                stack.enter_async_context(training(self.ctx, plain, folder, 2)),
            )
            self._say("the trainers that train again are up")
            replay = await self._again(same, 1, self.found.steps)
            fast = await self._again(other, 2, min(PLAIN_STEPS, self.found.steps))
        difference = replay["difference"]
        if difference is not None:
            self.found.problems.append(f"the replay has other bits: {difference}")
        if self.found.steps < self.steps:
            self.found.problems.append(f"time was left for {self.found.steps} steps only")
        return self._report(loaded, replay, fast)

    @property
    def _left(self) -> float:
        return self.limit_s - (time.monotonic() - self.began)

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:.0f} s: {text}", file=sys.stderr, flush=True)

    @contextlib.asynccontextmanager
    async def _engine(self) -> AsyncIterator[Drained]:
        host = HostInput(RUN, "engine", 0, "q", weights=self.first)
        spec = compat.started_as_it_can(await engine_spec(self.ctx, host, 1))
        limits = httpx.Timeout(300.0, connect=5.0)
        tolerance = measured(self.ctx.store, self.first, self.config)
        async with (
            serving(self.ctx, spec, host),
            httpx.AsyncClient(base_url=spec.address, timeout=limits, trust_env=False) as client,
        ):
            yield Drained(client, spec, self.ctx.store, tolerance)

    async def _steps(self, trainer: TrainerClient, engine: Drained) -> None:
        await self._push(engine, 0, self.first)
        while self.found.steps < self.steps and not self.found.problems:
            if self._left < (1 - SHARE_OF_STEPS) * self.limit_s:
                break
            await self._step(engine, trainer, self.found.steps + 1)
            self._say(f"step {self.found.steps}: {engine.pushes[-1]}")
        self.found.pushes = engine.report()

    async def _push(self, engine: Drained, version: int, weights: ArtifactRef) -> None:
        push = await engine.push(version, weights)
        if not push.passed:
            self.found.problems.append(f"the gate refused version {version}: {push}")

    async def _step(self, engine: Drained, trainer: TrainerClient, step: int) -> None:
        size, rng = self.size, random.Random(f"{self.seed}/{step}")
        prompts = [
            [rng.randrange(size.vocab) for _ in range(size.prompt)] for _ in range(size.groups)
        ]
        began = time.monotonic()
        flat = await asyncio.gather(
            *(
                engine.sample(prompt, size.reply, rng.randrange(2**31))
                for prompt in prompts
                for _ in range(size.members)
            )
        )
        self.found.rollouts_s.append(time.monotonic() - began)
        groups = [flat[at : at + size.members] for at in range(0, len(flat), size.members)]
        batch = self.batches / str(step)
        batch.write_bytes(encode_batch(to_samples(prompts, groups, step)))
        out = self.ctx.scratch(f"export-{step}")
        scores = self.batches / f"{step}.scores"
        metrics = await trainer.step(step, batch, out, token_logprobs=scores)
        self.found.metrics.append(metrics)
        began = time.monotonic()
        transfer = StoreTransfer(self.ctx.store)
        weights = transfer.prepare(keys.weights(RUN, step), out, epoch=1, attempt="a")
        shutil.rmtree(out)
        self.found.commit_s.append(time.monotonic() - began)
        await self._push(engine, step, weights)
        # One version is some gigabytes.
        if self.last is not None:
            self.ctx.store.delete(self.last)
        self.last = weights
        self.found.steps = step

    async def _again(self, trainer: TrainerClient, index: int, steps: int) -> dict[str, Any]:
        """Trains the recorded batches again. `difference`: the first one of scores or weights from
        what was recorded, of the last step that was.
        """
        recorded = []
        out = self.ctx.scratch(f"again-{index}")
        for step in range(1, steps + 1):
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            scores = self.batches / f"{step}.again-{index}"
            batch = self.batches / str(step)
            recorded.append(await trainer.step(step, batch, out, token_logprobs=scores))
        self._say(f"{steps} steps were trained again")
        others = [
            step
            for step in range(1, steps + 1)
            if (self.batches / f"{step}.again-{index}").read_bytes()
            != (self.batches / f"{step}.scores").read_bytes()
        ]
        difference = None if not others else f"log-probabilities of step {others[0]}"
        if difference is None and steps == self.found.steps and self.last is not None:
            weights = self.ctx.store.fetch_folder(self.last)
            different = first_difference(out, weights, WEIGHTS)
            difference = None if different is None else str(different)
        shutil.rmtree(out)
        return {"steps": steps, "difference": difference, "metrics": recorded}

    def _report(
        self, loaded: Loaded, replay: dict[str, Any], fast: dict[str, Any]
    ) -> dict[str, Any]:
        size, found = self.size, self.found
        shape = Shape(
            layers=size.layers,
            hidden=size.hidden,
            heads=size.heads * size.head_dim,
            kv_heads=size.kv_heads * size.head_dim,
            inner=size.inner,
            vocab=size.vocab,
            qk_norm=True,
        )
        parts = trainer_parts(shape, self.config, gpu=loaded.device == "cuda")
        estimate = sum(parts.values()) / GIB
        measured = max((m["perf/peak_memory"] for m in found.metrics), default=0.0)
        sampled = size.groups * size.members * size.reply
        return {
            "device": device(loaded.device),
            "vllm": compat.vllm_version(),
            "torch": loaded.torch_version,
            "parameters": shape.parameters,
            "seconds": round(time.monotonic() - self.began, 1),
            "steps": found.steps,
            "problems": found.problems,
            "gates": found.pushes,
            "replay": {key: replay[key] for key in ("steps", "difference")},
            "peak_gib": {"measured": measured, "estimated": estimate},
            "deterministic": speed(found.metrics),
            "plain": speed(fast["metrics"]),
            "engine_tokens_per_s": median(sampled / s for s in found.rollouts_s),
            "commit_s": median(found.commit_s),
            **{
                key: median(p[key] for p in found.pushes) for key in ("pause_s", "push_s", "gate_s")
            },
            "losses": [m.get("loss") for m in found.metrics],
        }


def median(values: Any) -> float | None:
    """Rounded; None of nothing."""
    known = list(values)
    return round(statistics.median(known), 4) if known else None


def speed(metrics: list[dict[str, float]]) -> dict[str, float | None]:
    """Medians over steps but the first, which warms up."""
    later = metrics[1:]
    names = {
        "tokens_per_s": "perf/throughput",
        "mfu": "perf/mfu",
        "train_s": "seconds_train",
        "export_s": "seconds_export",
    }
    return {name: median(one[key] for one in later if key in one) for name, key in names.items()}


def device(kind: str) -> str:
    """Its name."""
    import torch

    return torch.cuda.get_device_name() if kind == "cuda" else kind
