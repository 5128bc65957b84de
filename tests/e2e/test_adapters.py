"""Adapters alone on the real CPU engine: each version under its own name, gated and kept apart.

The reference for every log-probability is transformers with peft in float32.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import pytest_asyncio
from temporalio.exceptions import ApplicationError

from ratchet.activities.contracts import names
from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.inference import fingerprints
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.storage import keys
from ratchet.activities.storage.batch import decode_batch
from ratchet.activities.storage.store import ArtifactStore
from ratchet.activities.storage.token_logprobs import decode_token_logprobs
from ratchet.activities.training import adapters
from ratchet.configs.load import validate
from ratchet.configs.model import ModelConfig
from ratchet.configs.trainer import LoraConfig
from ratchet.configs.upgrades import config_document
from ratchet.worker.stack import Stack
from tests.e2e.driving import ENDED, ENGINE, kill_server, launch, wait_until
from tests.e2e.engines import RUN, SEQ_LEN, Policy, Served, serving

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

LORA = LoraConfig(rank=4, alpha=6)
"""B is scaled by 1.5, which is no power of two."""


@dataclass
class Adapted:
    """A policy with a random adapter on it, committed as a version of RUN."""

    policy: Policy
    weights: ArtifactRef

    @staticmethod
    def make(ctx: WorkerContext, version: int, stale: str = "") -> "Adapted":
        """With `stale`, the tensor whose committed fingerprint is that of other bits."""
        import torch

        policy = Policy(1)
        handle = adapters.adapt(policy.model, LORA, ModelConfig())
        torch.manual_seed(version)
        for name, tensor in policy.model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(tensor, std=0.1)
        base = fingerprints.read(ctx.store.fetch_folder(ctx.store.require(keys.weights(RUN, 0))))
        assert base is not None
        folder = ctx.scratch(f"adapter-{version}")
        adapters.export(policy.model, handle, policy.tokenizer, folder, base, "float32")
        if stale:
            taken = fingerprints.read(folder)
            assert taken is not None
            taken.dtypes["float32"][stale] = "0" * 16
            fingerprints.write(folder, taken)
        ref = ctx.store.put_folder(keys.weights(RUN, version), folder, attempt="test")
        return Adapted(policy, ref)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def based(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """An engine for adapters, verified at its base: three of them at once, three in memory."""
    home = tmp_path_factory.mktemp("adapters")
    ctx = WorkerContext(home=home, store_url=str(home / "store"), own_queue="own")
    env = {
        "env": [{"id": "reverse-text"}],
        "sampling": {"max_tokens": 16},
        "max_lag": 1,
        "max_off_policy_steps": 1,
    }
    config = {
        "max_steps": 9,
        "seed": 3,
        "train": env,
        "eval": {"sampling": {"max_tokens": 16}},
        "trainer": {"seq_len": SEQ_LEN, "lora": LORA.model_dump()},
        "inference": {"kv_cache_gib": 0.25, "transfer": "adapter"},
    }
    ctx.store.put_json(keys.config(RUN), config_document(validate(config)))
    first = Policy(1)
    weights = first.export(ctx, 0)
    async with serving(ctx, weights) as (spec, process):
        served = Served(ctx, first, first, weights, spec, process)
        result = await served.sync(0, weights, push=1)
        assert (result.label, result.model, result.unverified) == ("0.1a", "", "")
        yield served


def _check(policy: Policy, prompt: list[int], choice: dict[str, Any]) -> None:
    """Each sampled token has the log-probability that this policy gives it."""
    sampled = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    expected = policy.logprobs([*prompt, *choice["token_ids"]])[len(prompt) - 1 :]
    worst = max(abs(a - b) for a, b in zip(expected, sampled, strict=True))
    assert worst <= 1e-4, worst


@pytest.mark.nightly
class TestEngine:
    """One engine, in this order."""

    pytestmark = pytest.mark.asyncio(loop_scope="session")

    async def test_rollouts_in_flight_go_on_under_the_adapter_that_they_named(
        self, based: Served
    ) -> None:
        one, two = (Adapted.make(based.ctx, version) for version in (1, 2))
        pushed = await based.sync(1, one.weights, push=2, oldest=-1)
        print(f"canary difference {pushed.max_diff:.1e}")
        assert (pushed.label, pushed.model) == ("1.2a", f"{based.spec.model}@1.2a")
        assert pushed.unverified == "", "all bits of base and adapter were compared"
        prompts = [based.first.tokenizer.encode(f"reverse word number {n}") for n in range(8)]
        over = asyncio.Event()
        answers: list[tuple[float, float, list[int], dict[str, Any]]] = []

        async def keep_sampling(client: httpx.AsyncClient, prompt: list[int]) -> None:
            while not over.is_set():
                began = time.monotonic()
                choice = await based.sample(client, prompt, pushed.model)
                answers.append((began, time.monotonic(), prompt, choice))

        async with httpx.AsyncClient(timeout=120) as client:
            flying = [asyncio.create_task(keep_sampling(client, prompt)) for prompt in prompts]
            async with asyncio.timeout(60):
                while await based.sampling(client) < len(prompts) // 2:
                    await asyncio.sleep(0.01)
            began = time.monotonic()
            second = await based.sync(2, two.weights, push=3, oldest=0)
            ended = time.monotonic()
            over.set()
            new = await based.sample(client, prompts[0], second.model)
            base = await based.sample(client, prompts[0])
            await asyncio.gather(*flying)
        assert any(start < began < end for start, end, *_ in answers)
        assert any(start < ended < end for start, end, *_ in answers)
        for *_, prompt, choice in answers:
            _check(one.policy, prompt, choice)
        _check(two.policy, prompts[0], new)
        _check(based.first, prompts[0], base)
        # What the engine reports is the base's label, for adapters, too: the name tells.
        assert [span["version"] for span in new["weight_versions"]] == ["0.1a"]

    async def test_more_versions_than_it_holds_at_once_are_kept_apart(self, based: Served) -> None:
        held = {}
        for version, push in ((3, 4), (4, 5), (5, 6), (6, 7)):
            made = Adapted.make(based.ctx, version)
            result = await based.sync(version, made.weights, push=push, oldest=0)
            assert result.unverified == ""
            held[result.model] = made.policy
        prompt = based.first.tokenizer.encode("reverse abc")
        async with httpx.AsyncClient(timeout=240) as client:
            choices = await asyncio.gather(*(based.sample(client, prompt, m) for m in held))
        for policy, choice in zip(held.values(), choices, strict=True):
            _check(policy, prompt, choice)

    async def test_a_version_that_no_rollout_uses_is_unloaded(self, based: Served) -> None:
        made = Adapted.make(based.ctx, 7)
        result = await based.sync(7, made.weights, push=8, oldest=6)
        async with httpx.AsyncClient(base_url=based.spec.address, timeout=60) as client:
            listed = [model["id"] for model in (await client.get("/v1/models")).json()["data"]]
            own = based.spec.model
            assert listed == [own, f"{own}@6.7a", result.model]
            with pytest.raises(httpx.HTTPStatusError, match="404"):
                await based.sample(client, [5, 6], f"{own}@1.2a")

    async def test_one_stale_factor_is_refused_by_name(self, based: Served) -> None:
        name = "base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight"
        made = Adapted.make(based.ctx, 8, stale=name)
        with pytest.raises(ApplicationError) as error:
            await based.sync(8, made.weights, push=9, oldest=6)
        assert error.value.type == names.GATE_FAILED
        assert list(error.value.details) == ["8.9a", "8.9b"]
        assert f"1 wrong tensors: {name} (rank 0): expected " in error.value.message

    async def test_the_adapter_of_another_version_is_refused(self, based: Served) -> None:
        right = based.ctx.store.fetch_folder(based.ctx.store.require(keys.weights(RUN, 7)))
        wrong = Adapted.make(based.ctx, 9)
        folder = based.ctx.scratch("mixed")
        for name in ("canary.json", "fingerprints.json"):
            (folder / name).write_bytes((right / name).read_bytes())
        (folder / "adapter").mkdir()
        adapter = based.ctx.store.fetch_folder(wrong.weights) / "adapter"
        for file in adapter.iterdir():
            (folder / "adapter" / file.name).write_bytes(file.read_bytes())
        ref = based.ctx.store.put_folder("mixed", folder, attempt="test")
        with pytest.raises(ApplicationError) as error:
            await based.sync(9, ref, push=10, oldest=6)
        difference = float(error.value.message.split("difference ")[1].split(",")[0])
        assert difference > 1e-2, "log-probabilities show it, too"
        assert "28 wrong tensors" in error.value.message, "A and B of 7 layers of 2 blocks"


@pytest.mark.nightly
@pytest.mark.stack
def test_a_run_trains_on_rollouts_of_adapters_alone(stack: Stack) -> None:
    """The example at 6 steps: an engine is killed on the way, and gets its base and the newest."""
    where = stack.up()
    run_id = launch(
        where,
        "lora_reverse_text",
        "max_steps=6",
        "eval.interval=3",
        "train.max_lag=0",
        "inference.transfer=auto",
        "retention.weights=all",
        "retention.batches=all",
    )
    wait_until(where, run_id, lambda run: run["step"] >= 3)
    kill_server(stack, ENGINE)
    run = wait_until(where, run_id, lambda run: run["status"] in ENDED)
    assert (run["status"], run["policy_version"]) == ("succeeded", 6), run
    assert run["restarts"]["engine"] >= 1
    store = ArtifactStore(f"file://{stack.home}/store")
    for version in range(1, 7):
        files = store.manifest(store.require(keys.weights(run_id, version)))
        assert keys.ADAPTER_FILE in files
        assert not any(name.startswith("model") for name in files), sorted(files)
    seen, on_policy = set(), set()
    for step in range(1, 7):
        samples = decode_batch(store.get(store.require(keys.batch(run_id, step))))
        scores = store.get(store.require(keys.token_logprobs(run_id, step)))
        for sample, scored in zip(samples, decode_token_logprobs(scores), strict=True):
            tokens = [
                (version, abs(engine - trainer))
                for version, on, engine, trainer in zip(
                    sample.versions,
                    sample.loss_mask,
                    sample.logprobs,
                    scored.trainer_logprobs,
                    strict=True,
                )
                if on and trainer is not None
            ]
            (version,) = {version for version, _ in tokens}
            seen.add(version)
            if version == step - 1:
                on_policy.add(version)
                assert max(apart for _, apart in tokens) <= 1e-3, (step, version)
    assert len(seen) >= 3 and on_policy - {0}, (seen, on_policy)
    assert run["warnings"] == [], "all bits were compared"
