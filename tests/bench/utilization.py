"""`make bench-utilization`: how busy a long run keeps its permits, hand-overs included.

STEPS steps of 8 groups of 8 rollouts of 2 s each, one activity a group. PERMITS rollouts execute at
once, so a step takes about 2 s x 64 / PERMITS. Training is instant and max_lag high, so that the
off-policy limit never closes. Utilization and hand-overs are defined in `ledger`.

The last line of stdout is one JSON object. Exits with 1 if hand-overs idle 1 % of the wall clock or
more, if no generation handed over, if the run never continued as new, or if a history holds more
than 10,000 events.
"""

import asyncio
from typing import Any

from tests.bench.ledger import Plan, hand_overs, limited_s, utilization
from tests.bench.stage import finish, histories, new_world, number, stage, start, worker

GROUPS, GROUP_SIZE, ROLLOUT_S = 8, 8, 2.0
BATCH = GROUPS * GROUP_SIZE
MAX_LAG = 50
MOST_IDLE = 0.01
MOST_EVENTS = 10_000
SHOWN_EVERY_S = 15.0


def config(steps: int, permits: int) -> dict[str, Any]:
    """The run."""
    return {
        "name": "utilization",
        "max_steps": steps,
        "train": {
            "env": [{"id": "reverse-text"}],
            "batch_size": BATCH,
            "group_size": GROUP_SIZE,
            "max_lag": MAX_LAG,
            "max_off_policy_steps": 1000,
        },
        "dispatch": {"max_inflight_rollouts": permits},
        "checkpoint": {"interval": 100},
    }


async def bench() -> tuple[dict[str, Any], bool]:
    """The result and whether every target was met."""
    steps, permits = int(number("STEPS", 2000)), int(number("PERMITS", 256))
    async with stage() as theatre:
        world = new_world(theatre.client, draw=lambda group, index: ROLLOUT_S)
        async with worker(world, at_once=permits):
            handle = await start(world, config(steps, permits))
            result = asyncio.create_task(handle.result())
            while not result.done():
                await asyncio.wait([result], timeout=SHOWN_EVERY_S)
                print(f"step {world.steps_done} of {steps}", flush=True)
            ended = await result
        counted = await histories(theatre.client, handle.id)
    world.check()
    marks = world.ledger.marks
    plan = Plan(permits, BATCH, steps, MAX_LAG)
    wall_s = marks[-1].at - next(mark.at for mark in marks if mark.what == "version")
    handed = hand_overs(marks, plan)
    idle = handed.gap_s / wall_s
    good = ended["step"] == steps and idle < MOST_IDLE and counted.longest <= MOST_EVENTS
    good = good and handed.count > 0 and counted.runs > 1
    return {
        "utilization": round(utilization(marks, plan), 4),
        "hand_over_idle_share": round(idle, 6),
        "hand_over_longest_idle_s": round(handed.longest_gap_s, 4),
        "hand_over_tail_excess_share": round(handed.tail_excess_s / wall_s, 6),
        "hand_overs": handed.count,
        "continue_as_news": counted.runs - 1,
        "longest_history": counted.longest,
        "events_per_step": round((counted.run_events + counted.dispatch_events) / steps, 2),
        "limited_s": round(limited_s(marks, plan), 2),
        "permits": permits,
        "steps": ended["step"],
        "wall_s": round(wall_s, 1),
        "ms_per_step": round(wall_s * 1e3 / steps, 1),
        "ok": good,
    }, good


if __name__ == "__main__":
    finish(bench())
