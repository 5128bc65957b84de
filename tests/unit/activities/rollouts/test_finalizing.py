"""A group that is finalized by the activity that rolled it out."""

import os
from pathlib import Path
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.rollouts import FinalizeGroupInput, GroupResult, GroupWork
from ratchet.activities.envs.samples import Reading, Rollout, failed
from ratchet.activities.storage import documents, keys
from ratchet.activities.storage.store import StoreUnavailable
from tests.unit.activities.envs.test_samples import _episode, _node, read
from tests.unit.activities.rollouts.test_commits import SIZE, Env, Rooms

WORK = GroupWork("train/0", "train", "reverse-text", 0, SIZE)
GROUP, ROLLOUTS = keys.group("r", WORK.group), keys.rollouts("r", WORK.group)


class Player(Env):
    """Rollouts are worth more and more; with `broken` the first one errs."""

    broken = False

    async def play(self, request: dict[str, Any], reading: Reading) -> Rollout:
        self.played += 1
        if self.broken and self.played == 1:
            return failed("HarnessError", "no")
        nodes = [_node(None, [1, 2, 3]), _node(0, [4, 5, 6], 2)]
        rewards = {"r": {"score": self.played / 3, "weight": 1.0}}
        info = {"weight_versions": [[{"version": "3.1a", "start": 0, "end": 2}]]}
        return read(_episode(nodes, rewards=rewards, info=info))


class Reader:
    """Notes what is read of a store."""

    def __init__(self, rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[str] = []
        self._get, self._committed = rooms.ctx.store.get, rooms.ctx.store.committed
        monkeypatch.setattr(rooms.ctx.store, "get", self.get)
        monkeypatch.setattr(rooms.ctx.store, "committed", self.committed)

    def get(self, ref: ArtifactRef, *, schema: int = 1) -> bytes:
        self.read.append(ref.key)
        return self._get(ref, schema=schema)

    def committed(self, key: str) -> ArtifactRef | None:
        self.read.append(key)
        return self._committed(key)


def _rooms(home: Path, env: Env) -> Rooms:
    rooms = Rooms(home, env)
    rooms.policies._vocab_sizes["r"] = 64
    return rooms


def _document(rooms: Rooms) -> dict[str, Any]:
    document = documents.read(rooms.ctx.store, rooms.ctx.store.require(GROUP))
    assert document.pop("scoring_s") > 0
    return document


@pytest.mark.parametrize("broken", [False, True])
async def test_it_is_what_an_activity_of_its_own_makes_of_the_stored_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    env = Player()
    env.broken = broken
    rooms = _rooms(tmp_path, env)
    seen = Reader(rooms, monkeypatch)
    ran = await rooms.start(finalize_from=3)
    here: GroupResult = ran.finalized
    wanted = (SIZE - broken, broken, 3)
    assert (here.survivors, here.errored, here.version_start) == wanted
    below = (ROLLOUTS, GROUP)
    assert not [key for key in seen.read if key.startswith(below)], "all of it was at hand"
    document = _document(rooms)
    rooms.ctx.store.delete(rooms.ctx.store.require(GROUP))
    run = ActivityEnvironment().run
    alone = await run(rooms.finalize_group, FinalizeGroupInput("r", WORK, 3))
    assert _document(rooms) == document and alone.ref is not None
    assert (alone.advantage_range, alone.labels) == (here.advantage_range, here.labels)


async def test_nobody_finalizes_what_was_not_asked_for(tmp_path: Path) -> None:
    rooms = _rooms(tmp_path, Player())
    assert (await rooms.start()).finalized is None
    assert rooms.ctx.store.committed(GROUP) is None


async def test_a_later_attempt_adopts_the_group_with_its_rollouts(tmp_path: Path) -> None:
    env = Player()
    rooms = _rooms(tmp_path, env)
    first = await rooms.start(finalize_from=3)
    assert await rooms.start(finalize_from=5) == first and env.played == SIZE


async def test_a_failure_is_left_to_the_activity_that_only_finalizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollouts did not fail: their activity ends well, and the other one says what is wrong."""
    link = os.link

    def full(source: str, target: Any, **options: Any) -> None:
        if "/groups/" in str(target):
            raise OSError(28, "No space left on device")
        link(source, target, **options)

    rooms = _rooms(tmp_path, Player())
    monkeypatch.setattr("ratchet.activities.storage.store.os.link", full)
    ran = await rooms.start(finalize_from=3)
    assert (ran.ok, ran.finalized) == (SIZE, None) and rooms.stored() == [True] * SIZE
    run, given = ActivityEnvironment().run, FinalizeGroupInput("r", WORK, 3)
    with pytest.raises(StoreUnavailable, match="free some space"):
        await run(rooms.finalize_group, given)
    monkeypatch.setattr("ratchet.activities.storage.store.os.link", link)
    assert (await run(rooms.finalize_group, given)).survivors == SIZE
