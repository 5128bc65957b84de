"""What the workflow is told of a group: what would train, its advantages, and groups that must be
complete.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from temporalio.converter import DataConverter
from temporalio.testing import ActivityEnvironment

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.rollouts import (
    FilterTally,
    FinalizeGroupInput,
    GroupResult,
    GroupWork,
    Kind,
)
from ratchet.activities.rollouts import groups
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.scoring import filters
from ratchet.activities.storage import keys
from ratchet.configs.filters import FilterConfig, RepetitionConfig, ZeroAdvantageConfig
from ratchet.configs.load import validate
from tests.groups import rollout_activities, score_group

REF = ArtifactRef("k", "0" * 64, 1, "p")
CERTAIN, UNSURE = -1e-6, -3.0
ZERO, LOOP = ZeroAdvantageConfig(enforce=True), RepetitionConfig(window=2, enforce=True)
BROKEN = {"type": "ToolError", "message": "no such tool"}


def _rollout(
    reward: float, tokens: int = 2, logprob: float = UNSURE, error: dict[str, str] | None = None
) -> dict[str, Any]:
    """A rollout of one sample: a prompt token, `tokens` sampled ones, and one of the env."""
    sample = {
        "token_ids": [5] * (tokens + 2),
        "loss_mask": [False] + [True] * tokens + [False],
        "logprobs": [0.0] + [logprob] * tokens + [0.0],
        "versions": [-1] + [3] * tokens + [-1],
    }
    return {
        "reward": reward,
        "error": error,
        "labels": ["3.0"],
        "tokens": tokens + 2,
        "sampled_tokens": tokens,
        "samples": [sample],
        "messages": [],
        "rewards": {},
        "metrics": {},
        "truncated": False,
        "stop": "agent_completed",
        "turns": 1,
        "responded": True,
        "temperature": 1.0,
    }


def _judge(slot: list[FilterConfig]) -> groups.Judge:
    return lambda samples, *, reward: filters.judge(slot, samples, None, reward)


def _group(
    rollouts: Sequence[dict[str, Any] | None],
    *,
    pre: list[FilterConfig] | None = None,
    post: list[FilterConfig] | None = None,
    kind: Kind = "train",
    lost: str = "",
    require_full: bool = False,
) -> dict[str, Any]:
    work = GroupWork(f"{kind}/0", kind, "e", 0, len(rollouts))
    return score_group(
        work,
        list(rollouts),
        3,
        lost,
        judge=_judge(pre or []),
        post_batch=_judge(post or []),
        require_full=require_full,
    )


def _result(*args: Any, **kwargs: Any) -> GroupResult:
    return groups.result(_group(*args, **kwargs), REF)


# -- what would train -----------------------------------------------------------------------


def test_trainable_is_what_post_batch_filters_leave() -> None:
    """Rewards 0, 1/2, 1 have mean 1/2, so the one between gets advantage 0."""
    rollouts = [_rollout(0.0, 1), _rollout(0.5, 2), _rollout(1.0, 4), _rollout(9.0, error=BROKEN)]
    result = _result(rollouts, post=[ZERO])
    assert (result.survivors, result.trainable, result.errored) == (3, 2, 1)
    assert (result.samples, result.tokens) == (2, 3 + 6)
    assert result.advantage_range == (-0.5, 0.5)
    assert result.filters == FilterTally(3, 0, {}), "post-batch hits are counted in the batch"


def test_pre_batch_goes_first() -> None:
    rollouts = [_rollout(0.0), _rollout(1.0, logprob=CERTAIN), _rollout(0.5), _rollout(0.5)]
    document = _group(rollouts, pre=[LOOP], post=[ZERO, LOOP])
    result = groups.result(document, REF)
    assert (result.survivors, result.trainable, result.samples) == (3, 1, 1)
    assert result.advantage_range == (-0.5, 0.0), "the removed one's advantage of 1/2 is not in it"
    verdicts = [member.get("post_filtered") for member in document["rollouts"]]
    assert verdicts == [False, None, True, True]


def test_a_group_without_differences_survives_untrainable() -> None:
    result = _result([_rollout(0.25), _rollout(0.25)], post=[ZERO])
    assert (result.survivors, result.trainable, result.samples, result.tokens) == (2, 0, 0, 0)
    assert result.advantage_range == (0.0, 0.0) and result.error == ""


def test_no_advantages_no_range() -> None:
    assert _result([None, None], lost="gone").advantage_range is None
    assert _result([_rollout(0.0, 0), _rollout(1.0, 0)]).advantage_range is None, "nothing sampled"
    evals = _result([_rollout(0.0), _rollout(1.0)], kind="eval", post=[ZERO])
    assert evals.advantage_range is None
    assert (evals.survivors, evals.trainable, evals.samples) == (2, 2, 2), "evals have no filters"


def test_documents_without_post_batch_verdicts_train_whole() -> None:
    document = _group([_rollout(0.0), _rollout(1.0)])
    del document["rejected"]
    for member in document["rollouts"]:
        del member["post_filtered"]
    result = groups.result(document, REF)
    assert (result.survivors, result.trainable, result.samples) == (2, 2, 2)


_ROLLOUTS = st.builds(
    _rollout,
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(0, 4),
    st.sampled_from([CERTAIN, UNSURE]),
    st.sampled_from([None, None, BROKEN]),
)
_SLOTS = st.lists(
    st.one_of(
        st.builds(RepetitionConfig, window=st.integers(1, 3), enforce=st.booleans()),
        st.builds(ZeroAdvantageConfig, enforce=st.booleans()),
    ),
    max_size=2,
    unique_by=lambda config: config.type,
)


@given(st.lists(st.none() | _ROLLOUTS, min_size=1, max_size=5), _SLOTS, _SLOTS)
def test_the_result_counts_what_ships(
    rollouts: list[dict[str, Any] | None], pre: list[FilterConfig], post: list[FilterConfig]
) -> None:
    document = _group(rollouts, pre=pre, post=post)
    result = groups.result(document, REF)
    rows = groups.batch_samples(document, groups.judge_survivors(document, _judge(post)))
    assert result.samples == len(rows) and result.trainable == len({row.rollout for row in rows})
    assert result.tokens == sum(len(row.token_ids) for row in rows)
    for row in rows:
        for advantage, on in zip(row.advantages, row.loss_mask, strict=True):
            assert result.advantage_range is not None or not on
            low, high = result.advantage_range or (0.0, 0.0)
            assert low <= advantage <= high or not on


def test_the_range_survives_the_wire() -> None:
    result = _result([_rollout(0.0), _rollout(1.0)])
    codec = DataConverter.default.payload_converter
    (back,) = codec.from_payloads(codec.to_payloads([result]), [GroupResult])
    assert back == result and back.advantage_range == (-0.5, 0.5)


# -- groups that must be complete -------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "lost", "error"),
    [
        (_rollout(0.0, error=BROKEN), "", "1 of 3 rollouts failed: ToolError: no such tool"),
        (None, "engine died", "1 of 3 rollouts failed: Abandoned: engine died"),
    ],
)
def test_one_failure_rejects_the_whole_group(
    bad: dict[str, Any] | None, lost: str, error: str
) -> None:
    rollouts = [_rollout(0.0), bad, _rollout(1.0, logprob=CERTAIN)]
    document = _group(rollouts, pre=[LOOP], post=[ZERO], lost=lost, require_full=True)
    result = groups.result(document, REF)
    assert (result.survivors, result.trainable, result.samples, result.errored) == (0, 0, 0, 1)
    assert result.error == f"require_full_group: {error}"
    assert result.advantage_range is None and result.reward_mean == 0.5
    assert result.filters == FilterTally(), "filters were not asked"
    assert result.labels == ["3.0"], "tokens of a refused push are still recognised"
    assert groups.batch_samples(document) == []
    members = document["rollouts"]
    assert [member["rollout"] for member in members] == [0, 1, 2]
    assert members[0]["samples"] and members[2]["samples"], "all keep what they have"
    assert [rollout.advantage for rollout in groups.batch_group(document).rollouts] == [None, None]


def test_a_complete_group_is_scored_as_ever() -> None:
    rollouts = [_rollout(0.0), _rollout(1.0, logprob=CERTAIN), _rollout(0.5)]
    slots: Any = {"pre": [LOOP], "post": [ZERO]}
    assert _group(rollouts, require_full=True, **slots) == _group(rollouts, **slots)


def test_evals_and_other_groups_train_on_what_is_left() -> None:
    rollouts = [_rollout(0.0), None, _rollout(1.0)]
    assert _result(rollouts).survivors == 2
    assert _result(rollouts, kind="eval", require_full=True).survivors == 2


async def test_slots_and_flag_come_from_the_run(tmp_path: Path) -> None:
    """The activity on a real store, for two envs of which one wants its groups complete."""
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path / "store"), own_queue="q")
    envs = [
        {"id": "reverse-text"},
        {"id": "reverse-text", "name": "whole", "require_full_group": True},
    ]
    slots = {"pre_batch": [], "post_batch": [{"type": "zero_advantage", "enforce": True}]}
    config = validate({"max_steps": 1, "train": {"env": envs}, "filters": slots})
    ctx.store.put_json(keys.config("r"), config.model_dump(mode="json"))
    rooms = rollout_activities(ctx)

    async def finalize(number: int, env: str, rewards: list[float], size: int) -> GroupResult:
        work = GroupWork(f"train/{number}", "train", env, 0, size)
        for index, reward in enumerate(rewards):
            ctx.store.put_json(keys.rollout("r", work.group, index), _rollout(reward))
        given = FinalizeGroupInput("r", work, 3, "worker died")
        return await ActivityEnvironment().run(rooms.finalize_group, given)

    part = await finalize(0, "reverse-text", [0.0, 0.5, 1.0], 4)
    assert (part.survivors, part.trainable, part.samples) == (3, 2, 2)
    assert part.error == "Abandoned: worker died"
    broken = await finalize(1, "whole", [0.0, 0.5, 1.0], 4)
    assert (broken.survivors, broken.errored) == (0, 1)
    assert broken.error == "require_full_group: 1 of 4 rollouts failed: Abandoned: worker died"
    whole = await finalize(2, "whole", [0.0, 1.0], 2)
    assert (whole.survivors, whole.trainable, whole.error) == (2, 2, "")


@pytest.mark.parametrize("kind", ["train", "eval"])
async def test_a_group_that_was_just_written_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    """And a later call, which reads it, has the same result."""
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path / "store"), own_queue="q")
    envs, slots = {"env": [{"id": "reverse-text"}]}, {"pre_batch": [], "post_batch": []}
    config = validate({"max_steps": 1, "train": envs, "eval": envs, "filters": slots})
    ctx.store.put_json(keys.config("r"), config.model_dump(mode="json"))
    read: list[str] = []
    get = ctx.store.get

    def watched(ref: ArtifactRef, *, schema: int = 1) -> bytes:
        read.append(ref.key)
        return get(ref, schema=schema)

    monkeypatch.setattr(ctx.store, "get", watched)
    work = GroupWork("train/0" if kind == "train" else "eval/0-0/a/0", kind, "reverse-text", 0, 3)
    for index, rollout in enumerate([_rollout(0.25), _rollout(1.0), _rollout(0.0, error=BROKEN)]):
        ctx.store.put_json(keys.rollout("r", work.group, index), rollout)
    given, rooms = FinalizeGroupInput("r", work, 3), rollout_activities(ctx)
    first = await ActivityEnvironment().run(rooms.finalize_group, given)
    assert keys.group("r", work.group) not in read and len(read) >= 3
    again = await ActivityEnvironment().run(rooms.finalize_group, given)
    assert again == first and keys.group("r", work.group) in read
