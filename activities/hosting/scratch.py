"""Working folders of this process, and the removal of those whose process was killed.

Invariant: a folder's name has the pid namespace, the pid and the start time of its process, so that
a sweep touches nothing of a live process, nor of another machine that shares the folder.
"""

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ratchet.activities.hosting.keeper import machine, start_time

_NAME = re.compile(r"(?P<space>[0-9a-f]{8})-(?P<pid>\d+)-(?P<start>\d+)-")


def _space() -> str:
    return hashlib.sha256(machine().encode()).hexdigest()[:8]


@contextlib.contextmanager
def working_folder(parent: Path, name: str) -> Iterator[Path]:
    """A folder below `parent` for one piece of work, removed afterwards."""
    owner = f"{_space()}-{os.getpid()}-{start_time(os.getpid())}-"
    folder = Path(tempfile.mkdtemp(prefix=f"{owner}{name}-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep_folders(parent: Path) -> list[str]:
    """Removes the folders below `parent` whose process of this machine is gone; returns their
    names.
    """
    swept = []
    for folder in parent.iterdir() if parent.exists() else ():
        match = _NAME.match(folder.name)
        if match is None or match["space"] != _space():
            continue
        if start_time(int(match["pid"])) != int(match["start"]):
            shutil.rmtree(folder, ignore_errors=True)
            swept.append(folder.name)
    return swept
