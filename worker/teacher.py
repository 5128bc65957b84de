"""`python -m ratchet.worker.teacher [--port N]`: a frozen model that does what the policy should.

It is the same model as the policy, warm-started on reverse-text without the phase that flattens
it. A plain vLLM serves it, as anyone would start it by hand: no control endpoints, no
token-in-token-out. It stays in the foreground until Ctrl-C. Example configs name it at its default
address, and the demo starts it if nothing answers there.

Invariants: the weights are created once per recipe, below RATCHET_HOME, and appear there complete
or not at all. The server ends with the process that started it. Its state is separate from the
stack's, so that `make down` leaves it alone.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from ratchet.activities.hosting.process import ServerProcess
from ratchet.activities.hosting.spec import ServerSpec, free_port
from ratchet.activities.inference.devices import engine_threads, on_cpu
from ratchet.activities.inference.engine import HEALTH, engine_env, engine_healthy
from ratchet.activities.runtime import machine
from ratchet.activities.runtime.children import module_command
from ratchet.activities.training.policy import Recipe, digest
from ratchet.configs.home import home_folder, private_folder
from ratchet.configs.model import DEFAULT_POLICY
from ratchet.worker.stack import StackError, answers

NAME = "teacher"
PORT = 8070
ENV = "reverse-text"
SEED = 0
RECIPE = replace(Recipe(), noisy_steps=0)
CONTEXT = 512
"""Longest sequence that it scores or samples, in tokens."""
POLL_S = 0.25
LOG_TAIL = 2000

Say = Callable[[str], object]


def base_url(port: int = PORT) -> str:
    """The teacher's address on this machine."""
    return f"http://127.0.0.1:{port}/v1"


def weights(home: Path, say: Say) -> Path:
    """The folder of the teacher's weights below `home`; creates them if they are missing.

    Calls `say` with progress. Raises StackError if it fails.
    """
    key = digest(RECIPE, ENV, SEED)
    folder = home / "teacher" / f"weights-{key[:16]}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="making-") as scratch:
        order, out = Path(scratch, "order.json"), Path(scratch, "weights")
        policy = {"name": DEFAULT_POLICY, "env": ENV, "seed": SEED}
        order.write_text(json.dumps(policy | {"recipe": asdict(RECIPE)}))
        _prepare(order, out, Path(scratch, "errors.log"), say)
        try:
            out.rename(folder)
        except OSError:
            # Another process may have been first, with the same content.
            if not folder.is_dir():
                raise
    return folder


def _prepare(order: Path, out: Path, errors: Path, say: Say) -> None:
    command = module_command("ratchet.activities.training.prepare")
    with errors.open("wb") as log:
        process = subprocess.Popen(
            [*command, "--order", str(order), "--out", str(out)],
            cwd=order.parent,
            env={**os.environ, "TQDM_DISABLE": "1"},
            stdout=subprocess.PIPE,
            stderr=log,
        )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            # Libraries print too.
            message = json.loads(line) if line.startswith(b'{"') else {}
            if "progress" in message:
                say(f"teacher: {message['progress']}")
        code = process.wait()
    finally:
        process.kill()
        process.wait()
    if code:
        tail = errors.read_text(errors="replace")[-LOG_TAIL:]
        raise StackError(f"creating the teacher's weights ended with code {code}:\n{tail}")


def server_argv(folder: Path, name: str, port: int, *, context: int, cpu: bool) -> list[str]:
    """The server's command line; `context` is in tokens."""
    small = ("--enforce-eager", "--kv-cache-memory-bytes", str(2**28))
    return [
        *module_command("vllm.entrypoints.openai.api_server"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--model", str(folder), "--served-model-name", name),
        *("--dtype", "float32", "--max-model-len", str(context)),
        *("--generation-config", "vllm", "--disable-uvicorn-access-log"),
        *(small if cpu else ("--gpu-memory-utilization", "0.1")),
    ]


def server_env(key: str, *, cpu: bool) -> dict[str, str]:
    """Additions to the server's environment: an engine's, without control endpoints.

    On a CPU it is not bound to cores and gets an even share, next to an engine and a trainer.
    """
    env = engine_env(cpu=cpu)
    del env["VLLM_SERVER_DEV_MODE"]
    if cpu:
        env["OMP_NUM_THREADS"] = str(engine_threads(machine.cores(), 2))
    return env | ({"VLLM_API_KEY": key} if key else {})


def server_of(
    folder: Path, name: str, home: Path, *, port: int = 0, context: int = CONTEXT, key: str = ""
) -> ServerProcess:
    """A server, not started yet, of the weights in `folder` under `name`.

    Port 0 means any free one. It requires `key` if there is one. State and logs are in `home`.
    """
    cpu = on_cpu()
    port = port or free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    private_folder(home)
    spec = ServerSpec(
        name=f"frozen {name}",
        argv=server_argv(folder, name, port, context=context, cpu=cpu),
        address=url,
        cwd=home,
        probe=lambda: engine_healthy(url, HEALTH),
        env=server_env(key, cpu=cpu),
        model=name,
    )
    return ServerProcess(spec, home=home, run="frozen", host=name, epoch=1)


async def start(server: ServerProcess) -> None:
    """Starts a server; returns when it is healthy. Raises StackError if it never is."""
    await server.start()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(server.spec.start_timeout_s):
            while not server.exited.is_set() and not await server.spec.probe():
                await asyncio.sleep(POLL_S)
    # If the server ended, whatever answers in its place belongs to someone else.
    if server.exited.is_set() or not await server.spec.probe():
        what = "ended" if server.exited.is_set() else "is not healthy"
        tail = server.log_tail(LOG_TAIL)
        raise StackError(f"{server.spec.name} {what}; the end of {server.log}:\n{tail}")


@contextmanager
def running(home: Path, say: Say, port: int = PORT) -> Iterator[ServerProcess]:
    """Serves the teacher for the duration of the block, from an event loop in a thread.

    Raises StackError if the port is taken or the teacher does not start.
    """
    if answers(port):
        raise StackError(
            f"port {port} is taken: something answers at 127.0.0.1:{port}; if that is a teacher, "
            "use it as it is, otherwise stop it or choose another port (PORT=8071)"
        )
    folder = weights(home, say)
    say(f"teacher: starting vLLM at {base_url(port)}")
    server = server_of(folder, NAME, home / "teacher", port=port)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="teacher", daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(start(server), loop).result()
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ratchet.worker.teacher", description=__doc__)
    parser.add_argument("--port", type=int, default=PORT, help=f"by default {PORT}")
    port = parser.parse_args(arguments).port
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    try:
        with running(home_folder(), lambda text: print(text, file=sys.stderr), port) as server:
            print(f"base_url {base_url(port)}\nname     {NAME}", flush=True)
            print("Ctrl-C stops it", file=sys.stderr)
            while not server.exited.is_set() and not stop.wait(POLL_S):
                pass
            if not stop.is_set():
                raise StackError(f"vLLM ended unexpectedly:\n{server.log_tail(LOG_TAIL)}")
    except StackError as error:
        print(f"teacher: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("teacher: stopped", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
