"""The trainer process: `python -m ratchet.activities.training.process --socket PATH`.

Holds a backend, and with it policy and optimizer between steps, and serves the operations of
`client.TrainerClient` on a Unix socket: ping, load, step, save, shutdown. Operations run one after
another in one dedicated thread (numerical libraries set their thread counts by thread), so that
ping is answered meanwhile. A client that disconnects does not stop an operation.

With `--ranks N`, N of these processes make one trainer (`ranks.py`), and torch's launcher starts
them: `python -m torch.distributed.run --nproc-per-node N -m ratchet.activities.training.process …`.
Rank 0 has the socket and forwards each request to the other ranks, which listen on `PATH.<rank>`.
It replies once all have replied, so a ping is answered only while every rank is alive. An operation
that fails on all ranks leaves the state unchanged. If it fails on one alone, the others would wait
for ever; so rank 0 replies with the error and ends, and the launcher ends the rest.

A file that could not be read or written becomes DiskFailed, whichever library raised the error: the
state is unchanged, or that of a finished step, and the same request succeeds once the disk is
fixed. An operation that deterministic mode refuses becomes ValueError, a user's mistake; one that
runs out of memory becomes OutOfMemory.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ratchet.activities.contracts.backend import TrainerBackend
from ratchet.activities.contracts.redact import log_without_secrets
from ratchet.activities.storage.store import remedy
from ratchet.activities.training import determinism
from ratchet.activities.training.client import (
    LINE_LIMIT,
    DiskFailed,
    OutOfMemory,
    TrainerClient,
    TrainerFailed,
    TrainerGone,
)
from ratchet.activities.training.trainer import Trainer

log = logging.getLogger(__name__)

BACKENDS: dict[str, Callable[[], TrainerBackend]] = {"torch": Trainer}
"""Backends by their name in `trainer.backend` of a config."""

FAIL_TOGETHER_S = 10.0
"""How long after its failure on one rank an operation may fail on the others for the same reason.
"""

_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def disk_failure(error: Exception) -> OSError | None:
    """The operating system's error about a file, if `error` is one.

    Libraries written in Rust raise their own types, whose text ends in '(os error 28)'. An OSError
    without a number comes from a library, such as 'no such model'.
    """
    if isinstance(error, OSError):
        return error if error.errno is not None else None
    reported = _OS_ERROR.search(str(error))
    return OSError(int(reported[1]), os.strerror(int(reported[1]))) if reported else None


def memory_failure(error: BaseException) -> bool:
    """Whether Python or torch ran out of memory; torch's error on a CPU has no type."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return bool(kinds & {"MemoryError", "OutOfMemoryError"}) or "can't allocate memory" in str(
        error
    )


def rank_socket(socket: Path, rank: int) -> Path:
    """The socket on which a rank listens, if rank 0 listens on `socket`."""
    return socket if rank == 0 else socket.with_name(f"{socket.name}.{rank}")


class TrainerServer:
    """Serves one backend until a `shutdown` request, and forwards every request to `others`.

    `lost` is set once an operation has failed on some ranks but not on all.
    """

    def __init__(
        self,
        trainer: TrainerBackend,
        *,
        deterministic: bool = False,
        others: Sequence[TrainerClient] = (),
    ) -> None:
        self.trainer = trainer
        self.lost = False
        self._others = others
        self._deterministic = deterministic
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._stop = asyncio.Event()

    async def serve(self, socket: Path) -> None:
        """Listens on `socket`, which must not exist yet, until shutdown."""
        server = await asyncio.start_unix_server(self._connected, str(socket), limit=LINE_LIMIT)
        loop = asyncio.get_running_loop()
        warm = loop.run_in_executor(self._thread, self.trainer.prepare, self._deterministic)
        try:
            async with server:
                await self._stop.wait()
                await warm
        finally:
            socket.unlink(missing_ok=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                reply = await self._answer(json.loads(line))
                writer.write(json.dumps(reply).encode() + b"\n")
                await writer.drain()
                if self.lost:
                    self._stop.set()
        writer.close()

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            result = await self._run(request["op"], request["args"])
        except Exception as error:
            # The client decides what to do about any error; the process goes on.
            log.exception("%s failed", request["op"])
            kind = error.kind if isinstance(error, TrainerFailed) else type(error).__name__
            problem = {"type": kind, "message": str(error)}
            return {"id": request["id"], "ok": False, "error": problem}
        return {"id": request["id"], "ok": True, "result": result}

    async def _run(self, op: str, args: dict[str, Any]) -> Any:
        if op == "ping":
            await asyncio.gather(*(other.ping() for other in self._others))
            return {"step": self.trainer.step}
        if op == "shutdown":
            await asyncio.gather(*(other.shutdown() for other in self._others))
            self._stop.set()
            return {}
        work = [self._own(op, args), *(other.call(op, args, None) for other in self._others)]
        tasks = [asyncio.ensure_future(part) for part in work]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if any(task.done() and task.exception() for task in tasks):
            await asyncio.wait(tasks, timeout=FAIL_TOGETHER_S)
            raise self._failure([task.exception() if task.done() else None for task in tasks])
        return tasks[0].result()

    def _failure(self, outcomes: list[BaseException | None]) -> BaseException:
        """The error to reply with if an operation failed on some ranks or on all: that a rank has
        ended, or else the error of the first rank that failed.
        """
        failures = [outcome for outcome in outcomes if outcome is not None]
        gone = [failure for failure in failures if isinstance(failure, TrainerGone)]
        self.lost = bool(gone) or len(failures) < len(outcomes)
        return (gone or failures)[0]

    async def _own(self, op: str, args: dict[str, Any]) -> Any:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, self._work, op, args)
        except Exception as error:
            if self._deterministic and (refused := determinism.refusal(error)) is not None:
                raise ValueError(refused) from error
            if memory_failure(error):
                said = (str(error) or type(error).__name__).splitlines()[0][:300]
                raise OutOfMemory(f"{op}: {said}") from error
            if (refusal := disk_failure(error)) is None:
                raise
            place = args.get("out") or args.get("folder")
            raise DiskFailed(
                f"trainer process: {op} cannot use its disk at {place}: {error}; {remedy(refusal)}"
            ) from error

    def _work(self, op: str, args: dict[str, Any]) -> Any:
        if op == "load":
            folder = Path(args["folder"])
            more = {"base": Path(base)} if (base := args.get("base")) else {}
            return self.trainer.load(folder, args["config"], checkpoint=args["checkpoint"], **more)
        if op == "step":
            batch = Path(args["batch"]).read_bytes()
            return self.trainer.train(
                args["step"],
                batch,
                Path(args["out"]),
                config=args["config"],
                revision=args["revision"],
                token_logprobs=Path(reported) if (reported := args.get("token_logprobs")) else None,
            )
        if op == "save":
            return self.trainer.save(args["step"], Path(args["out"]))
        raise ValueError(f"unknown operation {op!r}")


def main() -> None:
    """Serves until shutdown or a signal."""
    parser = argparse.ArgumentParser(description="Hold and train one policy.")
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket to listen on")
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="only kernels that always give the same bits; on a GPU they are slower",
    )
    parser.add_argument(
        "--ranks", type=int, default=1, help="processes that make one trainer, this one included"
    )
    parser.add_argument("--backend", choices=BACKENDS, default="torch", help="what trains")
    options = parser.parse_args()
    log_without_secrets(logging.INFO, "%(asctime)s %(levelname)s %(name)s %(message)s")
    rank = int(os.environ["RANK"]) if options.ranks > 1 else 0
    places = [rank_socket(options.socket, other) for other in range(options.ranks)]
    server = TrainerServer(
        BACKENDS[options.backend](),
        deterministic=options.deterministic,
        others=[TrainerClient(f"unix://{place}") for place in places[1:]] if rank == 0 else (),
    )
    asyncio.run(server.serve(places[rank]))
    if server.lost:
        # A normal exit would wait for the thread, which waits for another rank.
        os._exit(1)


if __name__ == "__main__":
    main()
