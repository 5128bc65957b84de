"""Changes of a running run: what may change, what a change makes of the limits, what is refused."""

from typing import Any

import pytest

from ratchet.configs.live import LIVE_KEYS, changed, differences, needs_revision, pending
from ratchet.configs.load import ConfigError, validate
from ratchet.configs.run import RunConfig
from ratchet.workflows.protocol.state import Limits, Shares
from ratchet.workflows.rules.live_config import limits_of, ratios_of, shares_after
from tests.unit.workflows.support import config

PLAIN: dict[str, Any] = {
    "max_steps": 10,
    "train": {"env": [{"id": "a"}], "batch_size": 8, "group_size": 4},
    "dispatch": {"tasks_per_minute": 60, "rollouts_per_activity": 2},
}


def change(patch: dict[str, Any], overrides: dict[str, Any] | None = None) -> RunConfig:
    """The config after one change."""
    return changed(PLAIN, overrides or {}, patch)[1]


def test_changes_add_up_and_leave_the_rest_alone() -> None:
    first, _ = changed(PLAIN, {}, {"dispatch": {"max_inflight_rollouts": 16}})
    both, after = changed(PLAIN, first, {"dispatch": {"tasks_per_minute": 600}})
    assert both == {"dispatch": {"max_inflight_rollouts": 16, "tasks_per_minute": 600}}
    assert (after.permits, after.dispatch.tasks_per_minute) == (16, 600)
    assert after.dispatch.rollouts_per_activity == 2
    assert first == {"dispatch": {"max_inflight_rollouts": 16}}, "nothing is changed in place"
    assert PLAIN["dispatch"] == {"tasks_per_minute": 60, "rollouts_per_activity": 2}


def test_a_later_change_replaces_an_earlier_one() -> None:
    earlier = {"dispatch": {"max_inflight_rollouts": 16}}
    assert change({"dispatch": {"max_inflight_rollouts": 9}}, earlier).permits == 9


def test_nulls_that_remove_nothing_are_not_kept() -> None:
    config = {**PLAIN, "metadata": {"owner": "ana"}}
    overrides: dict[str, Any] = {}
    for times in range(3):
        nulls = {f"k{times}-{number}": None for number in range(1000)}
        overrides, _ = changed(config, overrides, {"metadata": {**nulls, "note": f"{times}"}})
        assert overrides == {"metadata": {"note": f"{times}"}}
    overrides, after = changed(config, overrides, {"metadata": {"owner": None, "note": None}})
    assert overrides == {"metadata": {"owner": None}} and after.metadata == {}
    both = {"metadata": {"owner": "ben", "x": None}, "max_steps": 9}
    assert changed(config, overrides, both)[0] == {"metadata": {"owner": "ben"}, "max_steps": 9}
    assert changed(PLAIN, {}, {"metadata": {"x": None}})[0] == {}


def test_null_takes_a_limit_back() -> None:
    assert change({"dispatch": {"tasks_per_minute": None}}).dispatch.tasks_per_minute is None
    earlier = {"dispatch": {"max_inflight_rollouts": 16}}
    after = change({"dispatch": {"max_inflight_rollouts": None}}, earlier)
    assert after.permits == 8, "without a number permits are the batch size"


@pytest.mark.parametrize(
    ("patch", "named"),
    [
        ({"seed": 20}, "seed"),
        ({"train": {"batch_size": 16}}, "train.batch_size"),
        ({"dispatch": {"burst": 4}}, "dispatch.burst"),
        ({"dispatch": {"tasks_per_minute": 60, "burst": 4}}, "dispatch.burst"),
        ({"dispatch": {"tasks_per_minute": {"a": 1}}}, "dispatch.tasks_per_minute.a"),
        ({"dispatch": {}}, "dispatch"),
        ({"dispatch": 5}, "dispatch"),
    ],
)
def test_any_other_key_is_refused_by_name(patch: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match="cannot change") as refused:
        change(patch)
    (problem,) = refused.value.problems
    assert problem.key == named and problem.pointer == "/" + named.replace(".", "/")
    assert all(key in problem.message for key in LIVE_KEYS)


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        (
            {"dispatch": {"tasks_per_minit": 60}},
            "unknown key; did you mean 'dispatch.tasks_per_minute'?",
        ),
        (
            {"dispatch": {"max_inflight": 3}},
            "unknown key; did you mean 'dispatch.max_inflight_rollouts'?",
        ),
        ({"trainer": {"optim": {"lrr": 1}}}, "unknown key; did you mean 'trainer.optim.lr'?"),
        ({"zzz": None}, "unknown key; valid keys: name, "),
    ],
)
def test_an_unknown_key_is_called_so(patch: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        change(patch)
    (problem,) = refused.value.problems
    assert problem.message.startswith(said)
    assert all(key in problem.message for key in LIVE_KEYS)


def test_every_fixed_key_is_named() -> None:
    with pytest.raises(ConfigError) as refused:
        change({"seed": 1, "train": {"max_lag": 2}, "dispatch": {"tasks_per_minute": 6}})
    assert [problem.key for problem in refused.value.problems] == ["seed", "train.max_lag"]


def test_empty_change_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to change") as refused:
        change({})
    assert all(key in str(refused.value) for key in LIVE_KEYS)


@pytest.mark.parametrize("value", [0, -1, 2.5, "many", [], {}, "AUTO"])
def test_value_out_of_range_is_refused_with_its_key(value: Any) -> None:
    for name in ("max_inflight_rollouts", "tasks_per_minute"):
        with pytest.raises(ConfigError) as refused:
            change({"dispatch": {name: value}})
        key = f"dispatch.{name}"
        assert any(problem.key.startswith(key) for problem in refused.value.problems)


def test_dotted_key_is_refused_as_unknown() -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        change({"dispatch.tasks_per_minute": 60})


def test_permits_must_hold_what_one_activity_carries_out() -> None:
    assert change({"dispatch": {"max_inflight_rollouts": 2}}).permits == 2
    with pytest.raises(ConfigError, match=r"max_inflight_rollouts \(1\) must hold"):
        change({"dispatch": {"max_inflight_rollouts": 1}})


def test_token_batches_need_a_number_or_auto() -> None:
    plain = {
        **PLAIN,
        "train": {"env": [{"id": "a"}], "token_batch_size": 99},
        "dispatch": {"max_inflight_rollouts": 8},
    }
    with pytest.raises(ConfigError, match="token_batch_size"):
        changed(plain, {}, {"dispatch": {"max_inflight_rollouts": None}})


# -- revisions ------------------------------------------------------------------------------

RESOLVED: dict[str, Any] = validate(
    {
        "max_steps": 10,
        "train": {"env": [{"id": "a", "ratio": 3}, {"id": "b", "name": "b.2"}], "batch_size": 8},
        "eval": {"env": [{"id": "c"}]},
    }
).model_dump(mode="json")


def test_envs_are_changed_by_name() -> None:
    patch = {
        "train": {"env": {"b.2": {"ratio": 2.5}}},
        "eval": {"env": {"c": {"interval": 7}}, "interval": 5},
        "trainer": {"optim": {"lr": 0.5}},
    }
    overrides, after = changed(RESOLVED, {}, patch)
    assert overrides == patch and ratios_of(after) == {"a": 3.0, "b.2": 2.5}
    assert after.eval_interval("c") == 7 and after.trainer.optim.lr == 0.5
    assert needs_revision(patch) and not needs_revision({"dispatch": {"tasks_per_minute": 6}})
    again, after = changed(RESOLVED, overrides, {"train": {"env": {"a": {"ratio": 1}}}})
    assert ratios_of(after) == {"a": 1.0, "b.2": 2.5} and after.trainer.optim.lr == 0.5
    assert again["train"]["env"] == {"a": {"ratio": 1}, "b.2": {"ratio": 2.5}}


@pytest.mark.parametrize(
    ("patch", "key"),
    [
        ({"train": {"env": {"nope": {"ratio": 1}}}}, "train.env.nope"),
        ({"train": {"env": {"a": {"ratio": 0}}}}, "train.env.0.ratio"),
        ({"train": {"env": {"a": {"group_size": 2}}}}, "train.env.a.group_size"),
        ({"trainer": {"optim": {"lr": -1}}}, "trainer.optim.lr"),
        ({"checkpoint": {"interval": 0}}, "checkpoint.interval"),
        ({"metadata": 5}, "metadata"),
    ],
)
def test_bad_change_of_a_section_names_its_key(patch: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        changed(RESOLVED, {}, patch)
    assert [problem.key for problem in refused.value.problems] == [key]


def test_metadata_is_merged_and_null_takes_a_pair_out() -> None:
    first, _ = changed(RESOLVED, {}, {"metadata": {"owner": "ana", "a.b": "c"}})
    _, after = changed(RESOLVED, first, {"metadata": {"owner": None}})
    assert after.metadata == {"a.b": "c"}


def test_shares_change_where_the_ratios_do() -> None:
    before = validate(RESOLVED)
    _, after = changed(RESOLVED, {}, {"train": {"env": {"a": {"ratio": 1}}}})
    assert shares_after([], before, before, 40) == []
    shares = shares_after([], before, after, 40)
    assert shares == [Shares(0, ratios_of(before)), Shares(40, ratios_of(after))]
    assert shares_after(shares, after, before, 40) == [shares[0], Shares(40, ratios_of(before))]
    assert len(shares_after(shares, after, before, 60)) == 3


# -- limits ---------------------------------------------------------------------------------


def test_limits_are_those_of_the_config() -> None:
    assert limits_of(config()) == Limits(permits=8)
    made = config(dispatch={"max_inflight_rollouts": 5, "tasks_per_minute": 7})
    assert limits_of(made) == Limits(permits=5, tasks_per_minute=7)


def test_auto_starts_where_it_is_told_or_small_and_goes_on_from_where_permits_are() -> None:
    auto = config(dispatch={"max_inflight_rollouts": "auto"})
    assert limits_of(auto) == Limits(permits=2, auto=True)
    told = {"max_inflight_rollouts": "auto", "concurrency": {"initial": 30}}
    assert limits_of(config(dispatch=told)).permits == 30
    assert limits_of(auto, Limits(permits=40)) == Limits(permits=40, auto=True)
    assert limits_of(auto, Limits(permits=1)).permits == 2, "one activity's worth at least"


def test_number_ends_auto_and_its_trim() -> None:
    before = Limits(permits=40, auto=True, trim=True)
    assert limits_of(config(dispatch={"max_inflight_rollouts": 6}), before) == Limits(permits=6)


def test_auto_permits_cannot_be_asked_of_engines_that_report_no_load() -> None:
    plain = config().model_dump(mode="json")
    with pytest.raises(ConfigError, match="cannot become 'auto'"):
        changed(plain, {}, {"dispatch": {"max_inflight_rollouts": "auto"}})
    auto = config(dispatch={"max_inflight_rollouts": "auto"}).model_dump(mode="json")
    first, _ = changed(auto, {}, {"dispatch": {"max_inflight_rollouts": 64}})
    _, back = changed(auto, first, {"dispatch": {"max_inflight_rollouts": "auto"}})
    assert back.permits is None


def test_a_run_may_lose_its_end_and_get_another() -> None:
    """Only where the schedule needs none."""
    plain = config().model_dump(mode="json")
    together, made = changed(plain, {}, {"max_steps": None})
    assert together == {"max_steps": None} and made.max_steps is None
    together, made = changed(plain, together, {"max_steps": 7})
    assert together == {"max_steps": 7} and made.last_step == 7
    falling = {**plain, "trainer": {"scheduler": {"type": "cosine"}}}
    with pytest.raises(ConfigError, match=r"trainer\.scheduler\.type 'cosine'.*max_steps"):
        changed(falling, {}, {"max_steps": None})


def test_a_change_is_told_from_old_to_new() -> None:
    patch = {"max_steps": 10, "train": {"env": {"a": {"ratio": 2.0}}}, "metadata": {"who": "me"}}
    before = validate(PLAIN)
    together, after = changed(before.model_dump(mode="json"), {}, patch)
    told = differences(before.model_dump(mode="json"), after.model_dump(mode="json"), patch)
    assert told == {"train.env.a.ratio": [1.0, 2.0], "metadata.who": [None, "me"]}
    assert pending(before, together) == {"train.env.a.ratio": 2.0}, "metadata holds at once"
    assert pending(after, together) == {}
