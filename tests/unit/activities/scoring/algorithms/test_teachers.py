"""Algorithms that learn from another model: what a teacher is asked, and what samples become."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.activities.contracts.rollouts import GroupWork
from ratchet.activities.envs.rendering import renderer_config
from ratchet.activities.envs.shipped.ratchet_chatml import ChatMLRenderer
from ratchet.activities.rollouts import groups
from ratchet.activities.scoring.algorithms import Algorithm, CreditError, build
from ratchet.activities.scoring.algorithms.rendering import load_renderer
from ratchet.activities.scoring.filters import Verdict
from ratchet.activities.training.tokenizer import build_tokenizer
from ratchet.configs.algorithm import OpdConfig, OpsdConfig, SftConfig
from tests.groups import score_group
from tests.unit.activities.scoring.algorithms.test_streams import document, sample

FROZEN = {"name": "big", "base_url": "http://teacher:8000"}
TOKENIZER = build_tokenizer(256)
RENDERER = ChatMLRenderer(TOKENIZER)
TEXT = st.text(alphabet=st.characters(min_codepoint=0x61, max_codepoint=0x7A), max_size=8)


class Teacher:
    """Log-probabilities that tell the place and the token; counts what is asked at once."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.busy = self.most = 0

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        self.asked.append(list(token_ids))
        self.busy += 1
        self.most = max(self.most, self.busy)
        await asyncio.sleep(0)
        self.busy -= 1
        return [0.0, *(-float(1000 * at + ids) for at, ids in enumerate(token_ids) if at)]


def opd(teacher: Teacher, seq_len: int = 64, **about: Any) -> Algorithm:
    config = OpdConfig.model_validate({"teacher": {**FROZEN, **about}})
    return build(config, seq_len=seq_len, reference=teacher)


def score(
    algorithm: Algorithm, rollouts: Sequence[dict[str, Any]], **options: Any
) -> dict[str, Any]:
    work = GroupWork("train/0", "train", "e", 0, len(rollouts))
    return score_group(work, list(rollouts), 3, "", algorithm, **options)


# -- opd ------------------------------------------------------------------------------------


def test_opd_pulls_at_sampled_tokens_only() -> None:
    teacher = Teacher()
    samples = [sample([False, True, False, True, False]), sample([False, True])]
    rows = groups.batch_samples(score(opd(teacher), [document(samples)]))
    assert teacher.asked == [[0, 1, 2, 3], [0, 1]], "nothing after the last sampled token"
    first, second = rows
    assert first.advantages is None and first.ce_weights is None
    assert first.rl_weights == [0.0] * 5
    assert first.ref_kl_weights == [0.0, 1.0, 0.0, 1.0, 0.0]
    assert first.ref_logprobs == [0.0, -1001.0, 0.0, -3003.0, 0.0]
    assert second.ref_logprobs == [0.0, -1001.0]


def test_a_teacher_is_asked_no_further_than_the_trainer_reads() -> None:
    teacher = Teacher()
    samples = [sample([False, True, True, True]), sample([False, False, True])]
    rows = groups.batch_samples(score(opd(teacher, seq_len=2), [document(samples)]))
    assert teacher.asked == [[0, 1]]
    assert [row.ref_logprobs for row in rows] == [[0.0, -1001.0, 0.0, 0.0], [0.0] * 3]


def test_a_teacher_is_asked_about_survivors_and_few_at_a_time() -> None:
    teacher = Teacher()
    rollouts = [document([sample([False, True])] * 3, reward=float(n % 2)) for n in range(8)]
    seen = iter(range(8))

    def judge(samples: Sequence[Mapping[str, Any]], *, reward: float) -> Verdict:
        return Verdict(("odd",), removed=next(seen) % 2 == 1)

    made = score(opd(teacher, max_concurrent=5), rollouts, judge=judge)
    assert len(teacher.asked) == 4 * 3 and teacher.most == 5
    assert len(groups.batch_samples(made)) == 12


def test_a_teacher_that_skips_tokens_is_a_bug() -> None:
    class Short(Teacher):
        async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
            return [0.0]

    with pytest.raises(AssertionError, match="score every token"):
        score(opd(Short()), [document([sample([False, True])])])


# -- opsd -----------------------------------------------------------------------------------


def render(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[int]:
    return RENDERER.render_ids(list(messages), tools=tools, add_generation_prompt=True)


def opsd(asked: Teacher, **options: Any) -> Algorithm:
    config = OpsdConfig.model_validate(options)
    return build(config, seq_len=256, reference=asked, render=render)


def asked_for(text: str, replies: Sequence[list[int]], hint: str) -> dict[str, Any]:
    """A stored rollout of one or more turns, as the engine saw it."""
    messages = [{"role": "user", "content": text}]
    prompt = render(messages, None)
    ids, mask = list(prompt), [False] * len(prompt)
    for turn, reply in enumerate(replies):
        if turn:
            bridged = RENDERER.bridge_to_next_turn(
                ids, [RENDERER.end], [{"role": "user", "content": hint}]
            )
            assert bridged is not None
            mask += [False] * (len(bridged.token_ids) - len(ids))
            ids = list(bridged.token_ids)
        ids, mask = ids + reply, mask + [True] * len(reply)
    stored = sample(mask, token_ids=ids, prompt=0, prompt_tokens=len(prompt))
    return {**document([stored]), "prompts": [{"messages": messages, "tools": None}]}


REPLIES = st.lists(st.lists(st.integers(4, 127), min_size=1, max_size=6), min_size=1, max_size=3)


@settings(max_examples=40, deadline=None)
@given(TEXT, REPLIES, TEXT, TEXT.filter(bool))
def test_opsd_scores_the_very_tokens_behind_a_demonstration(
    text: str, replies: list[list[int]], hint: str, demo: str
) -> None:
    teacher = Teacher()
    stored = asked_for(text, replies, hint)
    ids, mask = stored["samples"][0]["token_ids"], stored["samples"][0]["loss_mask"]
    made = score(opsd(teacher), [stored], task={"idx": 1, "info": {"demonstration": demo}})
    (row,) = groups.batch_samples(made)
    (asked,) = teacher.asked
    front = RENDERER.render_ids([{"role": "system", "content": demo}])
    assert asked == front + ids, "ChatML only puts a message in front"
    assert row.ref_kl_weights == [float(on) for on in mask] and row.rl_weights == [0.0] * len(ids)
    assert row.ref_logprobs == [
        -float(1000 * (len(front) + at) + token) if on else 0.0
        for at, (token, on) in enumerate(zip(ids, mask, strict=True))
    ]


@pytest.mark.parametrize(
    ("task", "options", "shown"),
    [
        ({"demonstration": "top"}, {}, "top"),
        ({"demonstration": "top", "info": {"demonstration": "in"}}, {}, "in"),
        ({"demonstration": "top", "info": {"other": "x"}}, {}, "top"),
        ({"answer": "a", "info": None}, {"demo_key": "answer"}, "a"),
    ],
)
def test_where_demonstrations_come_from(
    task: dict[str, Any], options: dict[str, Any], shown: str
) -> None:
    teacher = Teacher()
    score(opsd(teacher, **options), [asked_for("q", [[70]], "")], task=task)
    assert shown in TOKENIZER.decode(teacher.asked[0])


@pytest.mark.parametrize("task", [None, {}, {"demonstration": " "}, {"info": {"demonstration": 1}}])
def test_a_task_without_demonstration_is_the_users_error(task: dict[str, Any] | None) -> None:
    with pytest.raises(CreditError, match=r"no text 'demonstration' .* set algo\.demo_key"):
        score(opsd(Teacher()), [asked_for("q", [[70]], "")], task=task)


def test_opsd_asks_few_at_a_time() -> None:
    for teacher, options, most in [
        (Teacher(), {"max_concurrent": 2}, 2),
        (Teacher(), {"max_concurrent": 4, "teacher": {**FROZEN, "max_concurrent": 3}}, 3),
    ]:
        stored = [asked_for("q", [[70]], "") for _ in range(6)]
        score(opsd(teacher, **options), stored, task={"demonstration": "d"})
        assert teacher.most == most and len(teacher.asked) == 6


def test_the_renderer_of_a_run_renders_as_its_engines_are_asked(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    made = load_renderer(str(tmp_path), renderer_config("ratchet-chatml", {}))
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "abc"}]
    assert made(messages, None) == render(messages, None)


# -- sft ------------------------------------------------------------------------------------


def test_sft_learns_what_was_sampled() -> None:
    config = SftConfig.model_validate({"source": FROZEN})
    made = score(build(config, seq_len=64), [document([sample([False, True, True])], reward=0.0)])
    (row,) = groups.batch_samples(made)
    assert row.rl_weights == [0.0] * 3 and row.ce_weights == [0.0, 1.0, 1.0]
    assert row.advantages is None and row.ref_kl_weights is None
