"""Small servers and witnesses for the hosting tests.

`python servers.py worker HOME` owns servers in another process, as a worker does; with `copied`
added, a fork of it outlives it.
`python servers.py family PORT` is a server with a child, a grandchild in a session of its own and
a daemonized orphan; all ignore SIGTERM but the first.
"""

import asyncio
import http.server
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

ME = str(Path(__file__).resolve())
ROOT = str(Path(__file__).resolve().parents[4])
TAG = "RATCHET_TEST_TAG"


def tagged(tag: str) -> list[psutil.Process]:
    """Live processes, other than this one, whose environment carries the test's tag."""
    found = []
    for process in psutil.process_iter():
        try:
            other = process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
            if other and process.environ().get(TAG) == tag:
                found.append(process)
        except psutil.Error:
            continue
    return found


WITHIN_S = 60.0
"""How long anything may take that must happen: only a machine that stands still takes longer."""


def gone(tag: str) -> bool:
    """Whether every tagged process ends in time."""
    deadline = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline:
        if not tagged(tag):
            return True
        time.sleep(0.05)
    return False


def serve(port: int) -> None:
    """An HTTP server that is healthy."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def idle() -> None:
    """Sleeps and will not be terminated."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(60)


def family(port: int) -> None:
    """A server with relatives that are hard to find."""
    subprocess.Popen([sys.executable, ME, "idle"])
    subprocess.Popen([sys.executable, ME, "idle"], start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            idle()
        os._exit(0)
    os.wait()
    print("the family is complete", flush=True)
    serve(port)


async def worker(home: Path, *, copied: bool) -> None:
    """Owns two servers until it is killed; prints their pids. With `copied` a fork of it, which
    holds all of its pipes, too, goes on.
    """
    from ratchet.activities.hosting.process import ServerProcess
    from ratchet.activities.hosting.spec import ServerSpec

    async def healthy() -> bool:
        return True

    for index in range(2):
        spec = ServerSpec(
            name="family",
            argv=[sys.executable, ME, "family", "0"],
            address="",
            cwd=home,
            probe=healthy,
        )
        process = ServerProcess(
            spec, home=home, run="run-1", host=f"env/{index}", epoch=1, grace_s=0.3
        )
        await process.start()
        print(process.pid, flush=True)
    if copied and os.fork() == 0:
        idle()
    await asyncio.Event().wait()


if __name__ == "__main__":
    sys.path.insert(0, ROOT)
    match sys.argv[1:]:
        case ["serve", port]:
            serve(int(port))
        case ["family", port]:
            family(int(port))
        case ["idle"]:
            idle()
        case ["worker", home, *copied]:
            asyncio.run(worker(Path(home), copied=bool(copied)))
