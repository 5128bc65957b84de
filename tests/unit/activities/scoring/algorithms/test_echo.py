"""What the env said on a rollout: how stored samples tell, and what echo makes of it."""

from typing import Any

import pytest
import torch

from ratchet.activities.envs.samples import Reading, from_episode, to_document
from ratchet.activities.scoring.algorithms import CreditError, Echo, before_filters, build, view
from ratchet.activities.training.loss import LossInputs, MemberCounts, rl_terms, total_loss
from ratchet.configs.algorithm import EchoConfig
from ratchet.configs.trainer import DefaultLossConfig
from tests.unit.activities.envs.test_samples import _episode, _node
from tests.unit.activities.training.test_loss import ADVANTAGES, ENGINE, TRAINER, f64


def said(parent: int, role: str, content: list[bool]) -> dict[str, Any]:
    """An env's message whose tokens are content or template."""
    node = _node(parent, list(range(len(content))))
    message = {"role": role, "content": "x"}
    if role == "tool":
        message["tool_call_id"] = "c"
    return {**node, "message": message, "is_content": content}


def prompt(length: int = 2) -> dict[str, Any]:
    return {**_node(None, list(range(length))), "is_content": [True] * length}


def reply(parent: int) -> dict[str, Any]:
    """Two tokens of template and two that the policy sampled."""
    return _node(parent, [7, 7, 8, 9], 2)


TALK = [
    prompt(),
    reply(0),
    said(1, "tool", [False, True, True, False, True]),
    said(2, "user", [False, True]),
    reply(3),
]


def rollout(nodes: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    return to_document(from_episode(_episode(nodes, **changes), Reading()))


def test_observations_are_what_the_env_said_after_the_first_reply() -> None:
    found = rollout(TALK)
    (sample,) = found["samples"]
    assert sample["observations"] == [("tool", 7, 9), ("tool", 10, 11), ("user", 12, 13)]
    assert (sample["prompt"], sample["prompt_tokens"]) == (0, 4)
    assert found["prompts"] == [{"messages": [{"role": "user", "content": "x"}], "tools": None}]
    (single,) = rollout([prompt(), reply(0)])["samples"]
    assert single["observations"] == [], "the first prompt is none"


def test_messages_on_several_branches_are_observed_once() -> None:
    """0 -> 1(reply) -> 2(tool), which forks into 3(reply) and 4(user) -> 5(reply)."""
    nodes = [
        *TALK[:3],
        reply(2),
        said(2, "user", [True]),
        reply(4),
    ]
    first, second = rollout(nodes)["samples"]
    assert first["observations"] == [("tool", 7, 9), ("tool", 10, 11)]
    assert second["observations"] == [("user", 11, 12)]
    assert first["prompt"] == second["prompt"] == 0


def test_a_renderer_without_spans_is_known() -> None:
    silent = [{**node, "is_content": []} for node in TALK]
    (sample,) = rollout(silent)["samples"]
    assert sample["observations"] is None
    (single,) = rollout(silent[:2])["samples"]
    assert single["observations"] == []


def test_agents_of_a_rollout() -> None:
    assert rollout(TALK)["traces"] == [{"agent": "policy", "reward": 0.5, "sampled_tokens": 4}]
    named = rollout(TALK, agent={"config": {}, "name": "solver"})
    assert named["traces"][0]["agent"] == "solver"
    (seen,) = view(0, named).agents
    assert (seen.agent, seen.reward, seen.sampled_tokens) == ("solver", 0.5, 4)


async def test_echo_is_grpo_with_alpha_on_learned_roles() -> None:
    views = [view(0, rollout(TALK)), view(1, {**rollout(TALK[:2]), "reward": 0.0})]
    long, short = await before_filters(build(EchoConfig(), seq_len=64), views)
    assert (long.advantage, short.advantage, long.rl) == (0.25, -0.25, None)
    tool = [0.1 if place in (7, 8, 10) else 0.0 for place in range(17)]
    assert long.ce_weights == [tool] and short.ce_weights is None
    roles = {"user": {"alpha": 0.5}}
    algorithm = build(EchoConfig.model_validate({"roles": roles}), seq_len=64)
    long, short = await before_filters(algorithm, views)
    user = [0.5 if place == 12 else 0.0 for place in range(17)]
    assert long.ce_weights == [user]


async def test_echo_has_length_control() -> None:
    config = EchoConfig.model_validate({"length_weighted_baseline": True})
    views = [view(0, rollout(TALK)), view(1, {**rollout(TALK[:2]), "reward": 0.0})]
    long, short = await before_filters(build(config, seq_len=64), views)
    assert long.advantage == pytest.approx(0.5 - 1 / 3) and short.advantage == pytest.approx(-1 / 3)


async def test_echo_needs_spans_of_messages() -> None:
    silent = rollout([{**node, "is_content": []} for node in TALK])
    with pytest.raises(CreditError, match=r"set model\.renderer to one made for the model"):
        await before_filters(build(EchoConfig(), seq_len=64), [view(0, silent)])


async def test_loss_of_echo_golden() -> None:
    """rl over all six tokens, and ce with alpha 0.1 on tokens 2 and 3."""
    sample = {"token_ids": [0] * 6, "loss_mask": [True] * 6, "observations": [("tool", 2, 4)]}
    weights = Echo(EchoConfig(), 64)._weights(sample)
    given = LossInputs(
        f64(TRAINER).log(),
        f64(ENGINE).log(),
        f64(ADVANTAGES),
        torch.ones(6, dtype=torch.bool),
        ce_weights=f64(weights),
    )
    terms = rl_terms(
        given.trainer_logprobs,
        given.engine_logprobs,
        given.advantages,
        given.loss_mask,
        DefaultLossConfig(),
    )
    total = total_loss(given, terms, MemberCounts(rl=6, ce=2)).total
    assert total.item() == pytest.approx(-0.1723391843, abs=1e-10)
