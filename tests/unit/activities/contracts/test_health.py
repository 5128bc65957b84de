"""The rules of a run's health: what each says of which steps, and that none ever raises."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.activities.contracts.health import (
    ENDS_AFTER,
    LATELY,
    NAMES,
    RULES,
    WINDOW,
    Finding,
    Row,
    begun,
    figures,
    find_begins,
    findings,
    relevant,
)
from ratchet.api.dashboard.pages import FILES
from tests import ROOT


def steps(count: int, **later: Any) -> list[Row]:
    """Rows of a run that learns; `later` are other values, plain or by the step's place."""
    rows = []
    for i in range(count):
        row = {
            "reward/all/mean": 0.2 + 0.01 * i,
            "zero_advantage/all": 0.2,
            "solve_none/all": 0.1,
            "solve_all/all": 0.1,
            "is_truncated/all/mean": 0.02,
            "entropy/all/mean": 1.0,
            "errors/all/rate": 0.0,
            "errors/reverse-text/rate": 0.0,
            "staleness/max": 1.0,
            "time/step": 10.0,
            "time/wait_for_batch": 3.0,
            "time/train": 6.0,
            "time/sync_weights": 1.0,
        }
        row |= {
            name.replace("__", "/").replace("DASH", "-"): of(i) if callable(of) else of
            for name, of in later.items()
        }
        rows.append(row)
    return rows


def rules_of(rows: list[Row]) -> list[str]:
    return [finding.rule for finding in findings(rows)]


def test_a_run_that_learns_is_healthy() -> None:
    assert findings(steps(WINDOW)) == []
    assert findings([]) == findings(steps(1)) == []
    assert figures(steps(WINDOW)).waits["time/train"] == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("rule", "count", "later", "message"),
    [
        (
            "no_variance",
            10,
            {"zero_advantage__all": 0.9, "solve_none__all": 0.9},
            "90 % of the rollouts of the last 10 steps carry no signal; most groups earn no reward",
        ),
        (
            "flat_reward",
            50,
            {"reward__all__mean": lambda i: 0.3 + 0.01 * (i % 2)},
            "the reward has stayed at 0.305 for 50 steps, within its noise",
        ),
        (
            "entropy_collapse",
            30,
            {"entropy__all__mean": lambda i: 1.0 if i < 20 else 0.05},
            "the policy's entropy fell from 1 to 0.05 nats within 30 steps",
        ),
        (
            "truncation",
            30,
            {"is_truncated__all__mean": lambda i: 0.01 * i},
            "rollouts cut off at a limit rose from 4 % to 25 %",
        ),
        (
            "truncation",
            10,
            {"is_truncated__all__mean": 0.6},
            "60 % of the rollouts are cut off at a limit",
        ),
        (
            "env_failing",
            5,
            {"errors__reverseDASHtext__rate": 0.4},
            "40 % of the rollouts of reverse-text fail",
        ),
        (
            "trainer_idle",
            10,
            {"time__wait_for_batch": 8.5, "time__train": 1.0, "time__sync_weights": 0.5},
            "the trainer waits for rollouts 85 % of the time",
        ),
        (
            "engines_idle",
            10,
            {"time__wait_for_batch": 0.0, "time__train": 9.0},
            "the trainer is busy 100 % of the time, and the engines wait for it",
        ),
    ],
)
def test_each_rule_says_what_is_the_matter(
    rule: str, count: int, later: dict[str, Any], message: str
) -> None:
    (finding,) = findings(steps(count, **later))
    assert (finding.rule, finding.message) == (rule, message)
    # One step less than it needs, and it is silent.
    assert rule not in rules_of(steps(min(count, 10) // 5, **later))


PRE = "pre_filters__all__"


@pytest.mark.parametrize(
    ("hit", "removed", "share"),
    [(0.83, 0.9, 0.83), (0.9, 0.83, 0.83), (0.83, 0.0, 0.2), (0.1, 0.1, 0.2)],
    ids=["removed", "removed in part", "only counted", "fewer than in the batch"],
)
def test_what_filters_remove_before_the_batch_carries_no_signal(
    hit: float, removed: float, share: float
) -> None:
    rates = {f"{PRE}zero_advantage__rate": hit, f"{PRE}dropped_rate": removed}
    rows = steps(LATELY, **rates)
    assert figures(rows).without_signal == pytest.approx(share)
    assert rules_of(rows) == (["no_variance"] if share > 0.8 else [])


def test_a_batch_without_advantages_has_no_share_without_signal() -> None:
    assert figures([{"time/step": 1.0}]).without_signal is None


def test_what_is_solved_is_neither_flat_nor_collapsed() -> None:
    solved: dict[str, Any] = {"reward__all__mean": 0.97, "zero_advantage__all": 0.9}
    solved |= {"entropy__all__mean": lambda i: 1.0 if i < 20 else 0.001}
    assert rules_of(steps(WINDOW, **solved)) == []


@pytest.mark.parametrize(("reward", "found"), [(0.86, []), (0.84, ["entropy_collapse"])])
def test_the_entropy_of_a_nearly_solved_task_may_fall(reward: float, found: list[str]) -> None:
    rows = steps(
        WINDOW,
        reward__all__mean=lambda i: reward * i / WINDOW if i < WINDOW - 5 else reward,
        entropy__all__mean=lambda i: 1.0 if i < 20 else 0.001,
    )
    assert rules_of(rows) == found


def test_a_finding_begins_once_and_again_only_after_a_while() -> None:
    def failing(i: int) -> float:
        return 0.5 if 10 <= i < 20 or 24 <= i < 30 or i >= 60 else 0.0

    rows = steps(80, errors__reverseDASHtext__rate=failing)
    result = [i for i in range(1, 81) if begun(rows[max(0, i - WINDOW - ENDS_AFTER) : i])]
    assert len(result) == 2 and 11 <= result[0] <= 15 and 61 <= result[1] <= 65


values = st.floats(allow_nan=False, allow_infinity=False, width=32)
names = st.sampled_from([*NAMES, "errors/a/rate", "errors/b/rate", "errors/a/by_type/x", "loss"])


@given(st.lists(st.dictionaries(names, values), max_size=WINDOW + ENDS_AFTER))
def test_rules_take_any_measurement(rows: list[dict[str, float]]) -> None:
    known = findings([relevant(row) for row in rows])
    assert known == findings(rows), "what is left out is not looked at"
    assert all(finding.rule in RULES and finding.message for finding in known)
    assert set(begun(rows)) <= set(known)
    figures(rows)


def test_a_finding_is_dated_by_the_step_with_which_it_began() -> None:
    key = ("env_failing", "reverse-text")

    def failing(*stretches: range) -> list[Row]:
        there = {i for stretch in stretches for i in stretch}
        name = "errors/reverse-textDASHrate".replace("DASH", "/")
        return [{**row, name: float(i in there)} for i, row in enumerate(steps(80))]

    assert find_begins(steps(80)) == {}
    # A mean over five steps: the first failing one is enough for a fifth.
    assert find_begins(failing(range(60, 80))) == {key: 60}
    assert find_begins(failing(range(60, 65), range(72, 80))) == {key: 60}, "a short absence"
    assert find_begins(failing(range(45, 50), range(72, 80))) == {key: 72}
    assert find_begins(failing(range(0, 80))) == {key: 80 - WINDOW}, "as far as it looks"
    assert find_begins(failing(range(60, 65))) == {}, "it is over"


def test_every_rule_has_its_section() -> None:
    page = (ROOT / "docs" / "reading-a-run.md").read_text()
    sections = [title.replace(" ", "-") for title in re.findall(r"^## (.+)$", page, re.M)]
    assert sections == [rule.replace("_", "-") for rule in RULES]
    assert "(docs/reading-a-run.md)" in (ROOT / "README.md").read_text()
    served = (FILES / "help" / "reading-a-run.html").read_text()
    for rule in RULES:
        page, _, section = Finding(rule, "").help.partition("#")
        assert page == "docs/reading-a-run.md" and f'<h2 id="{section}">' in served
