"""Schedules are a function of their seed, and leave no kind of fault out."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.schedule import OTHERS, ROLES, Spec, every_kind, quick, soak

SEEDS = st.integers(0, 2**32)
KINDS = st.lists(st.sampled_from(every_kind()), min_size=1, unique=True)


@given(SEEDS, KINDS)
def test_quick_hits_every_possible_role_and_other_kind_once(
    seed: int, possible: list[Spec]
) -> None:
    found = quick(seed, 10.0, possible)
    assert found == quick(seed, 10.0, possible)
    specs = [planned.spec for planned in found]
    assert set(specs) <= set(possible)
    by_role = Counter(spec.role for spec in specs if spec.what in ("kill", "stall"))
    assert by_role == Counter({spec.role for spec in possible if spec.what in ("kill", "stall")})
    others = [spec for spec in specs if spec.what not in ("kill", "stall")]
    assert sorted(others) == sorted(spec for spec in OTHERS if spec in possible)
    assert [planned.at_s for planned in found] == [10.0 * k for k in range(len(found))]


def test_quick_kills_under_one_seed_what_it_stalls_under_another() -> None:
    seen = {(p.spec.what, p.spec.role) for seed in range(20) for p in quick(seed, 1, every_kind())}
    assert {(what, role) for what in ("kill", "stall") for role in ROLES} <= seen


def test_quick_keeps_faults_that_down_an_engine_apart() -> None:
    for seed in range(50):
        places = [k for k, p in enumerate(quick(seed, 1.0, every_kind())) if p.spec.downs_engine]
        assert all(b - a >= 4 for a, b in itertools.pairwise(places)), places


@given(SEEDS, st.floats(1, 7200), st.integers(1, 300), KINDS)
def test_soak_spreads_its_faults_over_time_and_kinds(
    seed: int, seconds: float, count: int, possible: list[Spec]
) -> None:
    found = soak(seed, seconds, count, possible)
    assert found == soak(seed, seconds, count, possible)
    assert len(found) == count
    times = [planned.at_s for planned in found]
    assert times == sorted(set(times)) and times[0] >= 0 and times[-1] < seconds
    counts = Counter(planned.spec for planned in found)
    assert set(counts) <= set(possible)
    least = min(counts[spec] for spec in possible)
    assert max(counts.values()) - least <= 1


@pytest.mark.parametrize(("count", "seconds"), [(-1, 10.0), (3, 0.0)])
def test_soak_without_time_is_refused(count: int, seconds: float) -> None:
    with pytest.raises(ValueError, match="some s and kinds"):
        soak(0, seconds, count, every_kind())


def test_soak_to_compare_with_has_no_faults() -> None:
    assert soak(0, 10.0, 0, every_kind()) == []
