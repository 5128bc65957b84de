"""What workflows call is what workers register: names, types, and the queue where it is taken."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast, get_type_hints

import pytest
from temporalio.activity import _Definition
from temporalio.client import Client

from ratchet.activities.contracts.names import Queues
from ratchet.activities.contracts.roles import SERVERS
from ratchet.activities.runtime.context import WorkerContext
from ratchet.worker import roles
from ratchet.workflows.protocol import activities
from ratchet.workflows.protocol.activities import AHEAD, Activity

OWN = "the queue of one process"
CALLED = [value for value in vars(activities).values() if isinstance(value, Activity)]


@pytest.fixture
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str, str], Any]:
    """Functions by role, queue and name."""
    workers: list[tuple[str, Sequence[Callable[..., Any]]]] = []

    def worker(client: Client, *, task_queue: str, activities: Any, **options: Any) -> None:
        workers.append((task_queue, activities))

    monkeypatch.setattr(roles, "Worker", worker)
    ctx = WorkerContext(home=tmp_path, store_url=(tmp_path / "store").as_uri(), own_queue=OWN)
    found = {}
    for role, build in roles.BUILDERS.items():
        workers.clear()
        build(cast(Client, None), ctx, Queues())
        for queue, functions in workers:
            for function in functions:
                name = str(_Definition.must_from_callable(function).name)
                found[role, queue, name] = function
    return found


def test_every_activity_is_called_by_one_descriptor(registered: dict[Any, Any]) -> None:
    called = [activity.name for activity in CALLED]
    assert sorted(called) == sorted({name for _, _, name in registered})


@pytest.mark.parametrize("activity", CALLED, ids=lambda activity: activity.name)
def test_descriptor_is_that_of_what_its_role_registers(
    registered: dict[Any, Any], activity: Activity[Any, Any]
) -> None:
    queues = Queues()
    if activity.role:
        # What bounds its wait in the queue is for the process that owns a server, or can be left.
        own = activity.policy.queue_timeout and activity.policy is not AHEAD
        queue = OWN if own else queues.of(activity.role)
        places = {(activity.role, queue)}
    else:
        places = {(role.kept_by, queues.of(role.kept_by)) for role in SERVERS.values()}
    for place in places:
        types = get_type_hints(registered[(*place, activity.name)])
        assert list(types.values()) == [activity.input, activity.result]
