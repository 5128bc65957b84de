"""What runs take of the store: measured when they are looked at, never twice at once."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ratchet.activities.storage.store import ArtifactStore
from ratchet.api.schemas.run import RUN_EXAMPLE, Run
from ratchet.api.services import disk
from ratchet.api.services.disk import Disk

RUN = Run.model_validate(RUN_EXAMPLE)


def write(store: ArtifactStore, size: int) -> None:
    path = Path(store.path(f"runs/{RUN.id}/file-{size}"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)


async def size_now(measuring: Disk, run: Run = RUN) -> int | None:
    """What is said once whatever is being measured is."""
    await measuring.shown(run)
    await asyncio.gather(*measuring._measuring.values())
    return (await measuring.shown(run)).disk


async def test_a_run_is_measured_once_in_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ArtifactStore(f"file://{tmp_path}")
    measuring = Disk(store)
    write(store, 4096)
    assert (await measuring.shown(RUN)).disk is None
    assert len(measuring._measuring) == 1
    await measuring.shown(RUN)
    assert len(measuring._measuring) == 1, "one who comes meanwhile begins nothing"
    assert (await measuring.shown(RUN, wait_s=30.0)).disk == 4096
    write(store, 8192)
    assert await size_now(measuring) == 4096
    monkeypatch.setattr(disk, "FRESH_S", 0.0)
    monkeypatch.setattr(disk, "SHARE", 0.0)
    again = Disk(store)
    assert await size_now(again) == 12288
    write(store, 16384)
    assert await size_now(again) == 28672
    again.forget(RUN.id)
    assert (await again.shown(RUN)).disk is None
    await asyncio.gather(*again._measuring.values())


async def test_however_many_runs_are_shown_few_wait_to_be_measured(tmp_path: Path) -> None:
    measuring = Disk(ArtifactStore(f"file://{tmp_path}"))
    runs = [RUN.model_copy(update={"id": f"run-{i}"}) for i in range(1000)]
    for run in [*runs, runs[-1]]:
        # One alone is waited for, if it is being measured.
        assert (await measuring.shown(run, wait_s=30.0 if run is runs[-1] else 0.0)).disk is None
    assert len(measuring._measuring) == disk.MOST_WAITING
    await asyncio.gather(*measuring._measuring.values())
    assert [(await measuring.shown(run)).disk for run in runs[:2]] == [0, 0]
    assert await size_now(measuring, runs[-1]) == 0


async def test_a_run_that_ended_long_ago_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "FRESH_S", 0.0)
    monkeypatch.setattr(disk, "SHARE", 0.0)
    store = ArtifactStore(f"file://{tmp_path}")
    now = datetime.now(UTC)
    for ended, changes in ((now - timedelta(hours=1), False), (now, True)):
        run = RUN.model_copy(update={"finished_at": ended})
        measuring = Disk(store)
        first = await size_now(measuring, run)
        write(store, 4096 if not changes else 8192)
        assert (await size_now(measuring, run) != first) is changes


async def test_a_store_that_is_away_is_no_failure(tmp_path: Path) -> None:
    away = ArtifactStore(f"file://{tmp_path}/store", tmp_path / "stores.json")
    away.require_usable()
    away.put_json("runs/x", {})
    write(away, 10)
    (tmp_path / "store").rename(tmp_path / "disk")
    (tmp_path / "store").mkdir()
    assert (await Disk(away).shown(RUN, wait_s=30.0)).disk is None
