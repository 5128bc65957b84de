"""How often what is held is tried: soon at first, and never so often that a history runs full."""

from itertools import pairwise

from ratchet.activities.contracts.rests import rest_after


def test_tries_come_quickly_at_first_and_are_few_in_a_day() -> None:
    held, tries = 0.0, []
    while held < 24 * 3600:
        held += rest_after(held)
        tries.append(held)
    assert tries[:5] == [2.0, 4.0, 6.0, 8.0, 10.0]
    assert all(after - before <= 300 for before, after in pairwise(tries))
    assert len(tries) < 350, "at some eleven events each"
