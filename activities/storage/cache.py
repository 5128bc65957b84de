"""Local copies of files in a remote store: private to this user, and bounded.

Invariants: an entry is a folder named by the hash of its content, inside a folder that nobody else
may enter, so that nobody can put anything there first. Entries that were not used for KEPT_S are
removed, the least recently used first, once the cache takes more than SHARE of the disk.
"""

import contextlib
import os
import shutil
import time
import uuid
from pathlib import Path

from ratchet.configs.home import home_folder, private_folder

SHARE = 0.25
KEPT_S = 600.0
"""Longer than any reader of an entry needs for it."""
_GOING = ".going-"


def _size(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


class Cache:
    """Entries below one folder, which processes of one user share."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or home_folder() / "cache"

    def entry(self, sha: str) -> Path:
        """The folder of an entry, which counts as used now."""
        private_folder(self.folder)
        entry = self.folder / sha
        entry.mkdir(mode=0o700, exist_ok=True)
        os.utime(entry)
        return entry

    def trim(self, now: float | None = None) -> None:
        """Removes entries that were not used for long, as far as the bound requires."""
        now = time.time() if now is None else now
        most = int(SHARE * shutil.disk_usage(self.folder).total)
        entries = []
        for entry in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                entries.append((entry.stat().st_mtime, _size(entry), entry))
        total = sum(size for _, size, _ in entries)
        for used, size, entry in sorted(entries):
            if total <= most or now - used < KEPT_S:
                return
            going = entry
            if not entry.name.startswith(_GOING):
                # Renamed first: a concurrent reader finds no entry, rather than half of one.
                going = self.folder / f"{_GOING}{uuid.uuid4().hex}"
                with contextlib.suppress(FileNotFoundError):
                    entry.rename(going)
            shutil.rmtree(going, ignore_errors=True)
            total -= size
