"""Copies of a remote store: verified, private, bounded, and where they belong."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.storage import cache
from ratchet.activities.storage.cache import KEPT_S, Cache
from ratchet.activities.storage.store import MANIFEST, ArtifactStore, CorruptArtifact


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def forged(store: ArtifactStore, name: str) -> ArtifactRef:
    """A committed folder whose manifest names `name`, which whoever writes to the store can do."""
    files = {name: [hashlib.sha256(b"x").hexdigest(), 1]}
    manifest = json.dumps(files).encode()
    store.fs.pipe_file(f"{store.root}/k@a/{MANIFEST}", manifest)
    # As remote stores have it, where names are only text.
    if not store.local and not name.startswith("/"):
        store.fs.pipe_file(f"{store.root}/k@a/{name}", b"x")
    return ArtifactRef("k", hashlib.sha256(manifest).hexdigest(), 1, "k@a", 1, "a")


@pytest.mark.parametrize("kind", ["file", "memory"])
@pytest.mark.parametrize("name", ["../out", "a/../../out", "/OUT", "a//b", "./a", "a\0b"])
def test_a_manifest_leads_nowhere_else(tmp_path: Path, kind: str, name: str) -> None:
    name = name.replace("/OUT", f"{tmp_path}/out")
    store = ArtifactStore(f"{kind}://{tmp_path}/store")
    store.fs.makedirs(f"{store.root}/k@a", exist_ok=True)
    ref = forged(store, name)
    for read in (store.fetch_folder, store.verify):
        with pytest.raises(CorruptArtifact, match="outside the folder"):
            read(ref)
    assert not (tmp_path / "out").exists()


def put(store: ArtifactStore, tmp_path: Path, key: str, text: str) -> ArtifactRef:
    folder = tmp_path / key
    folder.mkdir()
    (folder / "w.bin").write_text(text)
    return store.put_folder(key, folder, attempt="a")


def test_the_cache_is_private_and_verifying_keeps_nothing(tmp_path: Path, home: Path) -> None:
    store = ArtifactStore(f"memory://{tmp_path.name}")
    ref = put(store, tmp_path, "k", "weights")
    store.verify(ref)
    assert not home.exists()
    folder = store.fetch_folder(ref)
    assert folder.is_relative_to(home) and (folder / "w.bin").read_text() == "weights"
    for place in (home / "cache", folder):
        assert place.stat().st_mode & 0o077 == 0
    store.fs.pipe_file(f"{store.root}/{ref.path}/w.bin", b"damage!")
    with pytest.raises(CorruptArtifact, match="does not match"):
        store.verify(ref)


def test_the_least_recently_used_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimpleNamespace(total=int(25 / cache.SHARE))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: disk)
    kept = Cache(tmp_path / "c")
    for number, name in enumerate("abc"):
        entry = kept.entry(name)
        (entry / "f").write_bytes(b"0123456789")
        os.utime(entry, (1000 + number, 1000 + number))

    def left(now: float) -> list[str]:
        kept.trim(now)
        return sorted(entry.name for entry in kept.folder.iterdir())

    # Who fetched one still reads it.
    assert left(1000 + KEPT_S - 1) == ["a", "b", "c"]
    assert left(5000 + KEPT_S) == ["b", "c"]
    os.utime(kept.folder / "b", (6000, 6000))
    (kept.entry("d") / "f").write_bytes(b"0123456789")
    assert left(6000 + KEPT_S - 1) == ["b", "d"]


def test_fetching_trims(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "SHARE", 0.0)
    monkeypatch.setattr(cache, "KEPT_S", -1.0)
    store = ArtifactStore(f"memory://{tmp_path.name}")
    first = store.fetch_folder(put(store, tmp_path, "one", "1"))
    monkeypatch.setattr(cache, "KEPT_S", 600.0)
    assert not first.exists()
    second = store.fetch_folder(put(store, tmp_path, "two", "2"))
    assert (second / "w.bin").read_text() == "2"
