"""What a rollout worker reports to Dispatch of ended rollouts: when, how much, what it keeps."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode
from temporalio.testing import ActivityEnvironment

from ratchet.activities.contracts import names
from ratchet.activities.contracts.rollouts import (
    PERMIT,
    EngineTarget,
    Gauges,
    GroupWork,
    Kind,
    Released,
    RunRolloutsInput,
    RunRolloutsResult,
)
from ratchet.activities.rollouts import releases
from ratchet.activities.rollouts.activities import RolloutActivities
from ratchet.activities.rollouts.connections import EnvConnection, EnvConnections
from ratchet.activities.rollouts.releases import Releases
from ratchet.activities.rollouts.tasks import TaskLibrary
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.storage import keys

DISPATCH = "r/dispatch/1"
WITHIN_S = 30.0
"""How long anything may take that must happen: only a machine that stands still takes longer."""


class Server:
    """Stands in for a Temporal client: records signals, and answers once `answers` is set."""

    def __init__(self) -> None:
        self.received: list[tuple[str, dict[str, int]]] = []
        self.answers = asyncio.Event()
        self.answers.set()
        self.error: RPCError | None = None
        self.in_flight = self.most_in_flight = self.answered = 0

    def get_workflow_handle(self, workflow_id: str) -> "_Handle":
        return _Handle(self, workflow_id)

    def releases(self) -> Releases:
        return Releases(cast(Client, self))


class _Handle:
    def __init__(self, server: Server, workflow_id: str) -> None:
        self.server, self.id = server, workflow_id

    async def signal(self, name: str, released: Released, *, rpc_timeout: Any) -> None:
        assert name == names.RELEASED and rpc_timeout is not None
        server = self.server
        server.received.append((self.id, dict(released.ended)))
        server.in_flight += 1
        server.most_in_flight = max(server.most_in_flight, server.in_flight)
        try:
            await server.answers.wait()
        finally:
            server.in_flight -= 1
        server.answered += 1
        if server.error is not None:
            raise server.error


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not holds():
            await asyncio.sleep(0.01)


async def sent(room: Releases) -> None:
    """Waits until the room has nothing left to send."""
    senders = [owner.sender for owner in room._owners.values()]
    await until(lambda: all(sender is None or sender.done() for sender in senders))


async def test_parts_share_one_signal() -> None:
    server = Server()
    room = server.releases()
    with (
        room.part(DISPATCH, "train/0/0", 4) as first,
        room.part(DISPATCH, "train/0/4", 4) as second,
        room.part("other", "train/0/0", 4) as other,
    ):
        first(1)
        second(1)
        first(2)
        other(3)
        assert server.received == [], "nothing is sent before others had their chance"
        await until(lambda: len(server.received) >= 2)
        assert sorted(server.received) == [
            ("other", {"train/0/0": 3}),
            (DISPATCH, {"train/0/0": 2, "train/0/4": 1}),
        ]
        first(3)
        await until(lambda: len(server.received) >= 3)
        assert server.received[2:] == [(DISPATCH, {"train/0/0": 3})], "only what has changed"
    assert len(room._owners) == 0


async def test_what_another_part_could_begin_with_waits_for_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(releases, "LINGER_S", 3600.0)
    server = Server()
    room = server.releases()
    with (
        room.part(DISPATCH, "train/0/0", 4) as first,
        room.part(DISPATCH, "train/1/0", 4) as second,
    ):
        first(3)
        second(1)
        await until(lambda: len(server.received) == 1)
        assert server.received == [(DISPATCH, {"train/0/0": 3, "train/1/0": 1})]
        second(3)
        assert not room._owners[DISPATCH].enough.is_set(), "2 more are too few"


async def test_permits_that_nothing_waits_for_are_freed_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(releases, "LINGER_S", 0.01)
    monkeypatch.setattr(releases, "IDLE_LINGER_S", 3600.0)
    server = Server()
    room = server.releases()
    with (
        room.part(DISPATCH, "train/0/0", 4, waits=False) as first,
        room.part("other", "train/0/0", 4) as other,
    ):
        first(3)
        other(1)
        await until(lambda: len(server.received) == 1)
        assert server.received == [("other", {"train/0/0": 1})]
        with room.part(DISPATCH, "train/1/0", 2, waits=False) as second:
            second(1)
            assert not room._owners[DISPATCH].enough.is_set(), "though 4 are free"
        with room.part(DISPATCH, "train/2/0", 2) as third:
            third(1)
            await until(lambda: len(server.received) == 2)
            assert server.received[1:] == [(DISPATCH, {"train/0/0": 3, "train/2/0": 1})]


async def test_what_a_part_that_went_had_freed_hurries_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(releases, "LINGER_S", 3600.0)
    server = Server()
    server.answers.clear()
    room = server.releases()
    with room.part(DISPATCH, "train/0/0", 4) as stays:
        owner = room._owners[DISPATCH]
        with room.part(DISPATCH, "train/1/0", 3) as goes:
            stays(1)
            goes(2)
            assert owner.enough.is_set()
            goes(3)
            assert not owner.enough.is_set(), "what it frees is reported with its result"
        with room.part(DISPATCH, "train/2/0", 4) as goes:
            goes(3)
            await until(lambda: server.in_flight == 1)
            stays(2)
            with room.part(DISPATCH, "train/3/0", 2) as other:
                other(1)
                assert owner.enough.is_set()
            assert not owner.enough.is_set(), "also if its activity has failed"
            stays(3)
            goes(3)
            stays(4)
            assert not owner.enough.is_set()


async def test_one_signal_is_in_flight_at_a_time() -> None:
    server = Server()
    server.answers.clear()
    with server.releases().part(DISPATCH, "train/0/0", 8) as ended:
        ended(1)
        await until(lambda: server.in_flight == 1)
        senders = asyncio.all_tasks()
        for count in range(2, 6):
            ended(count)
        assert asyncio.all_tasks() == senders, "no other signal is on its way"
        assert server.received == [(DISPATCH, {"train/0/0": 1})]
        server.answers.set()
        await until(lambda: server.answered == 2)
    assert server.received[1:] == [(DISPATCH, {"train/0/0": 5})] and server.most_in_flight == 1


async def test_what_ends_together_or_with_its_activity_costs_nothing() -> None:
    server = Server()
    room = server.releases()
    with (
        room.part(DISPATCH, "train/0/0", 1) as single,
        room.part(DISPATCH, "train/1/0", 3) as group,
    ):
        single(1)
        group(0)
        for count in (1, 2, 3):
            group(count)
            # Others have a turn, and no time passes on however slow a machine.
            await asyncio.sleep(0)
        await sent(room)
    others = asyncio.all_tasks()
    with pytest.raises(KeyError), room.part(DISPATCH, "train/2/0", 3) as broken:
        broken(2)
        raise KeyError
    await until(lambda: asyncio.all_tasks() == others)
    assert server.received == [] and len(room._owners) == 0


async def test_a_part_that_goes_takes_only_its_own() -> None:
    server = Server()
    room = server.releases()
    with room.part(DISPATCH, "train/0/0", 3) as stays:
        stays(1)
        with room.part(DISPATCH, "train/1/0", 3) as goes:
            goes(2)
        assert len(room._owners) == 1
        await until(lambda: bool(server.received))
    assert server.received == [(DISPATCH, {"train/0/0": 1})]


async def test_an_attempt_that_lives_on_does_not_lower_a_count() -> None:
    server = Server()
    room = server.releases()
    with room.part(DISPATCH, "train/0/0", 4) as old, room.part(DISPATCH, "train/0/0", 4) as new:
        new(3)
        old(2)
        await until(lambda: bool(server.received))
    assert server.received == [(DISPATCH, {"train/0/0": 3})]


@pytest.mark.parametrize("status", [RPCStatusCode.NOT_FOUND, RPCStatusCode.UNAVAILABLE])
async def test_a_failed_signal_is_dropped_and_the_next_one_says_more(
    status: RPCStatusCode,
) -> None:
    server = Server()
    server.error = RPCError("gone", status, b"")
    room = server.releases()
    with room.part(DISPATCH, "train/0/0", 4) as ended:
        ended(1)
        await until(lambda: server.answered == 1)
        await sent(room)
        assert len(server.received) == 1, "not sent again"
        server.error = None
        ended(2)
        await until(lambda: server.answered == 2)
    assert server.received[1:] == [(DISPATCH, {"train/0/0": 2})]


async def test_a_signal_in_flight_ends_with_the_last_part() -> None:
    server = Server()
    server.answers.clear()
    room = server.releases()
    with room.part(DISPATCH, "train/0/0", 4) as ended:
        ended(1)
        await until(lambda: server.in_flight == 1)
    await asyncio.sleep(0)
    assert server.in_flight == len(room._owners) == 0


# -- the activity ---------------------------------------------------------------------------


class _Tasks(TaskLibrary):
    async def task(self, run_id: str, kind: Kind, name: str, index: int) -> dict[str, Any]:
        return {}


class _Unwatched(EnvConnections):
    @asynccontextmanager
    async def use(self, address: str) -> AsyncIterator[EnvConnection]:
        yield EnvConnection(address, cast(Any, None))


class Paced(RolloutActivities):
    """Carries rollouts out without env server and engine; each ends when its gate opens."""

    def __init__(self, ctx: WorkerContext, server: Server, size: int) -> None:
        super().__init__(ctx, server.releases())
        self.tasks, self.connections = _Tasks(ctx), _Unwatched()
        self.gates = [asyncio.Event() for _ in range(size)]
        self.broken: set[int] = set()
        self.begun: list[str] = []

    async def _request(self, given: RunRolloutsInput, task: dict[str, Any]) -> dict[str, Any]:
        return {}

    async def _one(
        self, given: RunRolloutsInput, connection: Any, request: dict[str, Any], index: int
    ) -> dict[str, Any]:
        await self.gates[index].wait()
        if index in self.broken:
            raise ApplicationError("gone", type=names.ENGINE_LOST)
        self.begun.append(f"{given.work.group}/{index}")
        document = {"group": given.work.group, "index": index, "error": None, "sampled_tokens": 1}
        return await self._stored(given.run_id, document)

    def end(self, *indexes: int) -> None:
        for index in indexes:
            self.gates[index].set()


def newest(server: Server) -> dict[str, int]:
    """What Dispatch knows of each part. Commits at different times are reported singly."""
    found: dict[str, int] = {}
    for workflow_id, ended in server.received:
        assert workflow_id == DISPATCH
        assert all(count > found.get(part, 0) for part, count in ended.items()), "it only rises"
        found.update(ended)
    return found


def _world(tmp_path: Path, size: int) -> tuple[Server, Paced]:
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path / "store"), own_queue="q")
    server = Server()
    return server, Paced(ctx, server, size)


def _start(
    rooms: Paced,
    first: int = 0,
    last: int | None = None,
    more: Sequence[GroupWork] = (),
    waiting_for: str = PERMIT,
) -> asyncio.Task[Any]:
    environment = ActivityEnvironment()
    environment.info = replace(environment.info, workflow_id=DISPATCH)
    work = GroupWork("train/7", "train", "e", 0, len(rooms.gates))
    engine = EngineTarget(0, 0, "http://none", "m", 0)
    gauges = Gauges(waiting_for=waiting_for)
    given = RunRolloutsInput(
        "r", work, engine, "tcp://none", gauges, first=first, last=last, more=list(more)
    )
    return asyncio.create_task(environment.run(rooms.run_rollouts, given))


async def test_the_activity_reports_each_part_under_its_own_name(tmp_path: Path) -> None:
    server, rooms = _world(tmp_path, 6)
    others = asyncio.all_tasks()
    low, high = _start(rooms, 0, 3), _start(rooms, 3, 6)
    rooms.end(1, 3, 5)
    await until(lambda: newest(server) == {"train/7/0": 1, "train/7/3": 2})
    rooms.end(4)
    assert await high == RunRolloutsResult("train/7", 3, 0, 3)
    rooms.end(0, 2)
    await low
    await until(lambda: asyncio.all_tasks() <= others)
    reported = newest(server)
    assert reported["train/7/0"] < 3 and reported["train/7/3"] == 2, (
        "a part that has ended is not reported"
    )
    assert rooms.releases is not None and not rooms.releases._owners


async def test_the_activity_knows_whether_permits_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releases, "LINGER_S", 0.0)
    monkeypatch.setattr(releases, "IDLE_LINGER_S", 3600.0)
    for waiting_for in ("policy v3", PERMIT):
        server, rooms = _world(tmp_path / waiting_for, 3)
        running = _start(rooms, waiting_for=waiting_for)
        rooms.end(0)
        await until(lambda rooms=rooms: bool(rooms.begun))  # type: ignore[misc]
        assert rooms.releases is not None
        if waiting_for == PERMIT:
            await until(lambda server=server: newest(server) == {"train/7/0": 1})  # type: ignore[misc]
        assert rooms.releases._owners[DISPATCH].waits == (waiting_for == PERMIT)
        rooms.end(1, 2)
        await running
        assert bool(server.received) == (waiting_for == PERMIT)


async def test_groups_of_one_activity_are_reported_as_each_ends(tmp_path: Path) -> None:
    server, rooms = _world(tmp_path, 2)
    more = [GroupWork("train/8", "train", "e", 1, 1), GroupWork("train/9", "train", "e", 2, 1)]
    running = _start(rooms, more=more)
    rooms.end(0)
    await until(lambda: newest(server) == {"train/7/0": 1, "train/8/0": 1, "train/9/0": 1})
    rooms.end(1)
    assert await running == RunRolloutsResult("train/7", 2, 0, 2, more=[None, None])
    assert rooms.releases is not None and not rooms.releases._owners


async def test_groups_that_ended_beside_one_that_failed_are_adopted(tmp_path: Path) -> None:
    _, rooms = _world(tmp_path, 2)
    rooms.broken = {1}
    more = [GroupWork("train/8", "train", "e", 1, 1)]
    rooms.end(0, 1)
    with pytest.raises(ApplicationError, match="gone"):
        await _start(rooms, more=more)
    rooms.broken.clear()
    assert (await _start(rooms, more=more)).ok == 2
    assert sorted(rooms.begun) == ["train/7/0", "train/7/1", "train/8/0"], "each once"


async def test_a_retry_reports_what_it_adopted(tmp_path: Path) -> None:
    server, rooms = _world(tmp_path, 3)
    for index in (0, 2):
        rooms.ctx.store.put_json(
            keys.rollout("r", "train/7", index), {"error": None, "sampled_tokens": 1}
        )
    running = _start(rooms)
    await until(lambda: bool(server.received))
    assert server.received == [(DISPATCH, {"train/7/0": 2})]
    rooms.end(1)
    assert (await running).ok == 3 and len(server.received) == 1


async def test_a_rollout_that_was_not_committed_is_not_reported(tmp_path: Path) -> None:
    server, rooms = _world(tmp_path, 3)
    rooms.broken = {0}
    running = _start(rooms)
    rooms.end(0, 1)
    await until(lambda: bool(server.received))
    assert rooms.releases is not None
    await sent(rooms.releases)
    assert server.received == [(DISPATCH, {"train/7/0": 1})]
    rooms.end(2)
    with pytest.raises(ApplicationError, match="gone"):
        await running
    assert not rooms.releases._owners
