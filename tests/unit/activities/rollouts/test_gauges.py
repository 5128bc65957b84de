"""Gauges of a worker: the live record, the series, and the lag of the event loop."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from ratchet.activities.contracts.rollouts import Gauges
from ratchet.activities.rollouts import gauges as gauging
from ratchet.activities.rollouts.gauges import RunGauges
from ratchet.activities.runtime.lag import LoopLag
from ratchet.activities.storage import keys, series
from ratchet.activities.storage.store import ArtifactStore


def _samples(store: ArtifactStore) -> list[dict[str, Any]]:
    data, more = series.page(store, "r", 0.0, 1000)
    assert not more
    return data


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(f"file://{tmp_path}")


async def test_work_is_sampled_from_its_beginning_to_its_end(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gauging, "WRITE_S", 600.0)
    monkeypatch.setattr(gauging, "SAMPLE_S", 0.0)
    gauges = RunGauges(store, "r", "host-7")
    gauges.hear(Gauges(4, 2, 8, 3, {"train/e": 4, "eval/e": 2}, "eval", waiting_for="x"))
    gauges.inflight = 2
    await gauges.write()
    await gauges.write()
    assert len(_samples(store)) == 1, "once in WRITE_S at most"
    monkeypatch.setattr(gauging, "WRITE_S", 0.0)
    async with asyncio.timeout(30):
        while not gauges._lag._lags:
            await asyncio.sleep(0.01)
    gauges.finished(50)
    gauges.inflight = 0
    await gauges.write(force=True)
    first, last = _samples(store)
    assert first["time"] < last["time"] and time.time() - last["time"] < 60
    assert first["source"] == last["source"] and last["source"].startswith("rollout-host-7-")
    assert (first["worker_inflight"], last["worker_inflight"]) == (2, 0)
    assert first["inflight"] == last["inflight"] == {"train/e": 4, "eval/e": 2}
    assert (last["mode"], last["permits"], last["waiting_for"]) == ("eval", 8, "x")
    assert first["heard"] == last["heard"] and 0 <= first["time"] - last["heard"] < 60
    assert first["tokens_per_s"] == 0.0 and last["tokens_per_s"] > 0
    assert first["event_loop_lag"] is None, "nothing was measured yet"
    lag = last["event_loop_lag"]
    assert 0 <= lag["min"] <= lag["median"] <= lag["p90"] <= lag["p99"] <= lag["max"] < 60
    assert lag["min"] <= lag["mean"] <= lag["max"] and lag["n"] >= 1
    assert last["usage"]["cpu_cores"] >= 0 and last["usage"]["memory_bytes"] > 0
    live = store.read_live(keys.live("r", "rollout-host-7"))
    assert live is not None
    assert (live["rollouts"], live["sampled_tokens"], live["worker_inflight"]) == (1, 50, 0)
    assert live["inflight"] == {"train/e": 4, "eval/e": 2}


async def test_ends_that_follow_each_other_closely_are_one_sample(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gauging, "WRITE_S", 600.0)
    gauges = RunGauges(store, "r", "w")
    for count in range(5):
        gauges.tokens = count
        await gauges.write(force=True)
    (only,) = _samples(store)
    assert only["sampled_tokens"] == 4
    monkeypatch.setattr(gauging, "WRITE_S", 0.0)
    await gauges.write()
    assert len(_samples(store)) == 1, "between samples lie ten seconds"


async def test_nothing_is_left_running_when_work_has_ended(store: ArtifactStore) -> None:
    before = asyncio.all_tasks()
    gauges = RunGauges(store, "r", "w")
    await gauges.write()
    await gauges.write()
    assert len(asyncio.all_tasks() - before) == 1, "one probe"
    await gauges.write(force=True)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_a_store_that_is_away_harms_nobody(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("no folder")
    gauges = RunGauges(ArtifactStore(f"file://{tmp_path / 'store'}"), "r", "w")
    await gauges.write(force=True)
    (tmp_path / "store").unlink()
    await gauges.write(force=True)
    assert len(_samples(gauges.store)) == 1


@pytest.mark.alone
async def test_a_blocked_loop_shows() -> None:
    lag, others = LoopLag(), asyncio.all_tasks()
    assert lag.take() is None
    lag.start()
    lag.start()

    async def taken() -> dict[str, float]:
        async with asyncio.timeout(30):
            while (lags := lag.take()) is None:
                await asyncio.sleep(0.05)
        return lags

    assert (await taken())["mean"] < 0.1
    time.sleep(0.5)
    assert 0.3 < (await taken())["max"] < 2
    lag.stop()
    lag.take()
    assert lag.take() is None, "what was taken is gone"
    async with asyncio.timeout(30):
        while asyncio.all_tasks() != others:
            await asyncio.sleep(0.05)
    assert lag.take() is None, "it has stopped"
