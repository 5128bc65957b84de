"""The trainer process: `python -m ratchet.activities.training.process --socket PATH`.

Holds a backend, and with it policy and optimizer between steps, and serves the operations of
`client.TrainerClient` on a Unix socket: ping, load, step, save, shutdown. Operations run one after
another in one thread of their own (thread counts of numerical libraries belong to a thread), so
ping answers meanwhile. A client that goes away does not stop an operation.

A file that could not be read or written is answered as DiskFailed, whichever library met it: the
state is as before, or that of a finished step, and the same request works once that is mended.
An operation that deterministic mode refuses becomes a ValueError, a user error; one that finds no
memory becomes OutOfMemory.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ratchet.activities.contracts.backend import TrainerBackend
from ratchet.activities.storage.store import remedy
from ratchet.activities.training import determinism
from ratchet.activities.training.client import LINE_LIMIT, DiskFailed, OutOfMemory
from ratchet.activities.training.trainer import Trainer

log = logging.getLogger(__name__)

BACKENDS: dict[str, Callable[[], TrainerBackend]] = {"torch": Trainer}
"""What trains, by the name that `trainer.backend` of a config has for it."""

_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def disk_failure(error: Exception) -> OSError | None:
    """The operating system's refusal of a file, if `error` is one.

    Libraries written in Rust raise it in types of their own, whose text ends in '(os error 28)'.
    An OSError without a number is a library's own, such as 'no such model'.
    """
    if isinstance(error, OSError):
        return error if error.errno is not None else None
    reported = _OS_ERROR.search(str(error))
    return OSError(int(reported[1]), os.strerror(int(reported[1]))) if reported else None


def memory_failure(error: BaseException) -> bool:
    """Whether no memory was left, for Python, or for torch, whose CPU error has no type."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return bool(kinds & {"MemoryError", "OutOfMemoryError"}) or "can't allocate memory" in str(
        error
    )


class TrainerServer:
    """Serves one backend until `shutdown` is asked for."""

    def __init__(self, trainer: TrainerBackend, *, deterministic: bool = False) -> None:
        self.trainer = trainer
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
        writer.close()

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            result = await self._run(request["op"], request["args"])
        except Exception as error:
            # Whatever went wrong is the client's to judge; the process goes on.
            log.exception("%s failed", request["op"])
            problem = {"type": type(error).__name__, "message": str(error)}
            return {"id": request["id"], "ok": False, "error": problem}
        return {"id": request["id"], "ok": True, "result": result}

    async def _run(self, op: str, args: dict[str, Any]) -> Any:
        if op == "ping":
            return {"step": self.trainer.step}
        if op == "shutdown":
            self._stop.set()
            return {}
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
    parser.add_argument("--backend", choices=BACKENDS, default="torch", help="what trains")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    server = TrainerServer(BACKENDS[options.backend](), deterministic=options.deterministic)
    asyncio.run(server.serve(options.socket))


if __name__ == "__main__":
    main()
