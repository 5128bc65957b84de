"""Files on a local disk that a crash of the machine reverts as a whole or not at all."""

import contextlib
import errno
import itertools
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)
"""Errors of filesystems that cannot sync a folder; most of them are on a network."""
NO_UNNAMED = (errno.EOPNOTSUPP, errno.EISDIR)
"""Errors of filesystems that have no files without a name."""
CHUNK = 2**20


def chunks(source: Path, sha: Any) -> Iterator[bytes]:
    """The bytes of a file, piece by piece; updates `sha` with them."""
    with source.open("rb") as file:
        while chunk := file.read(CHUNK):
            sha.update(chunk)
            yield chunk


def staged(path: Path, data: Iterable[bytes], *, sync: bool) -> str:
    """Writes a temporary file beside `path` and returns its name; no file is left if it fails."""
    make_folder(path.parent, sync=sync)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".part-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
    except BaseException:
        os.unlink(name)
        raise
    return name


def replace(path: Path, data: Iterable[bytes], *, sync: bool, name_too: bool = True) -> None:
    """Replaces a file; with `sync` its bytes are then on disk, and its name with `name_too`."""
    name = staged(path, data, sync=sync)
    try:
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    if sync and name_too:
        sync_folder(path.parent)


def create(path: Path, data: bytes) -> None:
    """Makes a file whose bytes get to the disk before its name; the name is there when this returns
    or raises FileExistsError, whoever made it.
    """
    make_folder(path.parent, sync=True)
    try:
        handle = os.open(path.parent, os.O_TMPFILE | os.O_WRONLY, 0o600)
    except OSError as error:
        if error.errno not in NO_UNNAMED:
            raise
        _create_from_named(path, data)
        return
    with os.fdopen(handle, "wb") as file, _folder(path.parent) as folder:
        file.write(data)
        file.flush()
        os.fsync(handle)
        try:
            # Only with a folder at hand does Python's link go through /proc's link to the file.
            os.link(f"/proc/self/fd/{handle}", path, src_dir_fd=folder, follow_symlinks=True)
        finally:
            # Another's name, too: who made it may have ended before it got to this.
            _sync(folder)


def _create_from_named(path: Path, data: bytes) -> None:
    name = staged(path, [data], sync=True)
    try:
        os.link(name, path)
    finally:
        os.unlink(name)
        sync_folder(path.parent)


def make_folder(folder: Path, *, sync: bool) -> None:
    missing = list(itertools.takewhile(lambda at: not at.exists(), (folder, *folder.parents)))
    for made in reversed(missing):
        made.mkdir(exist_ok=True)
        if sync:
            try:
                sync_folder(made.parent)
            except BaseException:
                # So that the next attempt creates the folder again, and syncs it.
                with contextlib.suppress(OSError):
                    made.rmdir()
                raise


def sync_folder(folder: Path) -> None:
    """Syncs the names in a folder to disk, as far as its filesystem can."""
    with _folder(folder) as handle:
        _sync(handle)


@contextlib.contextmanager
def _folder(path: Path) -> Iterator[int]:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield handle
    finally:
        os.close(handle)


def _sync(folder: int) -> None:
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC:
            raise
