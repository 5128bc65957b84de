"""`make bench-admission`: what an admission costs the scheduler beside groups in flight.

For each of FLIGHTS (100 1000 4000) as many groups of two are in flight; then COUNT (500) times one
ends, another is admitted, and the gauges that ride in its activity's input are made. Once more none
are in flight, and as many wait to be rolled out again, as after a pause. The last line of stdout is
one JSON object: `in_flight` and `requeued`, each by groups, milliseconds of the median and of the
99th percentile.
"""

import json
import os
import statistics
import time

from ratchet.workflows.protocol.messages import Control
from ratchet.workflows.protocol.state import Lease
from ratchet.workflows.rules.scheduler import Part, Scheduler
from tests.unit.workflows.support import ENGINES, ENVS, EXAMPLES, config

SIZE = 2


def admitted(scheduler: Scheduler) -> Part:
    """The next part, which there is."""
    part = scheduler.admit(0.0)
    assert isinstance(part, Part)
    return part


def crowded(groups: int, count: int) -> tuple[Scheduler, list[Part]]:
    """A scheduler with `groups` in flight and room for one more, which may admit `count` others."""
    scheduler = Scheduler(config(), EXAMPLES, Lease())
    limit, permits = groups + count, SIZE * (groups + 1)
    scheduler.on_control(
        Control(seq=0, permits=permits, train_limit=limit, engines=ENGINES, envs=ENVS)
    )
    return scheduler, [admitted(scheduler) for _ in range(groups)]


def requeued(groups: int, count: int) -> tuple[Scheduler, list[Part]]:
    """A scheduler with room for one group, for which `groups` and `count` others wait."""
    scheduler = Scheduler(config(), EXAMPLES, Lease(next_train=groups + count))
    waiting = [f"train/{number}.1" for number in range(groups + count)]
    scheduler.on_control(
        Control(seq=0, permits=SIZE, train_limit=1, put_backs=waiting, engines=ENGINES, envs=ENVS)
    )
    return scheduler, []


def measure(scheduler: Scheduler, parts: list[Part], count: int) -> list[float]:
    """Milliseconds of each of `count` admissions beside `parts` in flight."""
    took = []
    for _ in range(count):
        began = time.perf_counter()
        parts.append(admitted(scheduler))
        scheduler.gauges()
        took.append(1000 * (time.perf_counter() - began))
        ending = parts[len(took) - 1]
        scheduler.on_ended(ending.work.group, ending.first)
        scheduler.flights.remove(scheduler.flights[ending.work.group])
    return took


def main() -> None:
    """Prints the result."""
    count = int(os.environ.get("COUNT", "500"))
    result: dict[str, dict[int, dict[str, float]]] = {}
    for name, begun in (("in_flight", crowded), ("requeued", requeued)):
        for groups in map(int, os.environ.get("FLIGHTS", "100 1000 4000").split()):
            took = measure(*begun(groups, count), count)
            centile = statistics.quantiles(took, n=100)[-1]
            times = {"median_ms": statistics.median(took), "p99_ms": centile}
            result.setdefault(name, {})[groups] = times
    print(json.dumps(result))


if __name__ == "__main__":
    main()
