"""What the bench of waiting rollouts makes of what was recorded."""

from types import SimpleNamespace
from typing import Any

from ratchet.activities.contracts import names
from ratchet.configs.load import validate
from tests.bench.waiting import broken, config_of, lags
from tests.chaos.history import Activity, Evidence


def activity(name: str, **facts: Any) -> Activity:
    """One that ended well, but for `facts`."""
    return Activity("run/x", name, "q", {}, 0.0, **{"outcome": "completed", "attempt": 1, **facts})


def test_whatever_broke_is_counted() -> None:
    well = activity(names.RUN_ROLLOUTS, result={"errored": 0})
    assert not any(broken(Evidence("run", [well])).values())
    bad = [
        activity(names.RUN_ROLLOUTS, result={"errored": 3}),
        activity(names.RUN_ROLLOUTS, outcome="timed_out"),
        activity(names.HOST_SERVER, outcome="cancelled", attempt=2),
    ]
    found = broken(Evidence("run", [well, *bad]))
    assert found == {"timed_out": 1, "retried": 1, "failed_rollouts": 3}


def test_lag_is_that_of_the_worst_moment_by_role() -> None:
    def sample(source: str, role: str, lag: float | None) -> Any:
        most = None if lag is None else SimpleNamespace(max=lag)
        return SimpleNamespace(source=source, role=role, event_loop_lag=most)

    samples = [
        sample("rollout-1", "rollout", 0.1),
        sample("rollout-2", "rollout", 0.4),
        sample("env-server-a-1", "env", 2.0),
        sample("env-2", "env", 0.2),
        sample("trainer-3", "trainer", None),
    ]
    assert lags(samples) == {"rollout": 0.4, "env server": 2.0, "env": 0.2}


def test_the_config_has_all_rollouts_in_flight(tmp_path: Any) -> None:
    config = validate(config_of(4000, 60.0, tmp_path))
    assert config.train.batch_size == config.dispatch.max_inflight_rollouts == 4000
    assert (tmp_path / "waiting_text.py").is_file() and config.train.env[0].timeout_s > 60
