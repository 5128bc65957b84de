"""Finished rollouts survive what fails around them: the store for a while, or the env server."""

import asyncio
import errno
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from ratchet.activities.contracts import names
from ratchet.activities.contracts.rollouts import EngineTarget, GroupWork, Kind, RunRolloutsInput
from ratchet.activities.contracts.training import label_of
from ratchet.activities.envs.client import ABORTED, UnreadEpisode
from ratchet.activities.envs.samples import Reading, Rollout, failed
from ratchet.activities.rollouts import activities as rooms_module
from ratchet.activities.rollouts import patience
from ratchet.activities.rollouts.activities import RolloutActivities
from ratchet.activities.rollouts.connections import EnvConnection, EnvConnections
from ratchet.activities.rollouts.tasks import TaskLibrary
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.storage import documents, keys
from ratchet.activities.storage.store import StoreUnavailable
from ratchet.configs.load import validate
from tests.groups import no_releases

SIZE = 2


class _Tasks(TaskLibrary):
    async def task(self, run_id: str, kind: Kind, name: str, index: int) -> dict[str, Any]:
        return {}


class Env:
    """An env server's client. Rollouts end at once, but the `slow` first ones never do."""

    def __init__(self, *, slow: int = 0, refusal: str = "") -> None:
        self.played, self.slow, self.refusal = 0, slow, refusal

    async def play(self, request: dict[str, Any], reading: Reading) -> Rollout:
        self.played += 1
        self.reading = reading
        if self.played <= self.slow:
            await asyncio.Event().wait()
        if self.refusal:
            raise RuntimeError(self.refusal)
        return failed("HarnessError", "no")


class _Connections(EnvConnections):
    def __init__(self, connection: EnvConnection) -> None:
        super().__init__()
        self.connection = connection

    @asynccontextmanager
    async def use(self, address: str) -> AsyncIterator[EnvConnection]:
        yield self.connection


class Rooms(RolloutActivities):
    """Carries rollouts out on a real store, without env server and engine."""

    def __init__(self, home: Path, env: Env) -> None:
        ctx = WorkerContext(home=home, store_url=str(home / "store"), own_queue="q")
        super().__init__(ctx, no_releases())
        config = validate({"max_steps": 1, "train": {"env": [{"id": "reverse-text"}]}})
        self.ctx.store.put_json(keys.config("r"), config.model_dump(mode="json"))
        self.connection = EnvConnection("tcp://env:1", cast(Any, env))
        self.tasks, self.connections = _Tasks(self.ctx), _Connections(self.connection)
        self.beats = 0

    async def _request(self, given: RunRolloutsInput, task: dict[str, Any]) -> dict[str, Any]:
        return {"sampling": {"temperature": 1.0}}

    def start(self, finalize_from: int | None = None, model: str = "m") -> asyncio.Task[Any]:
        """One attempt at the group."""
        environment = ActivityEnvironment()
        environment.info = replace(environment.info, workflow_id="d")
        environment.on_heartbeat = self._beat
        work = GroupWork("train/0", "train", "reverse-text", 0, SIZE)
        given = RunRolloutsInput(
            "r", work, EngineTarget(0, 0, "http://e:1", model, 0), "tcp://env:1"
        )
        given = replace(given, finalize_from=finalize_from)
        return asyncio.create_task(environment.run(self.run_rollouts, given))

    def _beat(self, *details: Any) -> None:
        self.beats += 1

    def stored(self) -> list[bool]:
        """Of which rollouts the store has the document."""
        found = [self.ctx.store.committed(keys.rollout("r", "train/0", i)) for i in range(SIZE)]
        return [ref is not None for ref in found]


class Disk:
    """What the store's disk does: with `full`, markers of rollouts cannot be made by the rooms,
    which work in threads.
    """

    def __init__(self) -> None:
        self.full, self.tries = True, 0
        self._link = os.link

    def link(self, source: str, target: Any, **options: Any) -> None:
        """Stands in for os.link."""
        if "/rollouts/" in str(target):
            self.tries += 1
            if self.full and threading.current_thread() is not threading.main_thread():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._link(source, target, **options)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr("ratchet.activities.storage.store.os.link", disk.link)
    monkeypatch.setattr(patience, "REST_S", (0.02, 0.04))
    monkeypatch.setattr(rooms_module, "HEARTBEAT_S", 0.05)
    return disk


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_full_disk_costs_no_finished_rollout(tmp_path: Path, disk: Disk) -> None:
    env = Env()
    rooms = Rooms(tmp_path, env)
    running = rooms.start()
    await _until(lambda: disk.tries >= 3 * SIZE)
    beats = rooms.beats
    await _until(lambda: rooms.beats > beats)
    assert not running.done() and rooms.stored() == [False] * SIZE
    disk.full = False
    assert (await running).errored == SIZE
    assert rooms.stored() == [True] * SIZE and env.played == SIZE


async def test_patience_ends(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PATIENCE_S", 2.0)
    rooms = Rooms(tmp_path, Env())
    with pytest.raises(StoreUnavailable, match="free some space"):
        await rooms.start()
    assert disk.tries > SIZE


async def test_a_cancelled_attempt_tries_no_more(tmp_path: Path, disk: Disk) -> None:
    rooms = Rooms(tmp_path, Env())
    others = asyncio.all_tasks()
    running = rooms.start()
    await _until(lambda: disk.tries >= SIZE)
    running.cancel()
    before = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert time.monotonic() - before < patience.PATIENCE_S / 2
    # Those that were under way in their threads may end; whoever tried on would do so for ever.
    await _until(lambda: asyncio.all_tasks() == others)
    assert not rooms._storing


async def test_the_first_of_two_attempts_counts(tmp_path: Path, disk: Disk) -> None:
    rooms = Rooms(tmp_path, Env())
    running = rooms.start()
    await _until(lambda: disk.tries >= SIZE)
    key = keys.rollout("r", "train/0", 0)
    first = {"error": None, "sampled_tokens": 7}
    assert rooms.ctx.store.put_json(key, first, attempt="other").attempt == "other"
    disk.full = False
    result = await running
    assert (result.ok, result.errored, result.sampled_tokens) == (1, SIZE - 1, 7)


async def test_what_had_ended_outlives_the_env_server(tmp_path: Path, disk: Disk) -> None:
    env = Env(slow=1)
    rooms = Rooms(tmp_path, env)
    running = rooms.start()
    await _until(lambda: disk.tries >= 2)
    rooms.connection._lose("killed")
    tries = disk.tries
    await _until(lambda: disk.tries >= tries + 3)
    assert not running.done()
    disk.full = False
    with pytest.raises(ApplicationError, match="killed") as caught:
        await running
    assert caught.value.type == names.ENV_LOST and rooms.stored() == [False, True]


async def test_the_end_of_an_env_server_is_no_rollout(tmp_path: Path) -> None:
    env = Env(refusal=ABORTED)
    rooms = Rooms(tmp_path, env)
    running = rooms.start()
    await _until(lambda: env.played == SIZE)
    assert rooms.stored() == [False] * SIZE
    rooms.connection._lose("nothing listens there any more")
    with pytest.raises(ApplicationError, match="nothing listens") as caught:
        await running
    assert caught.value.type == names.ENV_LOST and caught.value.non_retryable
    assert rooms.stored() == [False] * SIZE


@pytest.mark.parametrize("refusal", [ABORTED, "ValidationError: no such task"])
async def test_what_an_env_server_refuses_is_a_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    monkeypatch.setattr(rooms_module, "ABORTED_S", 0.1)
    rooms = Rooms(tmp_path, Env(refusal=refusal))
    assert (await rooms.start()).errored == SIZE, "one that lives gave up a rollout of its own"
    ref = rooms.ctx.store.require(keys.rollout("r", "train/0", 0))
    assert documents.read(rooms.ctx.store, ref)["error"]["message"] == refusal


class BlindEnv(Env):
    """An env server that cannot read what was played."""

    async def play(self, request: dict[str, Any], reading: Reading) -> Rollout:
        raise UnreadEpisode("AttributeError: no such field")


async def test_an_episode_that_nobody_can_read_fails_the_attempt(tmp_path: Path) -> None:
    rooms = Rooms(tmp_path, BlindEnv())
    with pytest.raises(UnreadEpisode):
        await rooms.start()
    assert rooms.stored() == [False] * SIZE


async def test_how_an_episode_is_read(tmp_path: Path) -> None:
    """Adapters have a label of their own, and a prompt that is too long names the limit."""
    env = Env()
    rooms = Rooms(tmp_path, env)
    await rooms.start()
    seq_len = rooms.ctx.config("r").trainer.seq_len
    assert env.reading == Reading(chat=False, label="", seq_len=seq_len) and seq_len > 0
    rooms = Rooms(tmp_path / "adapter", env)
    await rooms.start(model="r@7.12b")
    assert env.reading == Reading(label=label_of("r@7.12b"), seq_len=seq_len)
    assert env.reading.label == "7.12b"


class SlowEnv(Env):
    """An env server whose rollouts reach their time limit."""

    async def play(self, request: dict[str, Any], reading: Reading) -> Rollout:
        raise TimeoutError


async def test_a_rollout_out_of_time_names_the_key(tmp_path: Path) -> None:
    rooms = Rooms(tmp_path, SlowEnv())
    assert (await rooms.start()).errored == SIZE
    ref = rooms.ctx.store.require(keys.rollout("r", "train/0", 0))
    said = documents.read(rooms.ctx.store, ref)["error"]["message"]
    assert said.endswith("for 120 s; train.env.reverse-text.timeout_s sets this limit")


def test_the_env_server_still_says_it_so() -> None:
    from verifiers.v1.serve import server

    assert f'error="{ABORTED}"' in Path(server.__file__).read_text()
