"""The event-loop lag that a server measures of itself gets into the series of its run."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from ratchet.activities.contracts.hosting import HostInput
from ratchet.activities.hosting import server_lag
from ratchet.activities.storage import series
from ratchet.activities.storage.store import ArtifactStore

HOST = HostInput("r+2", "env", 3, "q", name="train/my-env:2")
LAG = {"mean": 0.25, "max": 0.5, "p99": 0.4}


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(f"file://{tmp_path}/store")


def samples(store: ArtifactStore) -> list[dict[str, Any]]:
    return series.page(store, "r", 0.0, 100)[0]


async def test_each_sample_of_a_server_is_kept_once_under_its_role(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One without a measurement is none; neither a missing nor a damaged file ends the watch."""
    monkeypatch.setattr(server_lag, "LOOKS_EVERY_S", 0.01)
    file = tmp_path / "lag.json"
    watch = asyncio.create_task(server_lag.record_lag(store, HOST, file))

    async def until(count: int) -> None:
        async with asyncio.timeout(60):
            while len(samples(store)) < count:
                assert not watch.done()
                await asyncio.sleep(0.01)

    part = tmp_path / "lag.part"
    for number, text in enumerate(
        ["{", json.dumps({"time": 0.5, "event_loop_lag": None})]
        + [json.dumps({"time": float(at), "event_loop_lag": LAG}) for at in (1, 2, 2, 1, 3)]
    ):
        part.write_text(text)
        part.replace(file)
        await until({2: 1, 3: 2, 6: 3}.get(number, 0))
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    kept = samples(store)
    assert [sample["time"] for sample in kept] == [1.0, 2.0, 3.0]
    assert all(sample["event_loop_lag"] == LAG for sample in kept)
    (source,) = {sample["source"] for sample in kept}
    assert source.startswith("env-server-train-my-env-2-") and series.role_of(source) == "env"
