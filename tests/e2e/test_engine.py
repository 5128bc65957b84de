"""A real vLLM engine: started from its spec, given weights, gated, and leaving nothing behind.

The reference for every log-probability is transformers in float32.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import httpx
import psutil
import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.context import WorkerContext
from activities.contracts import names
from activities.contracts.hosting import HostInput
from activities.contracts.training import SyncInput, SyncResult
from activities.hosting import keeper, reaper
from activities.hosting.process import ServerProcess
from activities.hosting.spec import ServerSpec
from activities.inference.activities import InferenceActivities
from activities.inference.engine import engine_spec
from activities.storage import keys
from activities.storage.refs import ArtifactRef
from tests.e2e.policies import random_policy

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

RUN = "engine-test"
SEQ_LEN = 256
CANARY_TEXT = "reverse abcdefgh, then xyz"


class Policy:
    """A random Qwen3, small and untied, in a folder as the trainer exports it."""

    def __init__(self, seed: int) -> None:
        self.model, self.tokenizer = random_policy(seed, SEQ_LEN, initializer_range=0.2)

    def logprobs(self, token_ids: list[int]) -> list[float]:
        """Log-probabilities of `token_ids[1:]`."""
        import torch

        with torch.no_grad():
            logits = self.model(torch.tensor([token_ids])).logits[0, :-1]
        scores = torch.log_softmax(logits, dim=-1)
        picked = scores.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
        return [float(score) for score in picked]

    def export(self, ctx: WorkerContext, version: int, *, wrong_by: float = 0.0) -> ArtifactRef:
        """Commits the policy as `version`; its canary is off by `wrong_by` nats at one token."""
        folder = ctx.scratch(f"export-{version}")
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        token_ids = self.tokenizer.encode(CANARY_TEXT)
        logprobs = self.logprobs(token_ids)
        logprobs[3] += wrong_by
        (folder / "canary.json").write_text(
            json.dumps({"token_ids": token_ids, "logprobs": logprobs})
        )
        return ctx.store.put_folder(keys.weights(RUN, version), folder, attempt="test")


@dataclass
class Stack:
    """A running engine with two policies."""

    ctx: WorkerContext
    first: Policy
    second: Policy
    weights: ArtifactRef
    spec: ServerSpec
    process: ServerProcess
    startup_s: float

    async def sync(self, version: int, weights: ArtifactRef, push: int) -> SyncResult:
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
        )
        activities = InferenceActivities(self.ctx)
        return await ActivityEnvironment().run(activities.sync_weights, sync)

    async def sample(self, client: httpx.AsyncClient, prompt: list[int]) -> dict[str, Any]:
        answer = await client.post(
            f"{self.spec.address}/inference/v1/generate",
            json={
                "model": self.spec.model,
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


@pytest.fixture(scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    home = tmp_path_factory.mktemp("engine")
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
    host = HostInput(RUN, "engine", 0, "q", weights=weights)
    spec = await engine_spec(ctx, host, 1)
    process = ServerProcess(spec, home=home, run=RUN, host=host.host_id, epoch=1)
    started = time.monotonic()
    try:
        await process.start()
        while not await spec.probe():
            assert not process.exited.is_set(), process.log_tail(4000)
            await asyncio.sleep(0.25)
        startup_s = time.monotonic() - started
        print(f"engine healthy after {startup_s:.1f} s")
        yield Stack(ctx, first, second, weights, spec, process, startup_s)
    finally:
        await process.stop()


async def test_first_version_passes_the_gate(stack: Stack) -> None:
    result = await stack.sync(0, stack.weights, push=1)
    print(f"canary difference {result.max_diff:.1e}")
    assert (result.label, result.rejected) == ("0.1a", [])
    assert result.max_diff <= 1e-5


async def test_push_in_flight_labels_every_token(stack: Stack) -> None:
    """Tokens carry the label of the weights that sampled them, as their log-probabilities show."""
    weights = stack.second.export(stack.ctx, 1)
    prompts = [stack.first.tokenizer.encode(f"reverse word number {n}") for n in range(16)]
    pushed = asyncio.Event()
    answers: list[tuple[list[int], dict[str, Any]]] = []

    async def keep_sampling(client: httpx.AsyncClient, prompt: list[int]) -> None:
        while not pushed.is_set():
            answers.append((prompt, await stack.sample(client, prompt)))

    async with httpx.AsyncClient(timeout=60) as client:
        flying = [asyncio.create_task(keep_sampling(client, prompt)) for prompt in prompts]
        await asyncio.sleep(0.3)
        began = time.monotonic()
        result = await stack.sync(1, weights, push=2)
        print(f"push and gate with {len(prompts)} in flight: {time.monotonic() - began:.2f} s")
        pushed.set()
        await asyncio.gather(*flying)
    assert result.max_diff <= 1e-5
    assert all(len(choice["token_ids"]) == 200 for _, choice in answers)
    switched = [(p, choice) for p, choice in answers if len(choice["weight_versions"]) == 2]
    assert switched
    policies = {"0.1a": stack.first, "1.2a": stack.second}
    worst = 0.0
    for prompt, choice in switched[:8]:
        spans = choice["weight_versions"]
        assert [span["version"] for span in spans] == list(policies)
        assert [spans[0]["start"], spans[0]["end"], spans[1]["end"]] == [0, spans[1]["start"], 200]
        sampled = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        for span in spans:
            policy = policies[span["version"]]
            expected = policy.logprobs(prompt + choice["token_ids"])[len(prompt) - 1 :]
            for index in range(span["start"], span["end"]):
                worst = max(worst, abs(expected[index] - sampled[index]))
    print(f"{len(switched)} of {len(answers)} requests switched; worst token {worst:.1e}")
    assert worst <= 1e-4


async def test_temperature_is_in_the_logprobs(stack: Stack) -> None:
    prompt = stack.first.tokenizer.encode("reverse warmth")
    body = {
        "model": stack.spec.model,
        "token_ids": prompt,
        "sampling_params": {"max_tokens": 8, "temperature": 2.0, "logprobs": 1},
    }
    async with httpx.AsyncClient(timeout=30) as client:
        answer = await client.post(f"{stack.spec.address}/inference/v1/generate", json=body)
    choice = answer.json()["choices"][0]

    import torch

    with torch.no_grad():
        logits = stack.second.model(torch.tensor([prompt])).logits[0, -1] / 2.0
    expected = float(torch.log_softmax(logits, dim=-1)[choice["token_ids"][0]])
    assert choice["logprobs"]["content"][0]["logprob"] == pytest.approx(expected, abs=1e-4)


async def test_wrong_canary_is_refused_with_both_numbers(stack: Stack) -> None:
    weights = stack.second.export(stack.ctx, 2, wrong_by=0.25)
    token_ids = stack.second.tokenizer.encode(CANARY_TEXT)
    right = stack.second.logprobs(token_ids)[3]
    with pytest.raises(ApplicationError) as error:
        await stack.sync(2, weights, push=3)
    assert error.value.type == names.GATE_FAILED
    assert list(error.value.details) == ["2.3a", "2.3b"]
    message = error.value.message
    assert "canary token 4" in message and f"trainer {right + 0.25:.6f}" in message
    engine = float(message.split("engine log-probability ")[1].split(",")[0])
    assert engine == pytest.approx(right, abs=1e-5)
    # The engine still serves, under a label that nobody accepts.
    async with httpx.AsyncClient(timeout=30) as client:
        choice = await stack.sample(client, token_ids)
    assert [span["version"] for span in choice["weight_versions"]] == ["2.3b"]


async def test_stale_name_is_not_pushed_to(stack: Stack) -> None:
    spec = stack.spec
    stack.spec = replace(spec, model="policy-of-another-epoch")
    with pytest.raises(ApplicationError) as error:
        await stack.sync(0, stack.weights, push=4)
    stack.spec = spec
    assert error.value.type == names.ENGINE_LOST


async def test_killed_engine_leaves_no_process(stack: Stack) -> None:
    (record,) = reaper.records(stack.ctx.home)
    table = keeper.process_table()
    family = [psutil.Process(pid) for pid in keeper.descendants(record.keeper[0], table)]
    assert len(family) >= 2
    print("engine memory", sum(p.memory_info().rss for p in family) >> 20, "MiB")
    os.kill(stack.process.pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        await stack.process.exited.wait()
    assert not any(process.is_running() for process in family)
    with pytest.raises(ApplicationError) as error:
        await stack.sync(0, stack.weights, push=5)
    assert error.value.type == names.ENGINE_LOST
