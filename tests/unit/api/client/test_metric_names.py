"""Names and patterns of metrics: what they mean, and what is said of those that mean nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.api.client.metric_names import HEADLINE, headline, meant

NAMES = {"reward/all/mean", "reward/all/max", "time/step", "time/train", "loss", "odd[0]"}


def test_names_and_patterns_each_once_and_in_order() -> None:
    assert meant(["loss", "time/*", "reward/all/m?an", "time/step"], NAMES) == [
        "loss",
        "time/step",
        "time/train",
        "reward/all/mean",
    ]
    assert meant(["odd[0]"], NAMES) == ["odd[0]"]
    assert set(meant(["*"], NAMES)) == NAMES
    assert headline(NAMES) == ["reward/all/mean", "loss", "time/step"] and len(HEADLINE) == 12


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("reward/all/mena", "did you mean reward/all/mean, reward/all/max?"),
        ("train", "did you mean time/train"),
        ("lag/*", "no metric of this run matches 'lag/*'; `--keys '*'` shows all 6"),
        ("zzzz", "does not measure 'zzzz'; `--keys '*'` shows all"),
    ],
)
def test_what_is_none_is_an_error_with_the_nearest(wrong: str, said: str) -> None:
    with pytest.raises(ValueError) as refused:
        meant(["loss", wrong], NAMES)
    assert said in str(refused.value)


@given(st.lists(st.text(max_size=8)), st.sets(st.text(min_size=1, max_size=8)))
def test_what_is_meant_is_there(patterns: list[str], names: set[str]) -> None:
    try:
        found = meant(patterns, names)
    except ValueError:
        return
    assert set(found) <= names and len(found) == len(set(found))
