"""A store that fails: what it says, and what it leaves behind. Damage: what is refused, and how."""

import contextlib
import errno
import json
import os
import resource
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ratchet.activities.storage import series
from ratchet.activities.storage.series import Series
from ratchet.activities.storage.store import (
    ArtifactStore,
    CorruptArtifact,
    FutureArtifact,
    StoreUnavailable,
)


class EndpointConnectionError(Exception):
    """Like botocore's: no OSError."""


class Failing(MemoryFileSystem):
    """A remote filesystem of which one operation fails."""

    protocol = "failing"
    cachable = False

    def __init__(self, broken: str, error: Exception) -> None:
        super().__init__()
        self.broken, self.error = broken, error

    def _ask(self, name: str) -> None:
        if name == self.broken:
            raise self.error

    def cat_file(self, *given: Any, **options: Any) -> Any:
        self._ask("cat_file")
        return super().cat_file(*given, **options)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> Any:
        self._ask("create" if mode == "create" else "pipe_file")
        return super().pipe_file(path, value, mode=mode, **options)

    def ls(self, *given: Any, **options: Any) -> Any:
        self._ask("ls")
        return super().ls(*given, **options)

    def put_file(self, *given: Any, **options: Any) -> Any:
        self._ask("put_file")
        return super().put_file(*given, **options)


@pytest.fixture
def local(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(f"file://{tmp_path}/store")


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ArtifactStore:
    if request.param == "local":
        return ArtifactStore(f"file://{tmp_path}/store")
    return ArtifactStore(f"memory://{tmp_path.name}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "made"
    made.mkdir()
    (made / "a.json").write_text("{}")
    (made / "b.bin").write_bytes(b"b" * 100_000)
    return made


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """Writing more than 40 kB to a file fails half-way, as on a disk that fills up."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def files(store: ArtifactStore) -> list[str]:
    root = Path(store.root)
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def error_of(number: int) -> OSError:
    return OSError(number, os.strerror(number))


# -- failures -------------------------------------------------------------------------------


def test_what_fails_half_way_leaves_nothing(local: ArtifactStore, folder: Path) -> None:
    result = r"cannot write runs/r/a \(/.*OSError.*; check"
    with small_files(), pytest.raises(StoreUnavailable, match=result) as caught:
        local.put("runs/r/a", b"x" * 100_000)
    assert caught.value.errno == errno.EFBIG
    with small_files(), pytest.raises(StoreUnavailable, match=r"cannot write live/a\.json"):
        local.write_live("live/a.json", "x" * 100_000)
    assert files(local) == []
    ref = local.put_folder("w/1", folder, attempt="1")
    before = files(local)
    with small_files(), pytest.raises(StoreUnavailable, match=r"b\.bin to w/2"):
        local.put_folder("w/2", folder, attempt="2")
    with small_files(), pytest.raises(StoreUnavailable, match=r"b\.bin to w/3"):
        local.copy(ref, "w/3", attempt="3")
    assert files(local) == before, "the small file that was written first is gone, too"
    assert local.put_folder("w/2", folder, attempt="4").sha256 == ref.sha256


@pytest.mark.parametrize("call", ["fsync", "link", "replace"])
@pytest.mark.parametrize(
    ("number", "mend"),
    [
        (errno.ENOSPC, "free some space there"),
        (errno.EDQUOT, "free some space there"),
        (errno.EIO, "check the mount"),
        (errno.EROFS, "mounted for writing"),
        (errno.EACCES, "mounted for writing"),
    ],
)
def test_a_marker_is_whole_or_not_there(
    local: ArtifactStore,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    number: int,
    mend: str,
) -> None:
    local.put("other", b"kept")

    def fail(*given: object, **options: object) -> None:
        raise error_of(number)

    with monkeypatch.context() as patch:
        patch.setattr(f"ratchet.activities.storage.store.os.{call}", fail)
        with pytest.raises(StoreUnavailable, match=mend) as caught:
            local.put("runs/r/a", b"data")
        assert caught.value.errno == number
        with pytest.raises(StoreUnavailable, match=mend):
            local.put_folder("runs/r/w", folder, attempt="1")
    left = [name for name in files(local) if not name.startswith("other")]
    # Content named by its hash may be another attempt's, too.
    assert [name for name in left if not name.startswith("runs/r/a@")] == []
    assert local.committed("runs/r/a") is None
    ref = local.put_folder("runs/r/w", folder, attempt="1")
    assert (local.fetch_folder(ref) / "a.json").exists()


def test_a_commit_that_came_about_keeps_its_content(
    local: ArtifactStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def slow(*given: Any, **options: Any) -> None:
        link(*given, **options)
        raise error_of(errno.EIO)

    with monkeypatch.context() as patch:
        patch.setattr("ratchet.activities.storage.store.os.link", slow)
        with pytest.raises(StoreUnavailable):
            local.put_folder("w", folder, attempt="1")
    ref = local.require("w")
    assert local.put_folder("w", folder, attempt="2") == ref
    local.verify(ref)


def test_an_attempt_that_was_late_leaves_no_content(local: ArtifactStore, folder: Path) -> None:
    class Overtaken(ArtifactStore):
        def _commit(self, ref: Any) -> Any:
            local.put_folder("w", folder, attempt="first")
            return super()._commit(ref)

    ref = Overtaken(local.url).put_folder("w", folder, attempt="late")
    assert ref.attempt == "first"
    assert not [name for name in files(local) if "late" in name]


@pytest.mark.parametrize(
    "error",
    [
        EndpointConnectionError("could not connect to the endpoint"),
        TimeoutError("timed out"),
        ConnectionResetError("reset by peer"),
        PermissionError(errno.EACCES, "access denied"),
        error_of(errno.EIO),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("cat_file", "read"),
        ("pipe_file", "write"),
        ("create", "write"),
        ("ls", "list"),
        ("put_file", "copy"),
    ],
)
def test_every_failure_says_what_where_why(
    tmp_path: Path, folder: Path, broken: str, said: str, error: Exception
) -> None:
    store = ArtifactStore(f"memory://failing-{tmp_path.name}")
    store.fs = Failing(broken, error)

    def work() -> None:
        store.put("runs/r/a", b"")
        store.put_folder("runs/r/w", folder, attempt="1")
        store.committed("runs/r/a")
        store.committed_keys("runs/r")

    with pytest.raises(StoreUnavailable) as caught:
        work()
    text = str(caught.value)
    assert said in text and "runs/r" in text and type(error).__name__ in text
    assert "; check" in text and "failing" in text
    assert caught.value.__cause__ is error


def test_not_found_and_bugs_are_no_failures(local: ArtifactStore) -> None:
    assert local.committed("none") is None and local.committed_keys("none") == []
    assert local.folders("none") == [] and local.read_live("none") is None
    with pytest.raises(FileNotFoundError):
        local.require("none")
    store = ArtifactStore("memory://failing")
    store.fs = Failing("cat_file", KeyError("a bug"))
    with pytest.raises(KeyError):
        store.committed("a")


def test_a_parent_that_is_a_file_is_no_commit_of_another(local: ArtifactStore) -> None:
    Path(local.root).mkdir()
    (Path(local.root) / "runs").write_text("")
    with pytest.raises(StoreUnavailable, match="cannot write runs/a"):
        local.put("runs/a", b"data")


# -- damage ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[:-1], "99 of 100 bytes"),
        (lambda data: b"", "0 of 100 bytes"),
        (lambda data: bytes([data[0] ^ 1]) + data[1:], "does not match its sha256$"),
        (None, "is missing"),
    ],
    ids=["truncated", "empty", "one flipped bit", "missing"],
)
def test_damaged_content_is_refused(
    store: ArtifactStore, tmp_path: Path, damage: Any, said: str
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    data = bytes(range(100))
    (source / "x.bin").write_bytes(data)
    file, whole = store.put("f", data), store.put_folder("w", source, attempt="1")
    for path in (file.path, f"{whole.path}/x.bin"):
        store.fs.rm(store.path(path))
        if damage is not None:
            store.fs.pipe_file(store.path(path), damage(data))
    for ref, read in ((file, store.get), (whole, store.fetch_folder), (whole, store.verify)):
        with pytest.raises(CorruptArtifact, match=rf"^{ref.key}: {ref.path}.*{said}"):
            read(ref)  # type: ignore[operator]
        with pytest.raises(CorruptArtifact):
            store.copy(ref, "copy", attempt="1")
    assert store.committed("copy") is None


def test_damaged_manifest_is_refused(store: ArtifactStore, folder: Path) -> None:
    ref = store.put_folder("w", folder, attempt="1")
    path = store.path(f"{ref.path}/manifest.json")
    store.fs.pipe_file(path, b"{}")
    with pytest.raises(CorruptArtifact, match=r"^w: .*manifest\.json does not match"):
        store.fetch_folder(ref)
    store.fs.rm(path)
    with pytest.raises(CorruptArtifact, match=r"^w: .*manifest\.json is missing"):
        store.fetch_folder(ref)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda ref: b"not JSON", "not JSON"),
        (lambda ref: b"", "not JSON"),
        (lambda ref: json.dumps(ref).encode()[:40], "incomplete"),
        (lambda ref: b"[]", "lacks"),
        (lambda ref: json.dumps({**ref, "path": None}).encode(), "path None"),
        (lambda ref: json.dumps({k: v for k, v in ref.items() if k != "sha256"}).encode(), "lacks"),
        (lambda ref: json.dumps({**ref, "key": "b"}).encode(), "another artifact"),
    ],
)
def test_damaged_markers_are_refused(store: ArtifactStore, damage: Any, said: str) -> None:
    ref = store.put("a", b"data")
    store.fs.pipe_file(store.path("a.commit"), damage(asdict(ref)))
    for ask in (store.committed, store.require, lambda key: store.put(key, b"data")):
        with pytest.raises(CorruptArtifact, match=rf"^a: its marker .*a\.commit .*{said}"):
            ask("a")  # type: ignore[operator]


def test_artifacts_from_the_future_are_refused(store: ArtifactStore, folder: Path) -> None:
    result = r"schema 2 is later than 1.*later version of Ratchet"
    value = store.put_json("a.json", {"schema": 2, "rollouts": []})
    with pytest.raises(FutureArtifact, match=rf"^a\.json .*{result}"):
        store.get_json(value)
    assert store.get_json(value, schema=2)["schema"] == 2
    file, whole = store.put("f", b"", schema=2), store.put_folder("w", folder, attempt="1")
    for ref, read in ((file, store.get), (replace(whole, schema=2), store.fetch_folder)):
        with pytest.raises(FutureArtifact, match=result):
            read(ref)  # type: ignore[operator]
    store.fs.pipe_file(
        store.path("f.commit"), json.dumps({**asdict(file), "codec": "zstd"}).encode()
    )
    with pytest.raises(FutureArtifact, match=r"^f: .*codec.*later version"):
        store.committed("f")


def test_copies_live_without_their_source(store: ArtifactStore, folder: Path) -> None:
    file, whole = store.put("a/f", b"data"), store.put_folder("a/w", folder, attempt="1")
    copies = [store.copy(ref, f"b/{ref.key}", attempt="2") for ref in (file, whole)]
    part = store.copy(whole, "b/part", attempt="2", without=["b.bin"])
    assert [copy.sha256 for copy in copies] == [file.sha256, whole.sha256]
    for ref in (file, whole):
        store.delete(ref)
    assert store.get(copies[0]) == b"data"
    assert (store.fetch_folder(copies[1]) / "b.bin").stat().st_size == 100_000
    names = {path.name for path in store.fetch_folder(part).iterdir()}
    assert "a.json" in names and "b.bin" not in names


def test_torn_gauges_count_as_none(local: ArtifactStore) -> None:
    local.write_live("live/a.json", {"time": 1})
    Series("r", "w").add({"time": 1.0}).write(local)
    for key in ("live/a.json", *local.live_keys("runs/r/series", ".jsonl")):
        Path(local.path(key)).write_bytes(Path(local.path(key)).read_bytes()[:5])
    assert local.read_live("live/a.json") is None
    assert series.page(local, "r", 0.0, 10) == ([], False)
