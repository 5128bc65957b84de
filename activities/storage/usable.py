"""Whether the artifact store is available, and fit to be one.

Invariants: a local store has a MARK, created at its first use; if the mark is missing although
`known` remembers it, the disk is away: nothing is read as if the store were empty, nor written. A
remote store creates exclusively, which commits rely on; that is tried, not assumed.
"""

import errno
import json
import time
from pathlib import Path
from typing import Any

from ratchet.activities.storage.files import replace

MARK = "ratchet-store.json"
FULL = (errno.ENOSPC, errno.EDQUOT)


class StoreUnavailable(OSError):
    """The store cannot be read, or written, or both, now; `errno` if there was one."""


class UnusableStore(StoreUnavailable):
    """The location does not hold the store, or cannot hold one; `remedy` says what to do."""

    def __init__(self, why: str, remedy: str) -> None:
        super().__init__(f"{why}; {remedy}")
        self.remedy = remedy


def remedy(error: BaseException) -> str:
    """How to fix a filesystem error, in words."""
    if isinstance(error, UnusableStore):
        return error.remedy
    number = getattr(error, "errno", None)
    if number in FULL:
        return "free some space there"
    if isinstance(error, PermissionError) or number == errno.EROFS:
        return "check that it is mounted for writing, and who may write there"
    return "check the mount or the connection"


class Mark:
    """The mark of the store at `root`. `known` is a file that remembers marked stores."""

    def __init__(self, root: Path, known: Path) -> None:
        self._root = root.absolute()
        self._known = known
        self._seen = False

    def require(self) -> None:
        """Creates the mark at the store's first use; raises UnusableStore if it is gone."""
        mark = self._root / MARK
        there = mark.exists()
        if there and self._seen:
            return
        root = str(self._root)
        known = json.loads(self._known.read_text()) if self._known.exists() else []
        if not there:
            # A store of an older build has no mark, but its contents show that it is there.
            if (self._seen or root in known) and not (self._root / "runs").is_dir():
                raise UnusableStore(
                    f"the artifact store {root} has no {MARK}, which it had before",
                    "mount the disk that holds the store there; if it was emptied on purpose, "
                    f"remove it from {self._known}",
                )
            replace(mark, [json.dumps({"created_at": time.time()}).encode()], sync=True)
        if root not in known:
            self._known.parent.mkdir(parents=True, exist_ok=True)
            replace(self._known, [json.dumps([*known, root]).encode()], sync=True)
        self._seen = True


def require_exclusive(fs: Any, path: str) -> None:
    """Raises UnusableStore if a filesystem overwrites at `path` although asked not to."""
    fs.pipe_file(path, b"1", mode="create")
    try:
        fs.pipe_file(path, b"2", mode="create")
        refused = False
    except FileExistsError:
        refused = True
    fs.rm_file(path)
    if not refused:
        raise UnusableStore(
            "the artifact store overwrites files that it should only create if they are absent "
            "(If-None-Match), so that two attempts at one artifact would both be committed",
            "use a store that honours conditional writes, such as S3, MinIO or a local disk",
        )
