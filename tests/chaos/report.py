"""Turns witnesses, looks and evidence into the suite's figures. Pure; times in seconds.

- *detected*: from the fault to the first sign that somebody noticed: a host's report that the
  server is down or being started anew, the supervisor's restart of a service, an activity of the
  role that is tried again or timed out, or the run's own pause.
- *recovered*: from the fault to the first version after what was hit is back, with the servers
  that went down with it. Versions rise only if every role does its part.
- *ETTR*: steps x undisturbed median step time / wall. *Goodput*: the share of wall time in which
  the run was making steps at no less than half its undisturbed pace.
"""

import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tests.chaos.checker import Verdict
from tests.chaos.history import Evidence
from tests.chaos.observer import Look
from tests.chaos.targets import HOST_ROLE, OWNER, SERVERS, recorded_name
from tests.chaos.world import Witness

NOTICED_WITHIN_S = 90.0
STALL_NOTICED_S = 15.0
"""A stall of any role that was noticed has to be by then."""
SLOW = 2.0
"""A step that takes more than so many undisturbed ones was disturbed."""
REWARD, SMOOTHED = 0.7, 10


@dataclass(frozen=True)
class Clean:
    """A run without faults: the median of its step times, in seconds, and how many there were."""

    median_step_s: float
    steps: int


@dataclass(frozen=True)
class Story:
    """All that was seen of one run from outside. `restarts` are (Unix time, service)."""

    witnesses: Sequence[Witness]
    looks: Sequence[Look]
    restarts: Sequence[tuple[float, str]]
    api_up: Sequence[tuple[float, bool]]
    began: float
    ended: float


def step_times(looks: Sequence[Look]) -> list[float]:
    """Unix times at which the version rose, once for each version that it rose by."""
    times: list[float] = []
    last = 0
    for look in looks:
        times += [look.at] * max(look.version - last, 0)
        last = max(last, look.version)
    return times


def median_step(looks: Sequence[Look]) -> float:
    """The median time between versions; raises ValueError with fewer than two of them."""
    times = step_times(looks)
    if len(times) < 2:
        raise ValueError(f"{len(times)} steps have no time between them")
    return median(b - a for a, b in itertools.pairwise(times))


def _after(times: Sequence[float], at: float) -> float | None:
    place = bisect_left(times, at)
    return times[place] if place < len(times) else None


def detected_at(witness: Witness, story: Story, evidence: Evidence) -> float | None:
    """When the fault was first noticed; None if nobody did, or nobody had to."""
    role, begin = witness.spec.role, witness.at
    signs: list[float] = []
    if role in SERVERS:
        signs += _reports(evidence, HOST_ROLE[role], ("down", "starting"))
    elif role:
        name = recorded_name(role)
        signs += [at for at, restarted in story.restarts if restarted == name]
        for server, owner in OWNER.items():
            if owner == role:
                signs += _reports(evidence, HOST_ROLE[server], ("down", "starting"))
        queue = f"ratchet-{role.removesuffix('-worker')}"
        signs += [
            activity.ended_at if activity.outcome == "timed_out" else activity.started_at
            for activity in evidence.activities
            if activity.queue.startswith(queue)
            and (activity.outcome == "timed_out" or activity.attempt > 1)
        ]
    if role == "api":
        signs += [at for at, up in story.api_up if not up]
    if witness.spec.what in ("full-disk", "failing-store", "slow-store"):
        signs += [look.at for look in story.looks if look.paused_because]
    within = [at for at in signs if begin <= at <= begin + NOTICED_WITHIN_S]
    return min(within, default=None)


def _reports(evidence: Evidence, role: str, states: Sequence[str]) -> list[float]:
    return [
        signal.at
        for signal in evidence.signals_named("host_report")
        if signal.value["role"] == role and signal.value["state"] in states
    ]


def back_at(witness: Witness, story: Story, evidence: Evidence) -> float:
    """When what was hit was there again, and the servers that it had kept."""
    role, begin = witness.spec.role, witness.at
    if not role or witness.rode_out:
        return witness.until
    if role == "api":
        times = [at for at, up in story.api_up if up]
        return _after(times, begin) or witness.until
    hosts = [HOST_ROLE[server] for server in SERVERS if role in (server, OWNER[server])]
    back = [_after(sorted(_reports(evidence, host, ("up",))), begin) for host in set(hosts)]
    name = recorded_name(role)
    back.append(_after([at for at, restarted in story.restarts if restarted == name], begin))
    return max([witness.until, *(at for at in back if at is not None)])


def recovered_at(witness: Witness, story: Story, evidence: Evidence) -> float | None:
    """When the run went on after the fault; None if it did not."""
    return _after(step_times(story.looks), back_at(witness, story, evidence))


def went_on(story: Story, evidence: Evidence, verdict: Verdict) -> Verdict:
    """The run made progress after every fault, no host took a stalled server for a live one, and
    stalls were noticed within STALL_NOTICED_S.
    """
    for witness in story.witnesses:
        if witness.landed:
            name, at = witness.spec.name, recovered_at(witness, story, evidence)
            verdict.expect(at is not None, f"{name}: no version after it was over")
            stale = witness.rode_out and witness.spec.role in SERVERS
            verdict.expect(not stale, f"{name}: nobody noticed; {witness.proof}")
            if witness.spec.what == "stall" and not witness.rode_out:
                noticed = detected_at(witness, story, evidence)
                took = NOTICED_WITHIN_S if noticed is None else noticed - witness.at
                late = f"{name}: noticed after {took:.1f} s, not within {STALL_NOTICED_S:.0f} s"
                verdict.expect(took <= STALL_NOTICED_S, late)
    return verdict


def _figures(times: Sequence[float]) -> dict[str, float | int | None]:
    return {
        "count": len(times),
        "median_s": round(median(times), 2) if times else None,
        "max_s": round(max(times), 2) if times else None,
    }


def goodput(times: Sequence[float], clean: Clean, wall_s: float) -> float:
    """The share of `wall_s` that lies in steps of at most SLOW undisturbed ones."""
    gaps = [b - a for a, b in itertools.pairwise(times)]
    useful = sum(gap for gap in gaps if gap <= SLOW * clean.median_step_s)
    return useful / wall_s if wall_s > 0 else 0.0


def steps_to_reward(rewards: Sequence[float]) -> int | None:
    """The step at which the mean of the last SMOOTHED rewards reaches REWARD; None: never."""
    for step in range(SMOOTHED, len(rewards) + 1):
        if sum(rewards[step - SMOOTHED : step]) / SMOOTHED >= REWARD:
            return step
    return None


def ettr(steps: int, clean: Clean, wall_s: float) -> float:
    """Effective training time ratio; it may exceed 1 by what step times vary."""
    return steps * clean.median_step_s / wall_s if wall_s > 0 else 0.0


def report(
    story: Story,
    evidence: Evidence,
    clean: Clean,
    verdicts: Sequence[Verdict],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """The whole result as JSON; `good` says whether the suite passes."""
    kinds: dict[str, dict[str, int]] = defaultdict(lambda: {"injected": 0, "witnessed": 0})
    recover: dict[str, list[float]] = defaultdict(list)
    detect: dict[str, list[float]] = defaultdict(list)
    recovered = 0
    for witness in story.witnesses:
        kinds[witness.spec.name]["injected"] += 1
        if not witness.landed:
            continue
        kinds[witness.spec.name]["witnessed"] += 1
        who = witness.spec.role or witness.spec.what
        if (at := recovered_at(witness, story, evidence)) is not None:
            recovered += 1
            recover[who].append(at - witness.at)
        if (at := detected_at(witness, story, evidence)) is not None:
            detect[who].append(at - witness.at)
    times = [at for at in step_times(story.looks) if story.began <= at <= story.ended]
    wall_s = story.ended - story.began
    return {
        "good": all(verdict.good for verdict in verdicts),
        **about,
        "wall_s": round(wall_s, 1),
        "steps": len(times),
        "undisturbed_step_s": round(clean.median_step_s, 3),
        "undisturbed_steps": clean.steps,
        "ettr": round(ettr(len(times), clean, wall_s), 3),
        "goodput": round(goodput(times, clean, wall_s), 3),
        "faults": len(story.witnesses),
        "witnessed": sum(witness.landed for witness in story.witnesses),
        "recoveries": recovered,
        "by_kind": dict(sorted(kinds.items())),
        "recover_s": {who: _figures(found) for who, found in sorted(recover.items())},
        "detect_s": {who: _figures(found) for who, found in sorted(detect.items())},
        "violations": sum(len(verdict.violations) for verdict in verdicts),
        "verdicts": {verdict.name: verdict.as_json() for verdict in verdicts},
    }
