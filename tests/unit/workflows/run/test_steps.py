"""How long a run waits for what its config lets take long."""

from datetime import timedelta
from typing import Any

import pytest

from ratchet.configs.load import validate
from ratchet.workflows.run.steps import START_AT_MOST, started_within


@pytest.mark.parametrize(
    ("env", "bound"),
    [({}, START_AT_MOST), ({"start_timeout_s": 7200}, timedelta(hours=4))],
)
def test_servers_are_waited_for_as_long_as_the_slowest_may_load(
    env: dict[str, Any], bound: timedelta
) -> None:
    envs = [{"id": "a"}, {"id": "b", **env}]
    assert started_within(validate({"max_steps": 1, "train": {"env": envs}})) == bound
