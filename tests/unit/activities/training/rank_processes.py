"""Trainers of several ranks, started by torch's launcher as a worker starts them."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ratchet.activities.training.client import TrainerClient, TrainerFailed, TrainerGone
from ratchet.activities.training.server import PROCESS, launched, rank_env


@dataclass
class Launched:
    """The launcher of a trainer, whose ranks are its children."""

    client: TrainerClient
    launcher: asyncio.subprocess.Process

    def rank(self, rank: int) -> psutil.Process:
        """The process of a rank."""
        for child in psutil.Process(self.launcher.pid).children():
            if child.environ().get("RANK") == str(rank):
                return child
        raise LookupError(f"no rank {rank}")

    async def end(self) -> None:
        """Ends whatever is left of it."""
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.launcher.pid).children(recursive=True)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            self.launcher.kill()
        await self.launcher.wait()


@contextlib.asynccontextmanager
async def ranks_of(folder: Path, count: int, **env: str) -> AsyncIterator[Launched]:
    """A trainer of `count` ranks that answers a ping, with one thread each."""
    folder.mkdir(parents=True, exist_ok=True)
    socket = folder / f"r{count}-{len(list(folder.iterdir()))}"
    argv = launched([PROCESS, "--socket", str(socket)], count)
    process = await asyncio.create_subprocess_exec(
        *argv,
        cwd=folder,
        env={**os.environ, "TQDM_DISABLE": "1", **rank_env(count), "OMP_NUM_THREADS": "1", **env},
    )
    trainer = Launched(TrainerClient(f"unix://{socket}"), process)
    try:
        async with asyncio.timeout(120):
            while True:
                with contextlib.suppress(TrainerGone, TrainerFailed, TimeoutError):
                    await trainer.client.ping(timeout_s=2.0)
                    break
                assert process.returncode is None, "the launcher has ended"
                await asyncio.sleep(0.1)
        yield trainer
    finally:
        await trainer.end()


def with_ranks(config: dict[str, Any], ranks: int, **trainer: Any) -> dict[str, Any]:
    """A config whose trainer has so many ranks."""
    return {**config, "trainer": {**config["trainer"], "ranks": ranks, **trainer}}
