"""What is on the disk when a commit returns: a crash of the machine loses none of it."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ratchet.activities.storage.store import MARKER, ArtifactStore, StoreUnavailable


class Disk:
    """Watches which names and bytes have got to the disk; it does as it is told all the same."""

    def __init__(self, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = Path(store.root)
        self.names: set[Path] = set()
        """Made, and lost in a crash, since their folder is not synced yet."""
        self.whole: set[Path] = set()
        self.markers: list[str] = []
        self.refuses: int | None = None
        """With this error the disk refuses to sync folders."""
        self.unnamed = 0
        """Files that were made without a name."""
        self.refuses_unnamed: int | None = None
        """With this error its filesystem refuses to make any."""
        monkeypatch.setattr(os, "open", self._watched(os.open, self.open))
        for name in ("fsync", "mkdir", "replace", "link"):
            monkeypatch.setattr(os, name, self._watched(getattr(os, name), getattr(self, name)))

    def _watched(self, do: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
        def watched(*given: Any, **options: Any) -> Any:
            note(*given)
            return do(*given, **options)

        return watched

    def fsync(self, handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        self.whole.add(path)
        self.names -= {name for name in self.names if name.parent == path}
        if path.is_dir() and self.refuses is not None:
            raise OSError(self.refuses, os.strerror(self.refuses), str(path))

    def open(self, path: Any, flags: int, mode: int = 0o777) -> None:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            if self.refuses_unnamed is not None:
                raise OSError(self.refuses_unnamed, os.strerror(self.refuses_unnamed), str(path))
            self.unnamed += 1

    def mkdir(self, path: Any, mode: int = 0o777) -> None:
        # pathlib tries a folder first, and what is above it if that fails.
        made = Path(path)
        ours = made == self.root or self.root in made.parents
        if ours and made.parent.exists() and not made.exists():
            self.names.add(made)

    def replace(self, source: str, target: Path) -> None:
        assert Path(source) in self.whole, f"{target} gets its name before its bytes"
        self.names.add(Path(target))

    def link(self, source: str, target: Any) -> None:
        if source.startswith("/proc/"):
            source = os.readlink(source)
        assert Path(source) in self.whole and not self.names, f"{target} precedes {self.names}"
        self.names.add(Path(target))
        self.markers.append(Path(target).name)


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(f"file://{tmp_path}/store")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "made"
    (made / "sub" / "deep").mkdir(parents=True)
    for name in ("a", "b", "sub/c", "sub/deep/d"):
        (made / name).write_text(name)
    return made


@pytest.mark.parametrize("refuses", [None, errno.EOPNOTSUPP, errno.EISDIR])
def test_a_commit_is_on_the_disk_content_before_marker(
    store: ArtifactStore, folder: Path, monkeypatch: pytest.MonkeyPatch, refuses: int | None
) -> None:
    disk = Disk(store, monkeypatch)
    disk.refuses_unnamed = refuses
    store.put("runs/r/a", b"one")
    assert not disk.names
    store.put("runs/r/a", b"two", attempt="2")
    assert not disk.names, "the winner's marker, which the loser adopts"
    ref = store.put_folder("w/1", folder, attempt="1")
    assert not disk.names
    store.copy(ref, "w/2", attempt="2")
    assert not disk.names
    store.put_inside("runs/r/b", b"one")
    assert not disk.names
    store.put_inside("runs/r/b", b"two", attempt="2")
    assert not disk.names, "the winner's marker, which the loser adopts"
    assert disk.markers == [name + MARKER for name in ("a", "a", "1", "2", "b", "b")]
    assert disk.unnamed == (0 if refuses else 6), "one for each marker, where there are such files"
    assert not list(disk.root.rglob(".part-*")), "nothing is left"


def test_live_records_do_not_wait_for_the_disk(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    store.put("runs/r/a", b"")
    before = len(synced)
    store.write_live("runs/r/live/a.json", {})
    store.write_lines("runs/r/series/a.jsonl", [1])
    assert len(synced) == before > 0


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_filesystem_that_cannot_sync_folders_serves(
    store: ArtifactStore, folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    Disk(store, monkeypatch).refuses = number
    assert store.get(store.put("runs/r/a", b"one")) == b"one"
    store.verify(store.put_folder("w/1", folder, attempt="1"))


def test_a_disk_that_fails_at_the_end_is_reported_and_the_next_try_succeeds(
    store: ArtifactStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(store, monkeypatch)
    disk.refuses = errno.EIO
    with pytest.raises(StoreUnavailable, match=r"cannot write runs/r/a .*; check"):
        store.put("runs/r/a", b"one")
    with pytest.raises(StoreUnavailable, match="w/1"):
        store.put_folder("w/1", folder, attempt="1")
    disk.refuses = None
    assert store.get(store.put("runs/r/a", b"one")) == b"one"
    store.verify(store.put_folder("w/1", folder, attempt="2"))
