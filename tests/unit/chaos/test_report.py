"""Figures of the report, on a history written by hand."""

import pytest

from tests.chaos import report
from tests.chaos.checker import Verdict
from tests.chaos.history import Evidence, Signal
from tests.chaos.observer import Look
from tests.chaos.report import Clean, Story
from tests.chaos.schedule import Spec
from tests.chaos.world import REPLACED, Witness

CLEAN = Clean(median_step_s=2.0, steps=3)


def look(at: float, version: int, rollouts: int = 0, **fields: str) -> Look:
    return Look(at, fields.pop("status", "running"), version, version, rollouts, **fields)


def host(state: str, at: float, role: str = "engine") -> Signal:
    return Signal("run", "host_report", {"role": role, "state": state}, at)


def story(witness: Witness, *looks: Look, **fields: object) -> Story:
    return Story([witness], list(looks), [], [], 0.0, 100.0, **fields)  # type: ignore[arg-type]


def kill(role: str, at: float = 10.0) -> Witness:
    return Witness(Spec("kill", role), at, at, True, "SIGKILL")  # type: ignore[arg-type]


def test_steps_are_timed_between_versions() -> None:
    looks = [look(0.0, 1), look(1.0, 1, 8), look(2.0, 2), look(6.0, 3), look(7.0, 4)]
    assert report.step_times(looks) == [0.0, 2.0, 6.0, 7.0]
    assert report.median_step(looks) == 2.0
    with pytest.raises(ValueError, match="1 steps"):
        report.median_step(looks[:1])


def test_server_counts_as_recovered_only_once_it_is_up_and_the_run_goes_on() -> None:
    evidence = Evidence("run", signals=[host("up", 5.0), host("down", 11.0), host("up", 30.0)])
    result = story(kill("engine-api"), look(9.0, 1), look(12.0, 2), look(33.5, 3))
    assert report.detected_at(result.witnesses[0], result, evidence) == 11.0
    assert report.recovered_at(result.witnesses[0], result, evidence) == 33.5


def test_server_that_never_made_progress_has_not_recovered() -> None:
    evidence = Evidence("run", signals=[host("up", 30.0)])
    result = story(kill("engine-core"), look(9.0, 1), look(12.0, 2))
    assert report.recovered_at(result.witnesses[0], result, evidence) is None


def test_service_is_back_when_the_supervisor_restarted_it() -> None:
    result = Story(
        [kill("rollout-worker")],
        [look(11.0, 1), look(20.0, 2)],
        [(12.0, "worker-rollout")],
        [],
        0,
        30,
    )
    assert report.detected_at(result.witnesses[0], result, Evidence("run")) == 12.0
    assert report.recovered_at(result.witnesses[0], result, Evidence("run")) == 20.0


def test_worker_is_back_when_its_servers_are() -> None:
    evidence = Evidence("run", signals=[host("up", 25.0, "trainer")])
    restarts = [(11.0, "worker-trainer")]
    looks = [look(12.0, 1), look(24.0, 2), look(26.0, 3)]
    result = Story([kill("trainer-worker")], looks, restarts, [], 0, 30)
    assert report.recovered_at(result.witnesses[0], result, evidence) == 26.0


def test_full_disk_is_detected_when_the_run_pauses_itself() -> None:
    witness = Witness(Spec("full-disk"), 10.0, 18.0, True, "ENOSPC")
    result = story(witness, look(9.0, 1), look(13.0, 1, paused_because="disk"), look(21.0, 2))
    assert report.detected_at(witness, result, Evidence("run")) == 13.0
    assert report.recovered_at(witness, result, Evidence("run")) == 21.0


def test_stalled_server_that_nobody_replaced_is_a_violation() -> None:
    looks = [look(9.0, 1), look(60.0, 2)]
    for proof, good in (("was replaced meanwhile", True), ("went on afterwards", False)):
        witness = Witness(Spec("stall", "engine-core"), 10.0, 45.0, True, proof)
        evidence = Evidence("run", signals=[host("down", 25.0), host("up", 50.0)])
        result = story(witness, *looks)
        assert report.went_on(result, evidence, Verdict("goes on")).good == good
    assert not report.went_on(story(kill("api"), looks[0]), Evidence("run"), Verdict("x")).good


@pytest.mark.parametrize(
    ("role", "noticed", "says"),
    [
        ("engine-core", 24.9, ""),
        ("engine-core", 25.1, "stall engine-core: noticed after 15.1 s, not within 15 s"),
        ("rollout-worker", 24.9, ""),
        ("rollout-worker", 32.8, "stall rollout-worker: noticed after 22.8 s, not within 15 s"),
        ("rollout-worker", None, "stall rollout-worker: noticed after 90.0 s, not within 15 s"),
    ],
)
def test_a_stall_has_to_be_noticed_in_time(role: str, noticed: float | None, says: str) -> None:
    witness = Witness(Spec("stall", role), 10.0, 45.0, True, REPLACED)  # type: ignore[arg-type]
    at = () if noticed is None else (noticed,)
    server = role == "engine-core"
    evidence = Evidence("run", signals=[host("down", moment) for moment in at if server])
    restarts = [(moment, "worker-rollout") for moment in at if not server]
    result = Story([witness], [look(9.0, 1), look(60.0, 2)], restarts, [], 0.0, 100.0)
    verdict = report.went_on(result, evidence, Verdict("goes on"))
    assert verdict.violations == ([says] if says else [])


def test_ettr_and_goodput() -> None:
    assert report.ettr(40, CLEAN, 100.0) == pytest.approx(0.8)
    # Steps of 2, 3 and 10 s: the last took more than twice an undisturbed one.
    assert report.goodput([0.0, 2.0, 5.0, 15.0], CLEAN, 10.0) == pytest.approx(0.5)


def test_report_is_good_only_if_every_verdict_is() -> None:
    result = story(kill("api"), look(20.0, 1), look(22.0, 2))
    good, bad = Verdict("a", 3), Verdict("b", 2, ["lost"])
    found = report.report(result, Evidence("run"), CLEAN, [good], {"run": "run"})
    assert found["good"] and found["witnessed"] == 1 and found["recoveries"] == 1
    assert found["by_kind"] == {"kill api": {"injected": 1, "witnessed": 1}}
    found = report.report(result, Evidence("run"), CLEAN, [good, bad], {})
    assert not found["good"] and found["violations"] == 1
    assert found["verdicts"]["b"]["first"] == ["lost"]


def test_steps_to_reward_are_counted_to_the_smoothed_curve() -> None:
    assert report.steps_to_reward([0.2] * 5 + [1.0] * 20) == 12
    assert report.steps_to_reward([0.2, 0.9] * 30) is None
    assert report.steps_to_reward([1.0] * 9) is None
