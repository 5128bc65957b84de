"""`python -m ratchet.api`: serves the API until SIGINT or SIGTERM.

The socket is bound before anything else, so that a port in use is one clear line and not a
traceback. Temporal is named by the standard TEMPORAL_* settings, the rest by RATCHET_*.
"""

import argparse
import asyncio
import contextlib
import errno
import gc
import json
import logging
import os
import signal
import socket
import sys
from dataclasses import replace

import uvicorn

from ratchet.activities.contracts.names import LOOPBACK
from ratchet.activities.contracts.redact import log_without_secrets, writable
from ratchet.activities.storage.store import ArtifactStore, StoreUnavailable, UnusableStore
from ratchet.api.app import create_app
from ratchet.api.http.connections import BoundedProtocol, allow_open_files
from ratchet.api.http.security import is_loopback
from ratchet.api.schemas.problems import ApiProblem
from ratchet.api.services.run_list import RunList
from ratchet.api.settings import Settings
from ratchet.api.store.run_index import RunIndex
from ratchet.api.temporal.client import Temporal
from ratchet.configs.home import home_folder, private_folder


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line; exits with status 2 and a usage line for one that is not valid."""
    parser = argparse.ArgumentParser(
        prog="python -m ratchet.api", description="Serves Ratchet's REST API."
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (%(default)s)")
    parser.add_argument("--port", type=int, default=8080, help="port; 0: a free one (%(default)s)")
    parser.add_argument(
        "--log-level",
        default="warning",
        choices=["critical", "error", "warning", "info", "debug"],
        help="what uvicorn logs (%(default)s)",
    )
    parser.add_argument(
        "--rebuild-index",
        action="store_true",
        help="add every run that Temporal retains to the list of runs, and exit; for a store "
        "whose folder index/ was lost",
    )
    parser.add_argument(
        "--openapi", action="store_true", help="print the OpenAPI document as JSON, and exit"
    )
    return parser.parse_args(argv)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; raises ValueError that says what is wrong and how to fix it."""
    if not 0 <= port <= 65535:
        raise ValueError(f"port {port} does not exist; choose one from 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror:
        raise ValueError(f"host {host!r} is unknown; bind with --host 127.0.0.1") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        remedy = {
            errno.EADDRINUSE: "the port is in use; stop what uses it, or choose another with "
            "--port (0: a free one)",
            errno.EACCES: "this user may not bind it; choose a port above 1023 with --port",
            errno.EADDRNOTAVAIL: "this machine has no such address; bind with --host 127.0.0.1",
        }.get(error.errno or 0, str(error.strerror))
        raise ValueError(f"cannot listen on {host}:{port}: {remedy}") from None
    return listener


def settings_for(host: str) -> Settings:
    """Settings of the environment for an API bound to `host`.

    Without keys the address must be reachable from this machine only, and the API accepts only this
    machine's names, so that no web page can direct a browser here under a name of its own.
    Raises ValueError.
    """
    settings = Settings.from_env()
    if settings.guarded:
        return settings
    if not is_loopback(host):
        raise ValueError(
            f"refusing to listen on {host} without API keys, since everyone who reaches it could "
            "start and stop runs; create a key with `ratchet keys new NAME`, set "
            "RATCHET_API_KEYS, or bind with --host 127.0.0.1"
        )
    return replace(settings, hosts=(*LOOPBACK, host))


def rebuild_index(settings: Settings) -> int:
    """Rebuilds the index of runs; returns the exit status."""
    temporal = Temporal(None, timeout_s=settings.rpc_timeout_s)
    runs = RunList(temporal, RunIndex(ArtifactStore(settings.store_url, settings.known_stores)), "")
    try:
        count = asyncio.run(runs.catch_up(rebuild=True))
    except ApiProblem as problem:
        print(f"ratchet api: {problem.document.detail}", file=sys.stderr)
        return 1
    found = f"{count} executions of runs in the Temporal at {temporal.address}"
    print(f"ratchet api: checked {found}; all of them are in the list")
    return 0


def refuse_unusable(store: ArtifactStore) -> None:
    """Raises UnusableStore for a remote store that can never work. One that is away may return."""
    try:
        if not store.local:
            store.require_usable()
    except UnusableStore:
        raise
    except StoreUnavailable as error:
        said = writable(str(error))
        print(f"ratchet api: {said}; starting without it", file=sys.stderr)


def log_audit() -> None:
    """Sends the audit log to standard output, independent of other logs: one JSON object a line."""
    log, handler = logging.getLogger("ratchet.audit"), logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


def collect_garbage_rarely() -> None:
    """Leaves what exists by now to itself, and looks less often for cycles among the rest.

    By default Python walks all of the API's 110,000 objects once in some 30 pages of the list of
    runs, and meanwhile no request goes on, for 50 to 150 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0 after a graceful shutdown, 1 if the API could not start."""
    arguments = parse_arguments(argv)
    try:
        if arguments.openapi:
            print(json.dumps(create_app(Settings.from_env()).openapi(), indent=1))
            return 0
        if not os.environ.get("RATCHET_STORE"):
            private_folder(home_folder())
        if arguments.rebuild_index:
            return rebuild_index(Settings.from_env())
        settings = settings_for(arguments.host)
        listener = bind(arguments.host, arguments.port)
        app = create_app(settings)
        refuse_unusable(app.state.services.records.store)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        print(f"ratchet api: {writable(first)}", file=sys.stderr)
        return 1
    port = listener.getsockname()[1]
    print(f"ratchet api: listening on http://{arguments.host}:{port}", flush=True)
    log_without_secrets(logging.WARNING, "%(asctime)s %(levelname)s %(name)s %(message)s")
    log_audit()
    allow_open_files()
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        # Its own set-up of logs would write tracebacks as they are.
        log_config=None,
        ws="none",
        log_level=arguments.log_level,
        timeout_graceful_shutdown=2,
        server_header=False,
    )
    collect_garbage_rarely()
    # uvicorn shuts down gracefully and then raises the signal that ended it once more.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Temporal's runtime threads can crash the interpreter's finalization (sdk-python issue 300).
    os._exit(status)
