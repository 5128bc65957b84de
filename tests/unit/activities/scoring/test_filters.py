"""Filters: detection rules at their limits, both slots on whole groups, and what then ships."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from ratchet.activities.contracts import names
from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.rollouts import (
    BatchResult,
    FilterTally,
    FinalizeGroupInput,
    GroupResult,
    GroupWork,
    ShipBatchInput,
)
from ratchet.activities.rollouts import groups
from ratchet.activities.rollouts.activities import RolloutActivities
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.scoring import batches, filters
from ratchet.activities.scoring.filters import Verdict
from ratchet.activities.storage import documents, keys
from ratchet.activities.storage.batch import decode_batch
from ratchet.activities.storage.store import CorruptArtifact
from ratchet.configs.filters import (
    FilterConfig,
    FiltersConfig,
    GibberishConfig,
    RepetitionConfig,
    RewardFilterConfig,
    ZeroAdvantageConfig,
)
from ratchet.configs.load import ConfigError, dump_toml, parse, validate
from tests.groups import rollout_activities, score_group

VOCABULARY = 151_936
RARE = 120_000
CERTAIN, UNSURE = -1e-6, -3.0


def _sample(
    token_ids: list[int],
    logprobs: list[float],
    advantages: list[float] | None = None,
    versions: list[int] | None = None,
) -> dict[str, Any]:
    """A sample: one prompt token, which no rule may look at, and then what was sampled."""
    count = len(token_ids)
    sample: dict[str, Any] = {
        "token_ids": [RARE, *token_ids],
        "loss_mask": [False] + [True] * count,
        "logprobs": [0.0, *logprobs],
        "versions": [-1, *(versions or [0] * count)],
    }
    if advantages is not None:
        sample["advantages"] = [0.0, *advantages]
    return sample


def _hits(config: FilterConfig, *samples: dict[str, Any]) -> bool:
    return filters.judge([config], samples, VOCABULARY).hits == (config.type,)


# -- detection ------------------------------------------------------------------------------


def test_gibberish_golden() -> None:
    """-ln(151936) - 2 = -13.931214..., by hand."""
    config = GibberishConfig()
    least = -math.log(VOCABULARY) - 2.0
    assert least == pytest.approx(-13.931214, abs=1e-6)
    below = math.nextafter(least, -math.inf)
    assert _hits(config, _sample([100_001], [below]))
    assert not _hits(config, _sample([100_001], [least])), "the limit itself is no hit"
    assert not _hits(config, _sample([100_000], [below])), "the threshold itself is no hit"
    assert _hits(config, _sample([5], [UNSURE]), _sample([5, RARE], [UNSURE, -14.0]))
    assert not _hits(config, _sample([5, RARE], [-14.0, UNSURE])), "one token must be both"


def test_gibberish_offset_and_threshold_are_heard() -> None:
    sample = _sample([500], [-13.0])
    assert not _hits(GibberishConfig(), sample)
    assert not _hits(GibberishConfig(token_id_threshold=100), sample)
    assert _hits(GibberishConfig(token_id_threshold=100, logprob_offset=1.0), sample)


def test_repetition_golden() -> None:
    """ln(0.99) = -0.01005034 and the limit itself ends a run."""
    config = RepetitionConfig(window=3)
    least = math.log(0.99)
    assert least == pytest.approx(-0.01005034, abs=1e-8)
    above = math.nextafter(least, 0.0)
    assert _hits(config, _sample([1] * 3, [above] * 3)), "a run of exactly the window"
    assert not _hits(config, _sample([1] * 2, [above] * 2))
    assert not _hits(config, _sample([1] * 3, [above, least, above]))
    assert not _hits(config, _sample([1] * 5, [CERTAIN, CERTAIN, UNSURE, CERTAIN, CERTAIN]))
    assert _hits(config, _sample([1] * 5, [CERTAIN, UNSURE, CERTAIN, CERTAIN, CERTAIN]))


def test_repetition_goes_on_over_turns_and_samples() -> None:
    config = RepetitionConfig(window=3)
    two, one = _sample([1] * 2, [CERTAIN] * 2), _sample([1], [CERTAIN])
    empty, reset = _sample([], []), _sample([1], [UNSURE])
    assert _hits(config, two, one)
    assert _hits(config, two, empty, one), "a step without tokens does not end a run"
    assert not _hits(config, two, reset, two)
    turns = _sample([1] * 4, [CERTAIN, CERTAIN, -9.0, CERTAIN])
    turns["loss_mask"][3] = False
    assert _hits(config, turns), "what the env says between two turns does not end a run"


def test_tokens_that_nobody_measured_are_no_hit() -> None:
    """A frozen model's tokens have log-probability 0.0, which would be certainty."""
    unversioned = _sample([RARE] * 4, [0.0] * 4, versions=[-1] * 4)
    assert not _hits(RepetitionConfig(window=3), unversioned)
    assert not _hits(GibberishConfig(), _sample([RARE], [-99.0], versions=[-1]))
    two = _sample([1] * 4, [CERTAIN, 0.0, -9.0, CERTAIN], versions=[0, -1, -1, 0])
    assert _hits(RepetitionConfig(window=2), two), "they neither count nor end a run"


def test_default_window() -> None:
    assert not _hits(RepetitionConfig(), _sample([1] * 2999, [CERTAIN] * 2999))
    assert _hits(RepetitionConfig(), _sample([1] * 3000, [CERTAIN] * 3000))


@pytest.mark.parametrize(
    ("advantages", "hit"),
    [([0.0, 0.0], True), ([-0.0, 0.0], True), ([0.0, 1e-300], False), (None, False)],
)
def test_zero_advantage(advantages: list[float] | None, hit: bool) -> None:
    assert _hits(ZeroAdvantageConfig(), _sample([1, 2], [UNSURE] * 2, advantages)) is hit


def test_a_counted_hit_hides_nothing() -> None:
    sample = _sample([RARE, RARE], [-20.0, CERTAIN], [0.0, 0.0])
    slot: list[FilterConfig] = [
        GibberishConfig(),
        RepetitionConfig(window=1),
        ZeroAdvantageConfig(enforce=True),
    ]
    verdict = filters.judge(slot, [sample], VOCABULARY)
    assert verdict == Verdict(("gibberish", "repetition", "zero_advantage"), True)
    assert filters.judge(slot[:2], [sample], VOCABULARY).removed is False
    assert filters.judge([], [sample], None) == Verdict()


def test_vocabulary_is_read_only_if_needed() -> None:
    assert filters.needs_vocabulary(FiltersConfig().pre_batch)
    assert not filters.needs_vocabulary([RepetitionConfig(), ZeroAdvantageConfig()])
    assert filters.vocab_size_of({"vocab_size": 7}) == 7
    assert filters.vocab_size_of({"text_config": {"vocab_size": 9}}) == 9
    assert filters.vocab_size_of({"text_config": None}) is None


# -- groups ---------------------------------------------------------------------------------


def _rollout(reward: float, samples: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    sampled = sum(sum(sample["loss_mask"]) for sample in samples)
    return {
        "reward": reward,
        "error": None,
        "labels": ["3.0"],
        "tokens": sum(len(sample["token_ids"]) for sample in samples),
        "sampled_tokens": sampled,
        "samples": samples,
        "messages": [],
        "rewards": {},
        "metrics": {},
        "truncated": False,
        "stop": "agent_completed",
        "turns": 1,
        "responded": True,
        "temperature": 1.0,
        **more,
    }


def _judge(slot: list[FilterConfig]) -> groups.Judge:
    return lambda samples, *, reward: filters.judge(slot, samples, VOCABULARY, reward)


def _group(
    rollouts: list[dict[str, Any] | None], slot: list[FilterConfig], number: int = 0
) -> dict[str, Any]:
    work = GroupWork(f"train/{number}", "train", "e", 0, len(rollouts))
    return score_group(work, rollouts, 3, "", judge=_judge(slot))


REF = ArtifactRef("k", "0" * 64, 1, "p")
LOOP = RepetitionConfig(window=2, enforce=True)


def test_pre_batch_takes_a_rollout_but_not_its_part_in_the_baseline() -> None:
    loop = _rollout(1.0, [_sample([1, 2], [CERTAIN] * 2)])
    fine = [_rollout(reward, [_sample([1, 2], [UNSURE] * 2)]) for reward in (0.0, 0.5)]
    document = _group([loop, *fine], [LOOP, ZeroAdvantageConfig(enforce=False)])
    first, _, third = document["rollouts"]
    assert (first["filters"], first["filtered"]) == ({"repetition": True}, True)
    assert (third["filters"], third["filtered"]) == ({"zero_advantage": True}, False)
    result = groups.result(document, REF)
    assert (result.survivors, result.errored, result.samples, result.tokens) == (2, 0, 2, 6)
    assert result.reward_mean == 0.5 and result.error == ""
    assert result.filters == FilterTally(3, 1, {"repetition": 1, "zero_advantage": 1})
    rows = groups.batch_samples(document)
    assert [row.rollout for row in rows] == [1, 2]
    assert rows[0].advantages == [0.0, -0.5, -0.5], "the removed one still counts in the mean"


def test_group_with_nothing_left_says_why() -> None:
    alike = [_rollout(0.25, [_sample([1], [UNSURE])]) for _ in range(3)]
    document = _group([*alike, None], [ZeroAdvantageConfig(enforce=True)])
    result = groups.result(document, REF)
    assert (result.survivors, result.errored, result.samples) == (0, 1, 0)
    assert result.error == (
        "pre-batch filters removed 3 of 3 rollouts (zero_advantage 3); "
        "Lost: the rollout never finished"
    )


def test_evals_are_never_filtered() -> None:
    work = GroupWork("eval/0-0/e/0", "eval", "e", 0, 2)
    loop = _rollout(1.0, [_sample([1, 2], [CERTAIN] * 2)])
    document = score_group(work, [loop, loop], 3, "", judge=_judge([LOOP]))
    assert len(groups.eval_rollouts(document)) == 2
    assert "filters" not in document["rollouts"][0]


def test_groups_from_before_there_were_filters_still_ship() -> None:
    document = _group([_rollout(r, [_sample([1], [UNSURE])]) for r in (0.0, 1.0)], [])
    for member in document["rollouts"]:
        for name in ("filters", "filtered", "stop", "timing", "metrics"):
            del member[name]
    assert len(groups.batch_samples(document)) == 2
    assert batches.summarize([groups.batch_group(document)], 4)["batch/trainable"] == 1.0


def _ship(
    documents: list[dict[str, Any]], slot: list[FilterConfig]
) -> tuple[list[Any], dict[str, float]]:
    judged = [(doc, groups.judge_survivors(doc, _judge(slot))) for doc in documents]
    rows = [row for doc, verdicts in judged for row in groups.batch_samples(doc, verdicts)]
    names = [config.type for config in slot]
    summary = batches.summarize(
        [groups.batch_group(doc, verdicts) for doc, verdicts in judged], 4, post_batch=names
    )
    return rows, summary


def test_post_batch_ships_without_what_it_removes() -> None:
    taught = _group([_rollout(r, [_sample([1], [UNSURE])]) for r in (0.0, 1.0)], [])
    same = _group([_rollout(1.0, [_sample([1], [UNSURE])]) for _ in range(2)], [], 1)
    rows, metrics = _ship([taught, same], FiltersConfig().post_batch)
    assert [row.group for row in rows] == ["train/0", "train/0"]
    assert metrics["batch/trainable"] == 0.5 and metrics["batch/empty"] == 0.0
    assert metrics["filters/all/is_filtered"] == metrics["filters/e/zero_advantage"] == 0.5
    assert metrics["filters/all/gibberish"] == 0.0
    rows, metrics = _ship([same], FiltersConfig().post_batch)
    assert rows == [] and metrics["batch/trainable"] == 0.0 and metrics["batch/empty"] == 1.0
    assert metrics["reward/all/mean"] == 1.0, "rewards tell of what was removed, too"


# -- monitoring never changes what ships ------------------------------------------------------

_LOGPROBS = st.sampled_from([CERTAIN, UNSURE, -20.0])
_TOKENS = st.tuples(st.sampled_from([7, RARE]), _LOGPROBS)
_SAMPLES = st.lists(
    st.lists(_TOKENS, min_size=1, max_size=5).map(
        lambda tokens: _sample([t for t, _ in tokens], [p for _, p in tokens])
    ),
    min_size=1,
    max_size=3,
)
_ROLLOUTS = st.builds(_rollout, st.sampled_from([0.0, 0.1, 1.0]), _SAMPLES)
_GROUPS = st.lists(st.lists(_ROLLOUTS, min_size=2, max_size=4), min_size=1, max_size=3)
_SLOTS = st.lists(
    st.one_of(
        st.builds(GibberishConfig, enforce=st.booleans()),
        st.builds(RepetitionConfig, window=st.integers(1, 4), enforce=st.booleans()),
        st.builds(ZeroAdvantageConfig, enforce=st.booleans()),
    ),
    max_size=3,
    unique_by=lambda config: config.type,
)


@given(_GROUPS, _SLOTS, _SLOTS, st.randoms())
def test_only_enforced_filters_change_what_ships(
    rollouts: list[list[dict[str, Any]]],
    pre: list[FilterConfig],
    post: list[FilterConfig],
    random: Any,
) -> None:
    def shipped(
        pre_batch: list[FilterConfig], post_batch: list[FilterConfig]
    ) -> tuple[list[Any], list[int]]:
        documents = [_group(list(own), pre_batch, n) for n, own in enumerate(rollouts)]
        survivors = [groups.result(document, REF).survivors for document in documents]
        return _ship(documents, post_batch)[0], survivors

    found = shipped(pre, post)
    enforced = [[config for config in slot if config.enforce] for slot in (pre, post)]
    assert found == shipped(*enforced), "dropping the filters that only count changes nothing"
    assert found == shipped(random.sample(pre, len(pre)), post[::-1]), "nor does their order"
    monitors = [
        [config.model_copy(update={"enforce": False}) for config in slot] for slot in (pre, post)
    ]
    assert shipped(*monitors) == shipped([], [])


# -- config ---------------------------------------------------------------------------------

MINIMAL: dict[str, Any] = {"max_steps": 3, "train": {"env": [{"id": "reverse-text"}]}}


def test_default_slots() -> None:
    config = validate(MINIMAL)
    assert [(f.type, f.enforce) for f in config.filters.pre_batch] == [
        ("gibberish", False),
        ("repetition", False),
        ("zero_advantage", False),
    ]
    assert [(f.type, f.enforce) for f in config.filters.post_batch] == [
        ("gibberish", False),
        ("repetition", False),
        ("zero_advantage", True),
    ]
    assert validate(parse(dump_toml(config))) == config


def test_a_given_slot_replaces_its_default() -> None:
    text = '[[filters.pre_batch]]\ntype = "repetition"\nwindow = 8\nenforce = true\n'
    filled = validate({**MINIMAL, **parse(text)}).filters
    assert filled.pre_batch == [RepetitionConfig(window=8, enforce=True)]
    assert filled.post_batch == FiltersConfig().post_batch
    assert validate({**MINIMAL, "filters": {"post_batch": []}}).filters.post_batch == []


@pytest.mark.parametrize(
    ("slot", "pointer", "message"),
    [
        ([{"type": "repetition", "windw": 3}], "/0/windw", "its options: window"),
        ([{"type": "repitition"}], "/0/type", "did you mean 'repetition'"),
        ([{"window": 3}], "/0/type", "is required; one of 'gibberish'"),
        ([{"type": "gibberish"}] * 2, "", "is set twice"),
        ([{"type": "repetition", "prob_threshold": 1.0}], "/0/prob_threshold", "less than 1"),
    ],
)
def test_config_mistakes_are_named(slot: list[Any], pointer: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate({**MINIMAL, "filters": {"post_batch": slot}})
    (problem,) = error.value.problems
    assert problem.pointer == f"/filters/post_batch{pointer}" and message in problem.message


# -- the activities -------------------------------------------------------------------------


def _world(tmp_path: Path, algo: dict[str, Any] | None = None, **filters: Any) -> RolloutActivities:
    """Activities on a real store that holds a run's config and the policy's version 0."""
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path / "store"), own_queue="q")
    given = {**MINIMAL, "filters": filters, **({"algo": algo} if algo else {})}
    config = validate(given)
    ctx.store.put_json(keys.config("r"), config.model_dump(mode="json"))
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    ctx.store.put_folder(keys.weights("r", 0), policy, attempt="0")
    return rollout_activities(ctx)


async def _finalize(
    rooms: RolloutActivities, number: int, rollouts: list[dict[str, Any]]
) -> GroupResult:
    work = GroupWork(f"train/{number}", "train", "reverse-text", number, len(rollouts))
    for index, rollout in enumerate(rollouts):
        rooms.ctx.store.put_json(keys.rollout("r", work.group, index), rollout)
    run = ActivityEnvironment().run
    return await run(rooms.finalize_group, FinalizeGroupInput("r", work, 3))


async def _ship_groups(rooms: RolloutActivities, step: int, *done: GroupResult) -> BatchResult:
    digest = hashlib.sha256("".join(d.ref.sha256 for d in done if d.ref).encode()).hexdigest()
    given = ShipBatchInput("r", step, [d.group for d in done], digest, done[-1].filters)
    return await ActivityEnvironment().run(rooms.ship_batch, given)


def _metrics(rooms: RolloutActivities, batch: BatchResult) -> dict[str, float]:
    assert batch.metrics_ref is not None
    metrics: dict[str, float] = rooms.ctx.store.get_json(batch.metrics_ref)
    return metrics


async def test_both_slots_on_a_real_store(tmp_path: Path) -> None:
    rooms = _world(
        tmp_path, pre_batch=[{"type": "gibberish", "enforce": True}, {"type": "zero_advantage"}]
    )
    fine, rare = _sample([1, 2], [UNSURE] * 2), _sample([RARE, 2], [-20.0, UNSURE])
    taught = await _finalize(rooms, 0, [_rollout(r, [fine]) for r in (0.0, 0.5, 1.0)])
    spoilt = await _finalize(rooms, 1, [_rollout(r, [rare]) for r in (0.0, 1.0)])
    assert (taught.survivors, taught.filters.hits) == (2, {"zero_advantage": 1})
    assert (spoilt.survivors, spoilt.filters.hits) == (0, {"gibberish": 2})
    assert taught.ref is not None
    stored = documents.read(rooms.ctx.store, taught.ref)["rollouts"]
    assert [member["filters"] for member in stored] == [{}, {"zero_advantage": True}, {}]
    batch = await _ship_groups(rooms, 1, taught, spoilt)
    assert batch.ref is not None and (batch.samples, batch.rollouts, batch.tokens) == (2, 2, 6)
    assert [row.rollout for row in decode_batch(rooms.ctx.store.get(batch.ref))] == [0, 2]
    metrics = _metrics(rooms, batch)
    assert metrics["pre_filters/all/gibberish/rate"] == (2 + 2) / (5 + 2)
    assert metrics["train/reverse-text/all/reward/mean"] == pytest.approx(2.5 / 5)
    assert metrics["train/agg/effective/reward/max"] == 1.0
    headline = {"reward/all/mean", "progress/tokens", "progress/samples", "progress/problems"}
    told = {"batch/trainable", "time/scoring", "staleness/mean", "staleness/max"}
    assert set(batch.metrics) == headline | told
    assert batch.metrics.items() <= metrics.items()
    assert await _ship_groups(rooms, 1, taught, spoilt) == batch, "a retry adopts what is stored"


async def test_a_batch_may_end_up_empty(tmp_path: Path) -> None:
    rooms = _world(tmp_path)
    sample = _sample([1], [UNSURE])
    same = await _finalize(rooms, 0, [_rollout(0.1, [sample]) for _ in range(3)])
    assert same.survivors == 3, "by default nothing is removed before the batch"
    batch = await _ship_groups(rooms, 1, same)
    assert (batch.ref, batch.samples, batch.rollouts) == (None, 0, 0)
    metrics = _metrics(rooms, batch)
    assert (metrics["batch/empty"], batch.metrics["batch/trainable"]) == (1.0, 0.0)
    assert not [name for name in metrics if name.startswith("train/agg/effective")]
    assert rooms.ctx.store.committed(keys.batch("r", 1)) is None, "the step's key stays free"
    taught = await _finalize(rooms, 1, [_rollout(r, [sample]) for r in (0.0, 1.0)])
    batch = await _ship_groups(rooms, 1, taught)
    assert _metrics(rooms, batch)["batch/empty"] == 0.0, "the step has metrics of its own"


async def test_what_was_shipped_stands_whatever_becomes_of_its_groups(tmp_path: Path) -> None:
    """An attempt whose answer was lost has told its groups to train; none may be replaced."""
    rooms = _world(tmp_path)
    sample = _sample([1, 2], [UNSURE] * 2)
    first, second, third = [
        await _finalize(rooms, n, [_rollout(r, [sample]) for r in (0.0, n + 1.0)]) for n in range(3)
    ]
    batch = await _ship_groups(rooms, 1, first, second)
    assert first.ref is not None
    Path(rooms.ctx.store.path(first.ref.path)).write_bytes(b"{}")
    assert await _ship_groups(rooms, 1, first, second) == batch
    with pytest.raises(ApplicationError, match="than those that this run has for step 1"):
        await _ship_groups(rooms, 1, second, third)
    with pytest.raises(CorruptArtifact):
        await _ship_groups(rooms, 2, first, third)


@pytest.mark.parametrize(
    ("bounds", "hits"),
    [
        ({"min": 0.5}, [True, False, False, False]),
        ({"max": 0.5}, [False, False, True, True]),
        ({"min": 0.25, "max": 0.75}, [True, False, False, True]),
        ({"min": 1.0, "max": 1.0}, [True, True, True, False]),
    ],
)
def test_a_reward_outside_of_its_bounds(bounds: dict[str, float], hits: list[bool]) -> None:
    """Rewards 0, 1/2, 3/4 and 1; a bound itself is no hit."""
    slot = [RewardFilterConfig(**bounds)]
    verdicts = [filters.judge(slot, [], None, reward) for reward in (0.0, 0.5, 0.75, 1.0)]
    assert [verdict.hits == ("reward",) for verdict in verdicts] == hits
    assert not any(verdict.removed for verdict in verdicts), "it counts, unless it is enforced"


@pytest.mark.parametrize("slot", ["pre_batch", "post_batch"])
async def test_sft_with_a_reward_filter_is_rejection_sampling(tmp_path: Path, slot: str) -> None:
    """Golden: of rewards 0, 0.9 and 1 with min = 0.9 the last two are learned, token by token."""
    source = {"name": "m", "base_url": "http://127.0.0.1:1/v1"}
    other = "post_batch" if slot == "pre_batch" else "pre_batch"
    only = [{"type": "reward", "min": 0.9, "enforce": True}]
    rooms = _world(tmp_path, algo={"type": "sft", "source": source}, **{slot: only, other: []})
    replies = [_sample([n, n + 10], [UNSURE] * 2) for n in range(3)]
    told = await _finalize(
        rooms, 0, [_rollout(r, [s]) for r, s in zip((0.0, 0.9, 1.0), replies, strict=True)]
    )
    assert (told.survivors, told.trainable) == ((2, 2) if slot == "pre_batch" else (3, 2))
    batch = await _ship_groups(rooms, 1, told)
    assert batch.ref is not None
    rows = decode_batch(rooms.ctx.store.get(batch.ref))
    assert [(row.rollout, row.reward) for row in rows] == [(1, 0.9), (2, 1.0)]
    for row in rows:
        assert row.advantages is None and row.ce_weights == [float(on) for on in row.loss_mask]
    family = "pre_filters/all/reward/rate" if slot == "pre_batch" else "filters/all/reward"
    assert _metrics(rooms, batch)[family] == pytest.approx(1 / 3)


async def test_gibberish_without_a_vocabulary_is_the_users_mistake(tmp_path: Path) -> None:
    rooms = _world(tmp_path)
    folder = Path(await rooms.policies.tokenizer("r"))
    (folder / "config.json").write_text("{}")
    with pytest.raises(ApplicationError, match="no vocab_size") as error:
        await _finalize(rooms, 0, [_rollout(0.1, [_sample([1], [UNSURE])])])
    assert error.value.type == names.BAD_INPUT and error.value.non_retryable
