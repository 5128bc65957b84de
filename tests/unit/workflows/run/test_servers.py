"""How often a run looks at the one that it is to begin after."""

from datetime import timedelta

from ratchet.workflows.run.pausing import PAUSED_AT_MOST
from ratchet.workflows.run.servers import LOOKS_EVERY, rest_between_looks

MOST_LOOKS = 2000
"""Each takes about eleven events, and Temporal ends a workflow at 51,200."""


def test_a_run_may_wait_as_long_as_another_is_paused() -> None:
    waited, looks = timedelta(), 0
    while waited < PAUSED_AT_MOST:
        rest = rest_between_looks(waited)
        assert timedelta(seconds=5) <= rest <= max(LOOKS_EVERY, waited / 100)
        waited, looks = waited + rest, looks + 1
    assert looks < MOST_LOOKS


def test_it_looks_often_at_first() -> None:
    assert rest_between_looks(timedelta(seconds=10)) == timedelta(seconds=5)
    assert rest_between_looks(timedelta(hours=2)) == LOOKS_EVERY
    assert rest_between_looks(timedelta(days=10)) == timedelta(hours=2.4)
