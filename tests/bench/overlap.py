"""`make bench-overlap`: what overlapping evals with training is worth.

Two arms that differ in nothing but `eval.overlap`, run in interleaved pairs (ABBA). A rollout's
duration is a lognormal draw with a median of 1 s and a 99th percentile of 10 s, and a pure function
of (SEED, group id, rollout index); group ids are the same in both arms, which is asserted, so both
do exactly the same work. 32 permits, batches of 32 in groups of 8, one activity a rollout, 64 eval
rollouts every 5 steps, 20 steps; a train step and a push take 0.3 s each. max_lag is 4, so that the
off-policy limit leaves train work to fill the permits that an eval does not need.

Wall clock is from version 0 to the end of the run's last rollout or push, both seen by the doubles.
Utilization is defined in `ledger`. The last line of stdout is one JSON object: medians over the
pairs, and `ratio`, the median of blocking over overlap. Exits with 1 below a ratio of 1.25 or a
utilization of 0.95 in the overlap arm's eval windows.
"""

import math
import statistics
from dataclasses import asdict, dataclass
from typing import Any

from tests.bench.ledger import Plan, limited_s, utilization
from tests.bench.stage import Stage, draw_of, finish, new_world, number, stage, start, worker

LEAST_RATIO = 1.25
LEAST_UTILIZATION = 0.95
MEDIAN_S = 1.0
SIGMA = math.log(10) / 2.3263
"""The 99th percentile of a standard normal is 2.3263: ten times the median."""


@dataclass(frozen=True)
class Arm:
    """One run. `drawn_s` adds up the durations of all its rollouts."""

    overlap: bool
    wall_s: float
    utilization: float
    utilization_eval_windows: float
    limited_s: float
    rollouts: int
    drawn_s: float


def config(steps: int, *, overlap: bool) -> dict[str, Any]:
    """The run of one arm."""
    return {
        "name": "overlap",
        "max_steps": steps,
        "train": {
            "env": [{"id": "reverse-text"}],
            "batch_size": 32,
            "group_size": 8,
            "max_lag": 4,
            "max_off_policy_steps": 100,
        },
        "eval": {
            "env": [{"id": "reverse-text"}],
            "interval": 5,
            "num_examples": 64,
            "group_size": 1,
            "overlap": overlap,
        },
        "dispatch": {"max_inflight_rollouts": 32, "rollouts_per_activity": 1},
        "checkpoint": {"interval": 10},
    }


async def run_arm(theatre: Stage, seed: int, steps: int, *, overlap: bool) -> tuple[Arm, set[str]]:
    """Carries out one run; also returns the ids of its rollouts."""
    draw = draw_of(seed, MEDIAN_S, SIGMA)
    world = new_world(theatre.client, draw=draw, train_s=0.3, sync_s=0.3)
    async with worker(world, at_once=64):
        ended = await (await start(world, config(steps, overlap=overlap))).result()
    assert ended["step"] == steps
    world.check()
    marks = world.ledger.marks
    begin = next(mark.at for mark in marks if mark.what == "version")
    plan = Plan(32, 32, steps, 4, eval_rollouts=64, eval_interval=5)
    arm = Arm(
        overlap=overlap,
        wall_s=round(marks[-1].at - begin, 2),
        utilization=round(utilization(marks, plan), 4),
        utilization_eval_windows=round(utilization(marks, plan, in_eval=True), 4),
        limited_s=round(limited_s(marks, plan), 2),
        rollouts=len(world.rolled_out),
        drawn_s=round(sum(draw(*_parts(rollout)) for rollout in world.rolled_out), 2),
    )
    return arm, set(world.rolled_out)


def _parts(rollout: str) -> tuple[str, int]:
    group, _, index = rollout.rpartition("/")
    return group, int(index)


async def bench() -> tuple[dict[str, Any], bool]:
    """The result and whether every target was met."""
    pairs, steps = int(number("PAIRS", 2)), int(number("STEPS", 20))
    seed = int(number("SEED", 0))
    arms: list[Arm] = []
    ratios = []
    async with stage() as theatre:
        for pair in range(pairs):
            order = (True, False) if pair % 2 == 0 else (False, True)
            # Pairs have draws of their own; the two arms of a pair share theirs.
            ran = [await run_arm(theatre, seed + pair, steps, overlap=first) for first in order]
            assert ran[0][1] == ran[1][1], "the arms did not do the same rollouts"
            walls = {arm.overlap: arm.wall_s for arm, _ in ran}
            ratios.append(round(walls[False] / walls[True], 3))
            arms += [arm for arm, _ in ran]
            for arm, _ in ran:
                print(asdict(arm), flush=True)
    overlapped = [arm for arm in arms if arm.overlap]
    blocking = [arm for arm in arms if not arm.overlap]
    ratio = statistics.median(ratios)
    in_evals = statistics.median(arm.utilization_eval_windows for arm in overlapped)
    good = ratio >= LEAST_RATIO and in_evals >= LEAST_UTILIZATION
    return {
        "wall_overlap": statistics.median(arm.wall_s for arm in overlapped),
        "wall_blocking": statistics.median(arm.wall_s for arm in blocking),
        "ratio": ratio,
        "utilization_eval_windows": in_evals,
        "utilization_overlap": statistics.median(arm.utilization for arm in overlapped),
        "utilization_blocking": statistics.median(arm.utilization for arm in blocking),
        "ratios": ratios,
        "arms": [asdict(arm) for arm in arms],
        "ok": good,
    }, good


if __name__ == "__main__":
    finish(bench())
