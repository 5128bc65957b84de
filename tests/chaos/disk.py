"""A small filesystem for the artifact store, which can be filled, made read-only and frozen.

Kinds, by what the machine permits: an ext4 image on a loop device (all three faults), a tmpfs (no
freezing), or none, where the store lies in a plain folder and the disk faults are left out.
"""

import errno
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["ext4", "tmpfs", "none"]
LEFT_WHEN_FULL = 16 * 1024


@dataclass(frozen=True)
class Disk:
    """A mounted disk; the store lies at `folder`/store."""

    folder: Path
    kind: Kind

    @property
    def store(self) -> Path:
        """Where artifacts go."""
        return self.folder / "store"

    def fill(self) -> str:
        """Takes the space that is left; returns the error that a write then meets.

        A server that deletes something makes room again, so callers repeat this.
        """
        filler = os.open(self.folder / "filler", os.O_CREAT | os.O_RDWR)
        try:
            size = os.fstat(filler).st_size
            room = shutil.disk_usage(self.folder).free
            if room > LEFT_WHEN_FULL:
                try:
                    os.posix_fallocate(filler, size, room - LEFT_WHEN_FULL)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
        finally:
            os.close(filler)
        return self.refusal(size=4 * LEFT_WHEN_FULL)

    def empty(self) -> None:
        """Gives the space back."""
        (self.folder / "filler").unlink(missing_ok=True)

    def read_only(self) -> str:
        """Refuses all writes; returns the error that a write then meets, '' if it could not."""
        for _ in range(100):
            if _run("mount", "-o", "remount,ro", str(self.folder)) == 0:
                return self.refusal(size=1)
            # Refused while a file is open for writing.
            time.sleep(0.02)
        return ""

    def writable(self) -> None:
        """Takes writes again."""
        _run("mount", "-o", "remount,rw", str(self.folder))

    def freeze(self, seconds: float) -> "subprocess.Popen[bytes]":
        """Lets every write wait for `seconds`, even if this process ends meanwhile."""
        script = 'fsfreeze -f "$0" && { sleep "$1"; fsfreeze -u "$0"; }'
        return subprocess.Popen(
            ["sh", "-c", script, str(self.folder), str(seconds)], start_new_session=True
        )

    def refusal(self, *, size: int) -> str:
        """The name of the error that writing `size` bytes meets, '' if there is none."""
        probe = self.folder / "probe"
        try:
            probe.write_bytes(b"x" * size)
            with probe.open("rb") as file:
                os.fsync(file.fileno())
            probe.unlink()
        except OSError as error:
            if error.errno != errno.EROFS:
                probe.unlink(missing_ok=True)
            return errno.errorcode[error.errno or 0]
        return ""

    def unmount(self) -> None:
        """Takes it away, whatever state it is in."""
        if self.kind == "none":
            return
        _run("fsfreeze", "-u", str(self.folder))
        for _ in range(20):
            if _run("umount", str(self.folder)) == 0:
                break
            time.sleep(0.25)
        else:
            _run("umount", "-l", str(self.folder))
        self.folder.with_suffix(".img").unlink(missing_ok=True)


def _run(*command: str) -> int:
    if shutil.which(command[0]) is None:
        return 127
    return subprocess.run(command, capture_output=True, timeout=30).returncode


def mount(folder: Path, size_mib: int) -> Disk:
    """The best disk that the machine permits, at `folder`."""
    folder.mkdir(parents=True)
    image = folder.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(size_mib * 2**20)
    options = "lazy_itable_init=1,lazy_journal_init=1"
    made = _run("mkfs.ext4", "-q", "-m", "0", "-E", options, str(image)) == 0
    if made and _run("mount", "-o", "loop", str(image), str(folder)) == 0:
        return _ready(Disk(folder, "ext4"))
    image.unlink()
    if _run("mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "none", str(folder)) == 0:
        return _ready(Disk(folder, "tmpfs"))
    return _ready(Disk(folder, "none"))


def _ready(disk: Disk) -> Disk:
    disk.store.mkdir()
    return disk
