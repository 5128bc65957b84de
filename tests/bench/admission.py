"""`make bench-admission`: what an admission costs the scheduler beside groups in flight.

For each of FLIGHTS (100 1000 4000) as many groups of two are in flight; then COUNT (500) times one
ends, another is admitted, and the gauges that ride in its activity's input are made. The last line
of stdout is one JSON object: by groups in flight, milliseconds of the median and of the 99th
percentile.
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


def measure(groups: int, count: int) -> list[float]:
    """Milliseconds of each of `count` admissions beside `groups` in flight."""
    scheduler, parts = crowded(groups, count)
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
    result = {}
    for groups in (int(number) for number in os.environ.get("FLIGHTS", "100 1000 4000").split()):
        took = measure(groups, count)
        centile = statistics.quantiles(took, n=100)[-1]
        result[groups] = {"median_ms": statistics.median(took), "p99_ms": centile}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
