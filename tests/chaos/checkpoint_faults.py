"""Kills inside a checkpoint write: of the trainer that writes it, or of the worker that commits it.

The victim is stopped the moment that the write begins, looked at, and then killed, so that what it
had written by then can be told from a write that was complete.
"""

import asyncio
import fnmatch
import itertools
import os
import signal
import threading
import time
from pathlib import Path
from typing import cast

from ratchet.activities.storage import keys
from ratchet.activities.storage.store import MARKER
from tests.chaos.schedule import Spec
from tests.chaos.targets import Role, gone
from tests.chaos.world import TARGET_WITHIN_S, NotLanded, World, target, until_gone

CHECKPOINT_WITHIN_S = 60.0


def _seen(root: Path, pattern: str, known: set[str]) -> Path | None:
    """What matches `pattern`, 'folder/file', in a folder of `root` that is not among `known`."""
    folders, _, files = pattern.partition("/")
    # Names alone: to look into all folders of a long run takes longer than a commit.
    names = os.listdir(root) if root.is_dir() else []
    fresh = fnmatch.filter(set(names) - known, folders)
    return next((path for name in fresh for path in (root / name).glob(files)), None)


def strike(pid: int, root: Path, pattern: str, stop: threading.Event) -> Path | None:
    """Freezes `pid` as soon as a folder that was empty or absent holds something that matches;
    that, or None when told to stop.

    Stopped first and killed by the caller: what it had written by then stays as it was.
    """
    known = {path.relative_to(root).parts[0] for path in root.glob(pattern)}
    while not stop.is_set():
        if found := _seen(root, pattern, known):
            os.kill(pid, signal.SIGSTOP)
            return found
        time.sleep(0.0005)
    return None


async def kill_in_checkpoint(world: World, spec: Spec) -> tuple[float, str]:
    """Kills the trainer while it writes a checkpoint, or its worker while that commits one."""
    role = cast(Role, spec.role)
    of_process = role == "trainer-process"
    root = world.stack.home / "scratch" / "training"
    pattern = "*-checkpoint-*/checkpoint/*"
    if not of_process:
        root, pattern = Path(world.store.path(keys.checkpoints(world.run_id))), "*@*/*"
    deadline = time.monotonic() + CHECKPOINT_WITHIN_S + TARGET_WITHIN_S
    for _ in itertools.count():
        process = await target(world, role)
        created, stop = process.create_time(), threading.Event()
        watch = asyncio.create_task(asyncio.to_thread(strike, process.pid, root, pattern, stop))
        try:
            while not watch.done() and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
                if gone(process.pid, created):
                    break
        finally:
            stop.set()
        found = await watch
        if found is None:
            if time.monotonic() >= deadline:
                raise NotLanded(f"no checkpoint was written for {CHECKPOINT_WITHIN_S:.0f} s")
            continue
        at = time.time()
        proof = inside(world, found) if of_process else uncommitted(world, found)
        process.kill()
        await until_gone(process.pid, created)
        if proof:
            return at, f"SIGKILL: {role} {process.pid} is gone, with {proof}"
        if time.monotonic() >= deadline:
            raise NotLanded("each time the checkpoint was complete before the signal")
    raise AssertionError


def inside(world: World, found: Path) -> str:
    """What of a checkpoint its trainer had written; '' if that was all of it."""
    names = sorted(path.name for path in found.parent.glob("*"))
    return "" if "trainer.json" in names else f"{', '.join(names)} of {found.parent.name} written"


def uncommitted(world: World, found: Path) -> str:
    """What of a checkpoint was in the store; '' if it was committed."""
    key = found.parent.name.partition("@")[0]
    if (found.parent.parent / f"{key}{MARKER}").exists():
        return ""
    names = sorted(path.name for path in found.parent.glob("*"))
    return f"{len(names)} files of {key} in the store and no marker"
