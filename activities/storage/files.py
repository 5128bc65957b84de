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
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC:
            raise
    finally:
        os.close(handle)
