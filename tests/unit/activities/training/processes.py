"""Trainer processes that tests may kill, stop and hold up in the middle of what they write."""

import asyncio
import contextlib
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import pytest
from temporalio.exceptions import ApplicationError

from ratchet.activities.contracts import names
from ratchet.activities.contracts.training import TrainerTarget
from ratchet.activities.training.client import TrainerClient, TrainerGone
from tests import ROOT


class Process:
    """One trainer process of a test."""

    def __init__(self, handle: asyncio.subprocess.Process, socket: Path, epoch: int) -> None:
        self.handle = handle
        self.pid = handle.pid
        self.client = TrainerClient(str(socket))
        self.target = TrainerTarget(epoch, f"unix://{socket}")

    async def kill(self) -> None:
        """SIGKILL, and waits until it has gone."""
        with contextlib.suppress(ProcessLookupError):
            self.handle.kill()
        await self.handle.wait()

    def may_write(self, most: int) -> None:
        """Files of the process may grow to this many bytes, as if the disk were full then; -1: to
        any size.
        """
        _, hard = resource.prlimit(self.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (most, hard))

    async def killed_while_writing(
        self, work: Awaitable[object], scratch: Path, blocked: str, witness: str
    ) -> None:
        """Starts `work` and kills the process inside it: when it has written the file `witness`
        and is held up at `blocked`, both below the folder that `work` makes in `scratch`.

        The process stands still until a pipe that nobody reads lies where `blocked` goes.
        """
        self.handle.send_signal(signal.SIGSTOP)
        before = set(scratch.iterdir()) if scratch.exists() else set()
        task = asyncio.ensure_future(work)
        async with asyncio.timeout(120):
            while not scratch.exists() or not (made := set(scratch.iterdir()) - before):
                await asyncio.sleep(0.01)
            (folder,) = made
            pipe = folder / blocked
            pipe.parent.mkdir(parents=True, exist_ok=True)
            os.mkfifo(pipe)
            self.handle.send_signal(signal.SIGCONT)
            while not (folder / witness).exists():
                await asyncio.sleep(0.01)
        # It answers, so it lives, and its work does not come back: not before a second answer.
        for _ in range(2):
            await self.client.ping(timeout_s=60)
        assert not task.done() and pipe.is_fifo()
        await self.kill()
        with pytest.raises(ApplicationError) as caught:
            await task
        assert caught.value.type == names.TRAINER_LOST


async def until_it_answers(client: TrainerClient, timeout_s: float = 60) -> None:
    """Waits until a trainer process takes requests: its socket is a file before it listens there.
    Raises TimeoutError.
    """
    async with asyncio.timeout(timeout_s):
        while True:
            with contextlib.suppress(TrainerGone):
                await client.ping(timeout_s)
                return
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def trainer_process(folder: Path, epoch: int = 1) -> AsyncIterator[Process]:
    """A process that listens on a socket in `folder` and is gone afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    socket = folder / f"e{epoch}"
    with (folder / f"e{epoch}.log").open("wb") as log:
        handle = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ratchet.activities.training.process", "--socket", str(socket)),
            cwd=ROOT,
            env={**os.environ, "TQDM_DISABLE": "1"},
            stderr=log,
        )
    process = Process(handle, socket, epoch)
    try:
        await until_it_answers(process.client)
        yield process
    finally:
        await process.kill()
