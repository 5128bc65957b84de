"""A server process for its owner: started, watched and ended through its keeper.

Invariants:

- The server ends when this process does, in whatever way (see `ratchet.activities.hosting.keeper`).
- `exited` is set only when nothing of the server is left, or after its keeper was lost and a sweep
  has ended the rest.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import uuid
from pathlib import Path

from ratchet.activities.contracts.logs import LOG_BYTES, PAST
from ratchet.activities.contracts.redact import redacted, whole_lines
from ratchet.activities.hosting import keeper, reaper
from ratchet.activities.hosting.spec import ServerSpec
from ratchet.activities.runtime.children import child_env

GRACE_S = 5.0
KEEPER_LOST = "its keeper was killed"


def describe_exit(code: int | None) -> str:
    """An exit code in words; None stands for a lost keeper."""
    if code is None:
        return KEEPER_LOST
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


class ServerProcess:
    """One server of one epoch. `start`, then `exited` and `stop`; not restartable."""

    def __init__(
        self,
        spec: ServerSpec,
        *,
        home: Path,
        run: str,
        host: str,
        epoch: int,
        grace_s: float = GRACE_S,
    ) -> None:
        self.spec = spec
        self.home = home
        self.run = run
        self.host = host
        self.epoch = epoch
        self.grace_s = grace_s
        self.pid = 0
        self.code: int | None = None
        self.exited = asyncio.Event()
        slug = re.sub(r"[^A-Za-z0-9._-]", "-", f"{run}-{host}")
        self._slug = slug
        self.log = home / (spec.log or f"logs/{slug}.log")
        self._log_start = 0
        self._keeper: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the server; returns once its process exists, healthy or not.

        Raises OSError if a disk fails: then there is no process.
        """
        hosts = self.home / "hosts"
        hosts.mkdir(parents=True, exist_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        mark = uuid.uuid4().hex
        # Servers that rename themselves would otherwise overwrite their environment, and so
        # the mark, where a sweep reads it.
        extra = {**self.spec.env, keeper.MARK: mark, "SPT_NOENV": "1"}
        order = {
            "argv": self.spec.argv,
            "cwd": str(self.spec.cwd),
            "env": child_env(extra),
            "grace_s": self.grace_s,
            "identity": {"run": self.run, "host": self.host, "epoch": self.epoch},
        }
        record = hosts / f"{self._slug}-e{self.epoch}-{mark[:8]}.json"
        with self.log.open("ab") as log:
            log.write(f"--- {self.spec.name}, epoch {self.epoch}\n".encode())
            log.flush()
            self._log_start = log.tell()
            # Run as a file and isolated: no package, path or site setting can break it.
            self._keeper = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(Path(keeper.__file__).resolve()), str(record)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self._keeper.stdin is not None and self._keeper.stdout is not None
        self._keeper.stdin.write(json.dumps(order).encode() + b"\n")
        first = await self._keeper.stdout.readline()
        reported = json.loads(first) if first else {}
        if "errno" in reported:
            await self._keeper.wait()
            raise OSError(reported["errno"], reported["error"])
        self._watcher = asyncio.create_task(self._watch(self._keeper.stdout))
        self.pid = reported.get("pid", 0)

    async def _watch(self, output: asyncio.StreamReader) -> None:
        assert self._keeper is not None
        last = await output.readline()
        await self._keeper.wait()
        try:
            if last:
                self.code = json.loads(last)["exit"]
            else:
                await asyncio.to_thread(reaper.sweep, self.home, run=self.run, host=self.host)
        finally:
            self.exited.set()

    async def stop(self, grace_s: float | None = None) -> None:
        """Ends the server and all it started; returns when they are gone. May be repeated.

        `grace_s` replaces the time between SIGTERM and SIGKILL; 0 kills at once.
        """
        if self._keeper is None:
            return
        grace = self.grace_s if grace_s is None else grace_s
        stdin = self._keeper.stdin
        assert stdin is not None
        with contextlib.suppress(ConnectionError):
            if not stdin.is_closing():
                stdin.write(f"{grace}\n".encode())
                await stdin.drain()
            stdin.close()
        if self._watcher is None:
            await self._keeper.wait()
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace + reaper.KEEPER_SLACK_S):
                await self.exited.wait()
        if not self.exited.is_set():
            # The watcher sweeps after a lost keeper.
            with contextlib.suppress(ProcessLookupError):
                self._keeper.kill()
            await self.exited.wait()

    def log_tail(self, limit: int = 1200) -> str:
        """The last `limit` characters that this epoch wrote to its log, without secrets; nothing of
        a line that is many times as long.
        """
        with contextlib.suppress(FileNotFoundError), self.log.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            begin = log.seek(max(self._log_start, end - 16 * limit))
            text = log.read().decode(errors="replace")
            text = whole_lines(text) if begin > self._log_start else text
            return redacted(text, None).strip()[-limit:]
        return ""

    def trim_log(self, limit: int = LOG_BYTES) -> None:
        """Rotates a log of more than `limit` bytes; its content is kept beside it. Blocks. What is
        written at that very moment may be lost.
        """
        # Its disk may be full or gone; the next start of a server waits for that.
        with contextlib.suppress(OSError):
            if self.log.stat().st_size <= limit:
                return
            try:
                shutil.copyfile(self.log, self.log.with_name(f"{self.log.name}{PAST}"))
            finally:
                # The server keeps appending, wherever the end is.
                os.truncate(self.log, 0)
                self._log_start = 0
