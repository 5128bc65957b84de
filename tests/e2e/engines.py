"""One real vLLM engine for all tests of engines and rollouts: it takes 20 s to start."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from temporalio.testing import ActivityEnvironment

from ratchet.activities.contracts.hosting import HostInput
from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.training import SyncInput, SyncResult
from ratchet.activities.hosting.process import ServerProcess
from ratchet.activities.hosting.spec import ServerSpec
from ratchet.activities.inference import fingerprints
from ratchet.activities.inference.activities import InferenceActivities
from ratchet.activities.inference.engine import engine_spec
from ratchet.activities.inference.load import parse_load
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.storage import keys
from tests.e2e.policies import random_policy

RUN = "engine-test"
SEQ_LEN = 256
CANARY_TEXT = "reverse abcdefgh, then xyz"


class Policy:
    """A random Qwen3, small and untied, in a folder as the trainer exports it."""

    def __init__(self, seed: int, initializer_range: float = 0.2) -> None:
        self.model, self.tokenizer = random_policy(
            seed, SEQ_LEN, initializer_range=initializer_range
        )

    def logprobs(self, token_ids: list[int]) -> list[float]:
        """Log-probabilities of `token_ids[1:]`."""
        import torch

        with torch.no_grad():
            logits = self.model(torch.tensor([token_ids])).logits[0, :-1]
        scores = torch.log_softmax(logits, dim=-1)
        picked = scores.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
        return [float(score) for score in picked]

    def export(
        self,
        ctx: WorkerContext,
        version: int,
        *,
        wrong_by: float = 0.0,
        run: str = RUN,
        stale: str = "",
    ) -> ArtifactRef:
        """Commits the policy as `version` of `run`; its canary is off by `wrong_by` nats at one
        token. Of a `stale` tensor the fingerprint is that of other bits than lie there.
        """
        folder = ctx.scratch(f"export-{version}")
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        tensors = dict(self.model.state_dict())
        if stale:
            tensors[stale] = tensors[stale] + 1e-6
        fingerprints.write(folder, fingerprints.take(tensors.items(), ["float32"]))
        token_ids = self.tokenizer.encode(CANARY_TEXT)
        logprobs = self.logprobs(token_ids)
        logprobs[3] += wrong_by
        (folder / "canary.json").write_text(
            json.dumps({"token_ids": token_ids, "logprobs": logprobs})
        )
        return ctx.store.put_folder(keys.weights(run, version), folder, attempt="test")


@dataclass
class Served:
    """A running engine with two policies; `weights` are the first one's, as version 0."""

    ctx: WorkerContext
    first: Policy
    second: Policy
    weights: ArtifactRef
    spec: ServerSpec
    process: ServerProcess

    async def sync(
        self, version: int, weights: ArtifactRef, push: int, oldest: int | None = None
    ) -> SyncResult:
        """A push of `weights` with its gate, as the run's activity does it."""
        sync = SyncInput(
            run_id=RUN,
            version=version,
            weights=weights,
            engine_index=0,
            engine_epoch=1,
            url=self.spec.address,
            model=self.spec.model,
            push=push,
            tolerance=1e-4,
            oldest=oldest,
        )
        activities = InferenceActivities(self.ctx)
        return await ActivityEnvironment().run(activities.sync_weights, sync)

    async def sampling(self, client: httpx.AsyncClient) -> int:
        """How many requests it works on."""
        told = (await client.get(f"{self.spec.address}/metrics")).raise_for_status().text
        return parse_load(told, index=0, epoch=1, max_model_len=SEQ_LEN).running

    async def sample(
        self, client: httpx.AsyncClient, prompt: list[int], model: str = ""
    ) -> dict[str, Any]:
        """One answer of 200 tokens, as vLLM tells it; `model`: of an adapter by its name."""
        answer = await client.post(
            f"{self.spec.address}/inference/v1/generate",
            json={
                "model": model or self.spec.model,
                "token_ids": prompt,
                "sampling_params": {
                    "max_tokens": 200,
                    "temperature": 1.0,
                    "top_p": 1.0,
                    "logprobs": 1,
                    "ignore_eos": True,
                },
            },
        )
        answer.raise_for_status()
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice


@asynccontextmanager
async def engine(home: Path) -> AsyncIterator[Served]:
    """An engine that is healthy and serves the first policy. State and logs are in `home`."""
    ctx = WorkerContext(home=home, store_url=str(home / "store"), own_queue="own")
    config = {
        "max_steps": 1,
        "seed": 3,
        "train": {"env": [{"id": "reverse-text"}]},
        "trainer": {"seq_len": SEQ_LEN},
        "inference": {"kv_cache_gib": 0.25},
    }
    ctx.store.put_json(keys.config(RUN), config)
    first, second = Policy(1), Policy(2)
    weights = first.export(ctx, 0)
    async with serving(ctx, weights) as (spec, process):
        yield Served(ctx, first, second, weights, spec, process)


@asynccontextmanager
async def serving(
    ctx: WorkerContext, weights: ArtifactRef
) -> AsyncIterator[tuple[ServerSpec, ServerProcess]]:
    """An engine of RUN, whose config lies in the store, healthy with `weights`."""
    host = HostInput(RUN, "engine", 0, "q", weights=weights)
    spec = await engine_spec(ctx, host, 1)
    process = ServerProcess(spec, home=ctx.home, run=RUN, host=host.host_id, epoch=1)
    try:
        await process.start()
        while not await spec.probe():
            assert not process.exited.is_set(), process.log_tail(4000)
            await asyncio.sleep(0.25)
        yield spec, process
    finally:
        await process.stop()
