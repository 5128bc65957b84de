"""Task data of a run's environments, by index.

The environment's code runs in a separate process (`ratchet.activities.envs.dump`), which writes the
tasks to scratch files; a worker only ever reads plain JSON. Loaded once per worker and run, in one
process for all envs of an import path.
"""

import asyncio
import json
import mmap
import os
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ratchet.activities.contracts import names
from ratchet.activities.contracts.checks import load_limits
from ratchet.activities.contracts.rollouts import Kind
from ratchet.activities.envs import dump, loading
from ratchet.activities.runtime.children import as_parent, child_env, module_command
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.runtime.failing import final
from ratchet.activities.storage.store import StoreUnavailable
from ratchet.configs.env import EnvConfig
from ratchet.configs.run import RunConfig

HEADROOM = 256
"""An endless or huge taskset is read this far at first, and then twice as far as requested."""
WHOLE = 20_000
"""A taskset is read whole up to here."""


class _Key(NamedTuple):
    """One env of a run."""

    run_id: str
    kind: Kind
    name: str


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

    def reaches(self, index: int) -> bool:
        """Whether reading more of the taskset would not show another task `index`."""
        return index < len(self) or self.complete


class TaskLibrary:
    """Hands out task data; one for each worker process."""

    def __init__(self, ctx: WorkerContext) -> None:
        self.ctx = ctx
        self._loaded: dict[_Key, _Loaded] = {}
        self._locks: dict[tuple[str, str | None], asyncio.Lock] = {}

    async def task(self, run_id: str, kind: Kind, name: str, index: int) -> dict[str, Any]:
        """Data of task `index`, as an env server takes it.

        Raises ApplicationError (BAD_INPUT) if the taskset does not load or has no such task, and
        StoreUnavailable if what it is read from cannot be reached, such as a disk or a hub.
        """
        result = await self._reach(_Key(run_id, kind, name), index)
        if index >= len(result):
            raise final(
                names.BAD_INPUT,
                f"{kind} env {name!r} has {len(result)} examples, and example {index} was "
                "requested; its data must not change while a run uses it",
            )
        data: dict[str, Any] = json.loads(result.line(index))
        return data

    async def load(self, run_id: str) -> None:
        """Loads the tasks of all envs of a run. Raises as `task` does."""
        for key in _keys(run_id, self.ctx.config(run_id)):
            await self._reach(key, 0)

    async def _reach(self, key: _Key, index: int) -> _Loaded:
        """The tasks of an env, as far as task `index` at least if there is one."""
        result = self._loaded.get(key)
        if result is None or not result.reaches(index):
            config = self.ctx.config(key.run_id)
            path = config.env(key.name, key.kind).path
            async with self._locks.setdefault((key.run_id, path), asyncio.Lock()):
                result = self._loaded.get(key)
                if result is None or not result.reaches(index):
                    await self._load(config, key, WHOLE if index < WHOLE else 2 * index + HEADROOM)
                    result = self._loaded[key]
        return result

    async def _load(self, config: RunConfig, key: _Key, count: int) -> None:
        """Reads the first `count` tasks of an env, and with them those of its neighbours that were
        not read yet: what takes time is to import the environment.
        """
        env = config.env(key.name, key.kind)
        scratch = self.ctx.scratch(f"tasks-{key.run_id}")
        counts = {key: count, **dict.fromkeys(self._neighbours(config, key), WHOLE)}
        outs = {it: f"{scratch}/{it.kind}-{it.name}-{os.getpid()}.jsonl" for it in counts}
        requests = [
            _request(it.kind, config.env(it.name, it.kind), counts[it], outs[it]) for it in counts
        ]
        process = await asyncio.create_subprocess_exec(
            *module_command("ratchet.activities.envs.dump"),
            cwd=scratch,
            env=child_env(loading.process_env(env.path, scratch), as_parent()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        limit_s = load_limits(config)[env.path]
        try:
            async with asyncio.timeout(limit_s):
                _, err = await process.communicate(json.dumps(requests).encode())
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
        if process.returncode:
            raise RuntimeError(f"reading {env.id!r} ended with {process.returncode}: {err!r}")
        refusals = await asyncio.to_thread(_refusals, outs)
        for it, out in outs.items():
            if it not in refusals:
                self._loaded[it] = await asyncio.to_thread(_read, Path(out), counts[it])
        # A neighbour's refusal is heard by whoever asks for it.
        if (refused := refusals.get(key)) is not None:
            if refused.unreachable:
                raise StoreUnavailable(refused.reason)
            raise final(names.BAD_INPUT, refused.reason)

    def _neighbours(self, config: RunConfig, key: _Key) -> list[_Key]:
        """Envs of the run with the same import path that were not read yet."""
        path = config.env(key.name, key.kind).path
        found = [
            it for it in _keys(key.run_id, config) if config.env(it.name, it.kind).path == path
        ]
        return [it for it in found if it != key and it not in self._loaded]


def _keys(run_id: str, config: RunConfig) -> list[_Key]:
    """All envs of a run, those that train first."""
    train = [_Key(run_id, "train", env.name) for env in config.train.env]
    return train + [_Key(run_id, "eval", env.name) for env in config.eval.env]


def _request(kind: Kind, env: EnvConfig, count: int, out: str) -> dict[str, Any]:
    return {"id": env.id, "args": env.args, "kind": kind, "count": count, "out": out}


def _refusals(outs: dict[_Key, str]) -> dict[_Key, dump.Refusal]:
    """What was refused; its files are gone."""
    found = {}
    for key, out in outs.items():
        path = Path(dump.refusal_of(out))
        if path.exists():
            found[key] = dump.Refusal(**json.loads(path.read_text(encoding="utf-8")))
            path.unlink()
    return found


def _read(path: Path, count: int) -> _Loaded:
    starts = array("Q", [0])
    with path.open("rb") as file:
        path.unlink()
        for line in file:
            starts.append(starts[-1] + len(line))
        # An empty file cannot be mapped.
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if starts[-1] else b""
    return _Loaded(data, starts, complete=len(starts) - 1 < count)
