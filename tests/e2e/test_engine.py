"""A real vLLM engine: started from its spec, given weights, and gated.

The reference for every log-probability is transformers in float32. What is left of an engine that
was killed is looked at in `test_rollouts.py`, whose last tests are the last of the engine, too.
"""

import asyncio
import time
from dataclasses import replace
from typing import Any

import httpx
import pytest
from temporalio.exceptions import ApplicationError

from ratchet.activities.contracts import names
from ratchet.activities.inference.load import executing_share
from tests.e2e.engines import CANARY_TEXT, Served

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="session"),
]


async def test_first_version_passes_the_gate(served: Served) -> None:
    result = await served.sync(0, served.weights, push=1)
    print(f"canary difference {result.max_diff:.1e}")
    assert (result.label, result.rejected) == ("0.1a", [])
    assert result.max_diff <= 1e-5
    assert result.unverified == "", "all bits were compared"


async def test_push_in_flight_labels_every_token(served: Served) -> None:
    """Tokens carry the label of the weights that sampled them, as their log-probabilities show."""
    weights = served.second.export(served.ctx, 1)
    prompts = [served.first.tokenizer.encode(f"reverse word number {n}") for n in range(16)]
    pushed = asyncio.Event()
    answers: list[tuple[list[int], dict[str, Any]]] = []

    async def keep_sampling(client: httpx.AsyncClient, prompt: list[int]) -> None:
        while not pushed.is_set():
            answers.append((prompt, await served.sample(client, prompt)))

    async with httpx.AsyncClient(timeout=60) as client:
        flying = [asyncio.create_task(keep_sampling(client, prompt)) for prompt in prompts]
        async with asyncio.timeout(60):
            while await served.sampling(client) < len(prompts) // 2:
                await asyncio.sleep(0.02)
        began = time.monotonic()
        result = await served.sync(1, weights, push=2)
        print(f"push and gate with {len(prompts)} in flight: {time.monotonic() - began:.2f} s")
        pushed.set()
        await asyncio.gather(*flying)
    assert result.max_diff <= 1e-5
    assert all(len(choice["token_ids"]) == 200 for _, choice in answers)
    switched = [(p, choice) for p, choice in answers if len(choice["weight_versions"]) == 2]
    assert switched
    policies = {"0.1a": served.first, "1.2a": served.second}
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


async def test_an_engine_that_is_paused_executes_nothing(served: Served) -> None:
    prompt = served.first.tokenizer.encode("abc")
    async with httpx.AsyncClient(base_url=served.spec.address, timeout=60) as client:
        began = time.monotonic()
        await served.sample(client, prompt)
        unpaused_s = time.monotonic() - began
        flying = asyncio.create_task(served.sample(client, prompt))
        while not flying.done() and not await served.sampling(client):
            await asyncio.sleep(0.01)
        await client.post("/pause", params={"mode": "keep"})
        held = asyncio.create_task(served.sample(client, prompt))
        await asyncio.wait([held], timeout=3 * unpaused_s)
        paused = await executing_share(client), held.done()
        await client.post("/resume")
        assert paused == (0.0, False)
        await asyncio.gather(flying, held)
        assert await executing_share(client) == 1.0


async def test_temperature_is_in_the_logprobs(served: Served) -> None:
    prompt = served.first.tokenizer.encode("reverse warmth")
    body = {
        "model": served.spec.model,
        "token_ids": prompt,
        "sampling_params": {"max_tokens": 8, "temperature": 2.0, "logprobs": 1},
    }
    async with httpx.AsyncClient(timeout=30) as client:
        answer = await client.post(f"{served.spec.address}/inference/v1/generate", json=body)
    choice = answer.json()["choices"][0]

    import torch

    with torch.no_grad():
        logits = served.second.model(torch.tensor([prompt])).logits[0, -1] / 2.0
    expected = float(torch.log_softmax(logits, dim=-1)[choice["token_ids"][0]])
    assert choice["logprobs"]["content"][0]["logprob"] == pytest.approx(expected, abs=1e-4)


async def test_wrong_canary_is_refused_with_both_numbers(served: Served) -> None:
    weights = served.second.export(served.ctx, 2, wrong_by=0.25)
    token_ids = served.second.tokenizer.encode(CANARY_TEXT)
    right = served.second.logprobs(token_ids)[3]
    with pytest.raises(ApplicationError) as error:
        await served.sync(2, weights, push=3)
    assert error.value.type == names.GATE_FAILED
    assert list(error.value.details) == ["2.3a", "2.3b"]
    message = error.value.message
    assert "canary token 4" in message and f"trainer {right + 0.25:.6f}" in message
    engine = float(message.split("engine log-probability ")[1].split(",")[0])
    assert engine == pytest.approx(right, abs=1e-5)
    # The engine still serves, under a label that nobody accepts.
    async with httpx.AsyncClient(timeout=30) as client:
        choice = await served.sample(client, token_ids)
    assert [span["version"] for span in choice["weight_versions"]] == ["2.3b"]


async def test_one_stale_tensor_is_refused_by_name(served: Served) -> None:
    """Log-probabilities do not show it: it differs by a step at lr 1e-6."""
    name = "model.layers.1.self_attn.k_proj.weight"
    weights = served.second.export(served.ctx, 3, stale=name)
    with pytest.raises(ApplicationError) as error:
        await served.sync(3, weights, push=5)
    assert error.value.type == names.GATE_FAILED
    assert f"1 wrong tensors: {name} (rank 0): expected " in error.value.message
    difference = error.value.message.split("difference ")[1].split(",")[0]
    assert float(difference) <= 1e-4


async def test_stale_name_is_not_pushed_to(served: Served) -> None:
    spec = served.spec
    served.spec = replace(spec, model="policy-of-another-epoch")
    with pytest.raises(ApplicationError) as error:
        await served.sync(0, served.weights, push=4)
    served.spec = spec
    assert error.value.type == names.ENGINE_LOST
