"""Works that wait for the store: each tries for itself at first, then one tries for all."""

from ratchet.workflows.rules.held_work import TRIES_OF_ITS_OWN, WOKEN_BY_ONE, HeldWorks


def held(*works: str, tries: int = TRIES_OF_ITS_OWN + 1) -> HeldWorks:
    """Works that failed so often, one after the other."""
    made = HeldWorks()
    for number in range(tries):
        for work in works:
            made.on_failed(work, f"no room for {work}", 10.0 + number)
    return made


def test_first_and_last_trouble_are_news() -> None:
    h = HeldWorks()
    assert h.reason == "" and not h.on_ended("a")
    assert h.on_failed("a", "disk full", 5.0)
    assert not h.on_failed("b", "no quota", 6.0) and not h.on_failed("a", "disk full", 7.0)
    assert h.reason == "disk full" and h.held_s(9.0) == 4.0
    assert not h.on_ended("a") and h.reason == "no quota" and h.held_s(9.0) == 4.0
    assert h.on_ended("b") and not h.on_ended("b")
    assert h.on_failed("b", "disk full", 20.0) and h.held_s(21.0) == 1.0


def test_work_tries_for_itself_so_often_and_anew_after_it_was_stored() -> None:
    assert not held("a", tries=TRIES_OF_ITS_OWN).shares_tries("a")
    h = held("a", "b")
    assert h.shares_tries("a") and h.shares_tries("b") and not h.shares_tries("c")
    h.on_ended("a")
    h.on_failed("a", "disk full", 20.0)
    assert not h.shares_tries("a")


def test_first_tries_for_all_and_some_follow_once_something_was_stored() -> None:
    h = held("a", "b", "c")
    assert h.may_try("a") and not h.may_try("b") and not h.take_turn()
    h.on_stored()
    h.on_ended("a")
    assert h.may_try("c")
    assert [h.take_turn() for _ in range(WOKEN_BY_ONE + 1)] == [True] * WOKEN_BY_ONE + [False]
    assert h.may_try("b") and not h.may_try("c")


def test_failure_ends_the_turns_and_a_slow_try_gives_one() -> None:
    h = held("a", "b")
    h.on_stored()
    h.on_slow_try()
    assert [h.take_turn() for _ in range(3)] == [True] * 3, "it takes none away"
    h.on_failed("a", "disk full", 20.0)
    assert not h.take_turn()
    h.on_slow_try()
    assert h.may_try("b") and h.take_turn() and not h.take_turn()
