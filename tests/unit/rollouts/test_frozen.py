"""A frozen model's words in the policy's tokens: what trains, and where samples end."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.contracts.rollouts import GroupWork
from activities.envs.shipped.ratchet_chatml import ChatMLRenderer
from activities.rollouts import frozen, groups
from activities.rollouts.frozen import Layout, Turn, lay_out
from activities.rollouts.samples import RolloutSample, from_episode, to_document
from activities.training.tokenizer import IM_END, build_tokenizer, vocabulary
from configs.env import SamplingConfig
from configs.reference import FrozenModelConfig
from tests.unit.rollouts.test_samples import _episode

TOKENIZER = build_tokenizer(256)
RENDERER = ChatMLRenderer(TOKENIZER)
TEXT = st.text(st.sampled_from("abc xyz\n."), max_size=12)


def _node(parent: int | None, content: str, sampled: bool = False) -> dict[str, Any]:
    role = "assistant" if sampled else "user"
    message = {"role": role, "content": content}
    return {"parent": parent, "message": message, "sampled": sampled}


def _text(sample: RolloutSample, on: bool = True) -> str:
    kept = [t for t, m in zip(sample.token_ids, sample.loss_mask, strict=True) if m is on or not on]
    return str(TOKENIZER.decode(kept))


def test_a_reply_trains_through_its_end() -> None:
    rollout = from_episode(
        _episode([_node(None, "abc"), _node(0, "cba", True)]), -1, Layout(RENDERER).samples
    )
    (sample,) = rollout.samples
    assert _text(sample) == f"cba{IM_END}"
    assert _text(sample, on=False) == (
        f"<|im_start|>user\nabc{IM_END}\n<|im_start|>assistant\ncba{IM_END}"
    )
    assert set(sample.logprobs) == {0.0} and set(sample.versions) == {-1}
    assert (rollout.error, rollout.labels, rollout.sampled_tokens) == (None, [], 4)


def test_a_reply_that_was_cut_off_has_no_end_to_learn() -> None:
    nodes = [_node(None, "abc"), _node(0, "cb", True)]
    calls = [{"node": 1, "finish_reason": "length"}]
    rollout = from_episode(_episode(nodes, calls=calls), -1, Layout(RENDERER).samples)
    (sample,) = rollout.samples
    assert _text(sample) == "cb" and sample.token_ids[-1] != vocabulary()[IM_END]


@given(st.lists(st.tuples(TEXT, TEXT, st.booleans()), min_size=1, max_size=4))
def test_a_conversation_is_one_sample(said: list[tuple[str, str, bool]]) -> None:
    messages: list[dict[str, str]] = []
    turns = []
    for question, reply, cut in said:
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": reply},
        ]
        turns.append(Turn(len(messages) - 1, cut=cut))
    found = lay_out(messages, turns, RENDERER)
    learnt = "".join(reply + ("" if cut else IM_END) for _, reply, cut in said)
    if not learnt:
        assert found == []
        return
    (sample,) = found
    assert _text(sample) == learnt
    whole = RENDERER.render_ids(messages)
    assert whole[: len(sample.token_ids)] == sample.token_ids


def test_a_shared_reply_trains_in_its_first_branch_only() -> None:
    """0 -> 1(reply) forks into 2 -> 3(reply) and 4 -> 5(reply)."""
    nodes = [
        _node(None, "a"),
        _node(0, "b", True),
        _node(1, "c"),
        _node(2, "d", True),
        _node(1, "e"),
        _node(4, "f", True),
    ]
    rollout = from_episode(_episode(nodes), -1, Layout(RENDERER).samples)
    assert [_text(sample) for sample in rollout.samples] == [f"b{IM_END}d{IM_END}", f"f{IM_END}"]


class Forgetful:
    """A renderer that drops what was said before the last question, as some drop thoughts."""

    def render_ids(
        self, messages: list[Any], *, tools: Any = None, add_generation_prompt: bool = False
    ) -> list[int]:
        last = max(place for place, message in enumerate(messages) if message["role"] == "user")
        return RENDERER.render_ids(messages[last:], add_generation_prompt=add_generation_prompt)

    def get_stop_token_ids(self) -> list[int]:
        return RENDERER.get_stop_token_ids()


def test_a_prompt_that_does_not_extend_begins_another_sample() -> None:
    nodes = [_node(None, "a"), _node(0, "b", True), _node(1, "c"), _node(2, "d", True)]
    rollout = from_episode(_episode(nodes), -1, Layout(Forgetful()).samples)
    assert [_text(sample) for sample in rollout.samples] == [f"b{IM_END}", f"d{IM_END}"]


def test_what_cannot_be_laid_out_is_an_error() -> None:
    nodes = [_node(None, "a"), _node(0, "b", True)]
    nodes[0]["message"]["content"] = [{"type": "text", "text": "a"}]
    rollout = from_episode(_episode(nodes), -1, Layout(RENDERER).samples)
    assert rollout.error is not None and rollout.error["type"] == "UnusableTrace"
    assert "text messages only" in rollout.error["message"] and rollout.samples == []


def test_a_group_of_a_frozen_model_is_as_young_as_can_be() -> None:
    episode = _episode([_node(None, "abc"), _node(0, "cba", True)])
    rollout = from_episode(episode, -1, Layout(RENDERER).samples)
    document = {
        **to_document(rollout),
        "temperature": frozen.TEMPERATURE,
    }
    work = GroupWork("train/0", "train", "reverse-text", 0, 2)
    scored = groups.score(work, [document, document], version=7, lost="")
    assert scored["version_start"] == 7 and groups.served_versions(scored) == set()


def test_the_frozen_endpoint_is_asked_without_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FrozenModelConfig(name="big", base_url="http://h:1", api_key_var="BIG_KEY")
    sampling = SamplingConfig(temperature=0.5, max_tokens=9)
    monkeypatch.setenv("BIG_KEY", "sk-secret")
    asked = frozen.request(model, sampling, {"idx": 0})
    assert (asked["client"].type, asked["client"].base_url) == ("eval", "http://h:1/v1")
    assert asked["model"] == "big"
    assert asked["sampling"].model_dump(exclude_none=True) == {"temperature": 0.5, "max_tokens": 9}
    assert "sk-secret" not in repr(asked)
