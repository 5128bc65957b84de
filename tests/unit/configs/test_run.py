"""What of a run's config decides its data."""

from typing import Any

import pytest

from ratchet.configs.load import validate
from ratchet.configs.run import data_of


@pytest.mark.parametrize(
    ("env", "same"),
    [
        ({"log_level": "debug"}, True),
        ({"start_timeout_s": 900}, True),
        ({"ratio": 3}, True),
        ({"workers": 4}, True),
        ({"args": {"n": 1}}, False),
    ],
)
def test_how_an_env_is_served_decides_no_data(env: dict[str, Any], same: bool) -> None:
    before, after = (
        validate({"max_steps": 1, "train": {"env": [{"id": "a", **more}]}}) for more in ({}, env)
    )
    assert (data_of(before) == data_of(after)) is same
