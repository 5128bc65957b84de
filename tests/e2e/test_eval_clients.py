"""The two ways in which the policy is asked: token ids of a renderer, and chat completions.

Greedy replies are the same text where renderer and chat template agree, and differ where the
renderer leaves the template out, which the preflight refuses.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from verifiers.v1.clients.eval import EvalClient
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.dialects import ChatDialect

from ratchet.activities.contracts.rollouts import EngineTarget
from ratchet.activities.envs.rendering import difference, load_tokenizer, renderer_config, resolve
from ratchet.activities.envs.shipped import ratchet_compat
from ratchet.activities.envs.shipped.ratchet_chatml import ChatMLRenderer
from ratchet.activities.rollouts import chat
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.storage import keys
from ratchet.activities.training import prepare, smollm2
from ratchet.activities.training.policy import recipe_of
from ratchet.activities.training.tokenizer import vocabulary
from ratchet.configs.env import SamplingConfig
from tests.e2e.engines import RUN, SEQ_LEN, Policy, Served, serving

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="session"),
]

Make = Callable[[Path], tuple[Any, Any]]
GREEDY = SamplingConfig(temperature=0.0, max_tokens=24)
QUESTIONS = ("reverse warmth", "What is the capital of France?", "Name a colour.")


class BareRenderer(ChatMLRenderer):
    """Says what the messages say, and nothing of who says it."""

    def _add_messages(self, out: Any, messages: list[Any], reply: bool) -> None:
        for index, message in enumerate(messages):
            out.add(self._encode(message["content"]), index)


BARE = {"name": "custom", "import_path": f"{__name__}.BareRenderer"}


async def replies(
    url: str, model: str, tokenizer: Path, renderer: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """What the policy says to each question: asked by its renderer's tokens, and by chat."""
    ratchet_compat.apply()
    target = EngineTarget(0, 1, url, model, version=0)
    asked = chat.request(target, GREEDY, {}, {})
    by_tokens = TrainClient(
        vf.TrainClientConfig.model_validate(
            {
                "base_url": f"{url}/v1",
                "api_key_var": "RATCHET_ENGINE_KEY",
                "renderer": dict(renderer),
                "renderer_model_name": str(tokenizer),
            }
        )
    )
    by_chat = EvalClient(vf.EvalClientConfig.model_validate(asked["client"]))
    sampling = vf.SamplingConfig.model_validate(asked["sampling"])
    wanted = vf.SamplingConfig.model_validate(GREEDY.request() | {"cache_salt": "0"})
    dialect, found = ChatDialect(), []
    for question in QUESTIONS:
        body = {"model": model, "messages": [{"role": "user", "content": question}]}
        one = await by_tokens.get_response(dialect, body, wanted)
        body = dialect.apply_overrides(body, model, sampling)
        other = await by_chat.get_response(dialect, body, sampling)
        assert one.tokens is not None and other.tokens is not None
        assert other.tokens.completion_ids and len(other.tokens.completion_logprobs) == len(
            other.tokens.completion_ids
        )
        if one.tokens.prompt_ids == other.tokens.prompt_ids:
            assert one.tokens.completion_ids == other.tokens.completion_ids
        found.append((one.message.content or "", other.message.content or ""))
    await by_tokens.close()
    await by_chat.close()
    return found


async def check_both_ways(url: str, model: str, folder: Path) -> None:
    """Both clients say the same, and not where the renderer drops the template."""
    tokenizer = load_tokenizer(folder)
    renderer = resolve(str(folder), tokenizer, {})
    same = await replies(url, model, folder, renderer)
    assert all(one == other for one, other in same) and any(one for one, _ in same), same
    bare = await replies(url, model, folder, BARE)
    assert any(one != other for one, other in bare), bare
    assert [other for _, other in bare] == [other for _, other in same]
    refused = difference(tokenizer, BARE, {})
    assert refused is not None and "conversation 'one turn'" in refused, "the preflight sees it"
    assert difference(tokenizer, renderer_config("default", {}), {}) is None


async def test_both_clients_ask_a_small_policy_alike(served: Served) -> None:
    import torch

    policy = Policy(5)
    reserved = [n for text, n in vocabulary().items() if text.startswith("<|reserved")]
    with torch.no_grad():
        # A random policy may say tokens that mean nothing, which engines leave out of a text.
        policy.model.lm_head.weight[reserved] = 0.0
    weights = policy.export(served.ctx, 0, run="eval-clients")
    folder = served.ctx.store.fetch_folder(weights)
    await served.sync(0, weights, push=40)
    await check_both_ways(served.spec.address, served.spec.model, folder)


async def test_a_label_is_read_before_and_after(served: Served) -> None:
    await served.sync(0, served.weights, push=41)
    assert await chat.read_label(served.spec.address) == "0.41a"


def tiny(_: Path) -> tuple[Any, Any]:
    """The default policy as runs begin with it."""
    return prepare.make_default(recipe_of("reverse-text"), "reverse-text", 0)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("make", [tiny, smollm2.make], ids=["tiny", "smollm2"])
async def test_both_clients_ask_a_trained_model_alike(make: Make, tmp_path: Path) -> None:
    model, tokenizer = make(tmp_path)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path / "store"), own_queue="q")
    config = {
        "max_steps": 1,
        "train": {"env": [{"id": "reverse-text"}], "sampling": {"max_tokens": 32}},
        "eval": {"sampling": {"max_tokens": 32}},
        "trainer": {"seq_len": SEQ_LEN},
        "inference": {"kv_cache_gib": 0.5},
    }
    ctx.store.put_json(keys.config(RUN), config)
    weights = ctx.store.put_folder(keys.weights(RUN, 0), tmp_path / "model", attempt="test")
    async with serving(ctx, weights) as (spec, _):
        await check_both_ways(spec.address, spec.model, tmp_path / "model")
