"""Task data of a run's environments, by index.

The environment's code runs in a separate process (`ratchet.activities.envs.dump`), which writes the
tasks to a scratch file; a worker only ever reads plain JSON. Loaded once per worker and
(run, kind, env).
"""

import asyncio
import json
import mmap
import os
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.activities.contracts import names
from ratchet.activities.contracts.checks import load_limits
from ratchet.activities.contracts.rollouts import Kind
from ratchet.activities.envs import dump, loading
from ratchet.activities.runtime.children import as_parent, child_env, module_command
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.runtime.failing import final
from ratchet.activities.storage.store import StoreUnavailable
from ratchet.configs.env import EnvConfig

HEADROOM = 256
"""An endless or huge taskset is read this far at first, and then twice as far as requested."""
WHOLE = 20_000
"""A taskset is read whole up to here."""


@dataclass
class _Loaded:
    """JSON lines of the first tasks, each from its place in `starts` to the next; `complete` if the
    taskset has no more. They are in an unnamed file, so the kernel may drop its pages from memory.
    """

    data: mmap.mmap | bytes
    starts: "array[int]"
    complete: bool

    def __len__(self) -> int:
        return len(self.starts) - 1

    def line(self, index: int) -> bytes:
        """The task of an index."""
        return self.data[self.starts[index] : self.starts[index + 1]]


class TaskLibrary:
    """Hands out task data; one for each worker process."""

    def __init__(self, ctx: WorkerContext) -> None:
        self.ctx = ctx
        self._loaded: dict[tuple[str, Kind, str], _Loaded] = {}
        self._locks: dict[tuple[str, Kind, str], asyncio.Lock] = {}

    async def task(self, run_id: str, kind: Kind, name: str, index: int) -> dict[str, Any]:
        """Data of task `index`, as an env server takes it.

        Raises ApplicationError (BAD_INPUT) if the taskset does not load or has no such task, and
        StoreUnavailable if what it is read from cannot be reached, such as a disk or a hub.
        """
        key = (run_id, kind, name)
        async with self._locks.setdefault(key, asyncio.Lock()):
            result = self._loaded.get(key)
            if result is None or (index >= len(result) and not result.complete):
                env = self.ctx.config(run_id).env(name, kind)
                count = WHOLE if index < WHOLE else 2 * index + HEADROOM
                result = self._loaded[key] = await self._load(run_id, kind, env, count)
        if index >= len(result):
            raise final(
                names.BAD_INPUT,
                f"{kind} env {name!r} has {len(result)} examples, and example {index} was "
                "requested; its data must not change while a run uses it",
            )
        data: dict[str, Any] = json.loads(result.line(index))
        return data

    async def _load(self, run_id: str, kind: Kind, env: EnvConfig, count: int) -> _Loaded:
        scratch = self.ctx.scratch(f"tasks-{run_id}")
        out = scratch / f"{kind}-{env.name}-{count}-{os.getpid()}.jsonl"
        request = {
            "id": env.id,
            "args": env.args,
            "kind": kind,
            "count": count,
            "out": str(out),
        }
        process = await asyncio.create_subprocess_exec(
            *module_command("ratchet.activities.envs.dump"),
            cwd=scratch,
            env=child_env(loading.process_env(env.path, scratch), as_parent()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        limit_s = load_limits(self.ctx.config(run_id))[env.path]
        try:
            async with asyncio.timeout(limit_s):
                _, err = await process.communicate(json.dumps(request).encode())
        except TimeoutError:
            # The preflight, which waits as long, has loaded it.
            raise StoreUnavailable(
                f"taskset {env.id!r} is not loaded after {limit_s:.0f} s; check the "
                "connection or the disk that it is read from, or start a run with a longer "
                "start_timeout_s of the env"
            ) from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode in (dump.BROKEN, dump.UNREACHABLE):
            reason = err.decode().strip().splitlines()[-1]
            broken = process.returncode == dump.BROKEN
            raise final(names.BAD_INPUT, reason) if broken else StoreUnavailable(reason)
        if process.returncode:
            raise RuntimeError(f"reading {env.id!r} ended with {process.returncode}: {err!r}")
        return await asyncio.to_thread(_read, out, count)


def _read(path: Path, count: int) -> _Loaded:
    starts = array("Q", [0])
    with path.open("rb") as file:
        path.unlink()
        for line in file:
            starts.append(starts[-1] + len(line))
        # An empty file cannot be mapped.
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if starts[-1] else b""
    return _Loaded(data, starts, complete=len(starts) - 1 < count)
