"""What is no store is not taken for an empty one: unmounted disks, and stores that overwrite."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import httpx
import pytest
from fastapi.testclient import TestClient

from ratchet.activities.storage.store import ArtifactStore, UnusableStore
from ratchet.activities.storage.usable import MARK
from ratchet.api.__main__ import main
from ratchet.api.app import create_app
from tests.unit.api.http.test_security import AWAY, settings
from tests.unit.api.routes.test_create import problem


def store_of(folder: Path) -> ArtifactStore:
    return ArtifactStore(f"file://{folder}/store", folder / "home" / "stores.json")


def unmount(folder: Path) -> None:
    """What is left is the mount point."""
    (folder / "store").rename(folder / "disk")
    (folder / "store").mkdir()


def test_an_unmounted_store_is_away_and_not_empty(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    ref = store.put_json("runs/r/config.json", {"a": 1})
    unmount(tmp_path)
    for other in (store, store_of(tmp_path)):
        for act in (
            lambda s: s.committed("runs/r/config.json"),
            lambda s: s.get(ref),
            lambda s: s.read_live("live/x.json"),
            lambda s: s.folders("runs"),
            lambda s: s.put_json("runs/r/lineage.json", {}),
            lambda s: s.write_live("live/api.json", {}),
            lambda s: s.touch(["index/runs/x"]),
            lambda s: s.free_bytes(),
            lambda s: s.require_usable(),
        ):
            with pytest.raises(UnusableStore, match="mount the disk"):
                act(other)
        assert list((tmp_path / "store").iterdir()) == []
    (tmp_path / "store").rmdir()
    with pytest.raises(UnusableStore):
        store.write_live("live/api.json", {})
    assert not (tmp_path / "store").exists()
    (tmp_path / "disk").rename(tmp_path / "store")
    assert store.get_json(ref) == {"a": 1} == store_of(tmp_path).get_json(ref)


def test_a_store_without_a_mark_is_marked_once(tmp_path: Path) -> None:
    # One that an older build filled, and one that is not there yet.
    ref = ArtifactStore(f"file://{tmp_path}/store").put_json("runs/r/config.json", {})
    assert store_of(tmp_path).committed("runs/r/config.json") == ref
    assert store_of(tmp_path).committed("runs/r/lineage.json") is None
    assert (tmp_path / "store" / MARK).exists()
    other = ArtifactStore(f"file://{tmp_path}/new", tmp_path / "home" / "stores.json")
    assert other.folders("runs") == [] and (tmp_path / "new" / MARK).exists()
    # Another machine, or one whose home is new, goes by the mark that is there.
    again = ArtifactStore(f"file://{tmp_path}/store", tmp_path / "other" / "stores.json")
    assert again.committed("runs/r/lineage.json") is None
    unmount(tmp_path)
    with pytest.raises(UnusableStore):
        again.committed("runs/r/config.json")


def test_the_api_says_503_and_makes_no_folder(tmp_path: Path) -> None:
    result = settings(tmp_path / "home", RATCHET_STORE=f"file://{tmp_path}/store")
    app = create_app(result, AWAY)
    records = app.state.services.records
    records.probe()
    (tmp_path / "store").rename(tmp_path / "disk")
    client = TestClient(app, raise_server_exceptions=False)
    with pytest.raises(UnusableStore):
        records.probe()
    assert not (tmp_path / "store").exists()

    @app.get("/probe")
    def probe() -> None:
        records.config("some-run")

    reply = problem(client.get("/probe"), 503, "store-unavailable")
    assert "mount" in reply["detail"]


def test_a_run_of_an_unmounted_store_is_503_and_not_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Temporal does not know a run, the store might."""
    result = settings(tmp_path / "home", RATCHET_STORE=f"file://{tmp_path}/store")
    app = create_app(result, AWAY)
    services = app.state.services
    services.records.probe()

    async def knows_none(run_id: str) -> None:
        return None

    monkeypatch.setattr(services.temporal, "describe", knows_none)
    client = TestClient(app, raise_server_exceptions=False)
    problem(client.get("/v1/runs/a-run"), 404, "unknown-run")
    (tmp_path / "store").rename(tmp_path / "disk")
    reply = problem(client.get("/v1/runs/another-run"), 503, "store-unavailable")
    assert "mount" in reply["detail"] and not (tmp_path / "store").exists()


def test_an_api_that_may_not_write_its_home_needs_no_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert settings(tmp_path / "home").known_stores == tmp_path / "home" / "stores.json"
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    assert settings(tmp_path / "home").known_stores is None


# -- remote stores --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """Settings of an S3 that honours conditional writes: moto's server."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    code = (
        "from moto.server import ThreadedMotoServer as S; import time;"
        "s = S('127.0.0.1', 0, verbose=False); s.start();"
        "print(s.get_host_and_port()[1], flush=True); time.sleep(600)"
    )
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        httpx.put(f"{url}/store", trust_env=False).raise_for_status()
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        server.kill()
        server.wait()


def test_a_store_that_creates_exclusively_is_used(
    s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    store = ArtifactStore("s3://store/ratchet")
    store.require_usable()
    first = store.put_json("runs/r/config.json", {"by": "first"})
    assert ArtifactStore("s3://store/ratchet").put_json("runs/r/config.json", {}) == first
    assert store.get_json(first) == {"by": "first"}
    assert not [name for name in store.live_keys("live", "") if "probe" in name]
    # What another process writes is seen, whatever was listed before.
    other = fsspec.filesystem("s3", skip_instance_cache=True)
    for day in ("2026-01-30", "2026-01-31"):
        other.pipe_file(store.path(f"index/runs/{day}/05/1-r"), b"")
        assert store.folders("index/runs")[-1] == day
    store.touch(["index/runs/2026-01-31/05/1-r"])
    assert len(store.live_keys("index/runs/2026-01-31/05", "")) == 1


def test_a_store_that_overwrites_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    url = f"memory://overwrites-{time.time_ns()}"
    store = ArtifactStore(url)
    pipe = type(store.fs).pipe_file

    def ignoring(self: Any, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        pipe(self, path, value, mode="overwrite")

    monkeypatch.setattr(type(store.fs), "pipe_file", ignoring)
    with pytest.raises(UnusableStore, match="If-None-Match"):
        store.put_json("runs/r/config.json", {})
    assert store.committed("runs/r/config.json") is None
    monkeypatch.setenv("RATCHET_STORE", url)
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path))
    assert main(["--port", "0"]) == 1
    assert "conditional writes" in capsys.readouterr().err
