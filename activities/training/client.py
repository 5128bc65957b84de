"""Client of a trainer process over its Unix socket, for an event loop, with bounded waits.

A request is one JSON line `{id, op, args}`, a reply one `{id, ok, result | error {type, message}}`;
each request has its own connection. Does not import torch.
"""

import asyncio
import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ratchet.configs.versions import NewerSchema

LINE_LIMIT = 4 * 2**20
"""Longest line of the protocol, in bytes."""
PING_TIMEOUT_S = 5.0


class TrainerGone(Exception):
    """The process, or one of its ranks, no longer answers: its socket refuses connections, or
    closed during a request.
    """


class TrainerFailed(Exception):
    """The process refused a request or failed; `kind` is the type of the error."""

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        super().__init__(message)


class StateMismatch(Exception):
    """The trainer's state is not the one that the request builds on."""


class NonFinite(Exception):
    """Loss or gradient is not finite; the state is as before the step."""


class DiskFailed(Exception):
    """The process could not read or write a file; the same request succeeds once that is fixed."""


class OutOfMemory(Exception):
    """The process or its GPU ran out of memory during a request."""


_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (TrainerGone, StateMismatch, NonFinite, DiskFailed, OutOfMemory, NewerSchema)
}


@dataclass(frozen=True)
class Loaded:
    """The step of a trainer after a load, and what else determines its last bits.

    `device` is 'cpu' or 'cuda'; `deterministic` is the mode of the process, which matters to 'cuda'
    only; `warnings` name what differs from the trainer that wrote the checkpoint.
    """

    step: int
    torch_threads: int
    torch_version: str
    device: str
    deterministic: bool
    warnings: list[str] = field(default_factory=list)


class TrainerClient:
    """A trainer process at `address` ('unix:///path/to/socket')."""

    def __init__(self, address: str) -> None:
        self.path = Path(address.removeprefix("unix://"))
        self._ids = itertools.count(1)

    async def ping(self, timeout_s: float = PING_TIMEOUT_S) -> int | None:
        """The trainer's current step, None if nothing is loaded; answers during a step, too."""
        step: int | None = (await self.call("ping", {}, timeout_s))["step"]
        return step

    async def load(
        self,
        folder: Path,
        config: dict[str, Any],
        *,
        checkpoint: bool,
        base: Path | None = None,
        timeout_s: float = 600.0,
    ) -> Loaded:
        """Loads a checkpoint folder, or weights at step 0. The checkpoint of an adapter needs
        `base`, the folder of version 0.
        """
        args: dict[str, Any] = {"folder": str(folder), "config": config, "checkpoint": checkpoint}
        if base is not None:
            args["base"] = str(base)
        return Loaded(**await self.call("load", args, timeout_s))

    async def step(
        self,
        step: int,
        batch: Path,
        out: Path,
        *,
        config: dict[str, Any] | None = None,
        revision: int = 0,
        token_logprobs: Path | None = None,
        timeout_s: float = 3600.0,
    ) -> dict[str, float]:
        """Trains the batch file and exports the weights to `out`; returns the step's metrics.

        `config` is revision `revision` of the run's config; None: the one of the last load or step.
        The process writes the scores of the batch's tokens to the file `token_logprobs`, unless it
        has loaded a checkpoint of this very step, which does not hold them.
        """
        files = {"batch": str(batch), "out": str(out)}
        if token_logprobs is not None:
            files["token_logprobs"] = str(token_logprobs)
        args = {"step": step, **files, "config": config, "revision": revision}
        metrics: dict[str, float] = await self.call("step", args, timeout_s)
        return metrics

    async def save(self, step: int, out: Path, *, timeout_s: float = 1800.0) -> None:
        """Writes the checkpoint of `step` to `out`."""
        await self.call("save", {"step": step, "out": str(out)}, timeout_s)

    async def shutdown(self, timeout_s: float = PING_TIMEOUT_S) -> None:
        """Asks the process to end."""
        await self.call("shutdown", {}, timeout_s)

    async def call(self, op: str, args: dict[str, Any], timeout_s: float | None) -> Any:
        """Sends one request; without `timeout_s` it may take any time. Raises TrainerGone,
        TimeoutError, or the error that the process replied with: StateMismatch, NonFinite,
        DiskFailed, OutOfMemory, NewerSchema; TrainerFailed for any other.

        A request that times out continues in the process; repeating it waits for the first one.
        """
        async with asyncio.timeout(timeout_s):
            try:
                reply = await self._exchange(op, args)
            except (ConnectionError, FileNotFoundError) as error:
                raise TrainerGone(f"trainer process at {self.path}: {error}") from None
        if reply["ok"]:
            return reply["result"]
        kind, message = reply["error"]["type"], reply["error"]["message"]
        raise _KINDS[kind](message) if kind in _KINDS else TrainerFailed(kind, message)

    async def _exchange(self, op: str, args: dict[str, Any]) -> Any:
        reader, writer = await asyncio.open_unix_connection(str(self.path), limit=LINE_LIMIT)
        try:
            request = {"id": next(self._ids), "op": op, "args": args}
            writer.write(json.dumps(request).encode() + b"\n")
            await writer.drain()
            line = await reader.readline()
        finally:
            writer.close()
        if not line.endswith(b"\n"):
            raise ConnectionResetError(f"it closed its socket during {op!r}")
        reply = json.loads(line)
        assert reply["id"] == request["id"], "one connection carries one request"
        return reply
