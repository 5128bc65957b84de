"""An env server: `python -m ratchet.activities.envs.server --address tcp://… --config FILE`.

Serves one environment to any number of rollouts, in one process. Tasks come with each request,
so the same server serves training and evaluation. Ends with code 2 and one line of explanation
if the environment does not load. The caller arranges the import path (`loading.process_env`).

Where the config names a file for its `lag`, the server writes there, every LAG_EVERY_S, how late
its event loop woke since: {"time", "event_loop_lag"}. Rollouts share that loop, and environment
code that computes holds it up for all of them.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import signal
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.activities.contracts.redact import RedactingFormatter, writable
from ratchet.activities.envs import loading
from ratchet.activities.runtime.lag import LoopLag
from ratchet.activities.storage import files

if TYPE_CHECKING:
    from ratchet.activities.envs.playing import RolloutServer

LAG_AT_FIRST_S = 1.0
"""A run that is over soon has a sample, too."""
LAG_EVERY_S = 10.0


class _Masked(RedactingFormatter):
    """Lines `<time> <LEVEL> <logger>: <message>`, the time in UTC, without any of `secrets` and
    what else looks like one.
    """

    def __init__(self, secrets: Sequence[str]) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._secrets = secrets

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        return moment.replace("+00:00", "Z")

    def format(self, record: logging.LogRecord) -> str:
        # First what is known: a pattern may hide a part of it, and the rest would not be found.
        return writable(loading.without(self._secrets, logging.Formatter.format(self, record)))


def set_up_logs(own: Sequence[str], level: str, secrets: Sequence[str] = ()) -> None:
    """Writes messages of loggers `own` from `level` on, and warnings of all others."""
    threshold = logging.getLevelNamesMapping()[level.upper()]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Masked(secrets))
    logging.basicConfig(level=max(threshold, logging.WARNING), handlers=[handler], force=True)
    for name in own:
        logging.getLogger(name).setLevel(threshold)


def write_lag(file: Path, lag: dict[str, float] | None) -> None:
    """Replaces what `file` says, so that a reader sees the one or the other. Blocks."""
    # A disk that is full ends no rollout for the sake of a gauge.
    with contextlib.suppress(OSError):
        written = json.dumps({"time": time.time(), "event_loop_lag": lag})
        files.replace(file, [written.encode()], sync=False)


async def _measure(file: Path) -> None:
    lag, rest = LoopLag(), LAG_AT_FIRST_S
    lag.start()
    while True:
        await asyncio.sleep(rest)
        await asyncio.to_thread(write_lag, file, lag.take())
        rest = LAG_EVERY_S


async def _serve(server: "RolloutServer", lag: str | None) -> None:
    measuring = asyncio.create_task(_measure(Path(lag))) if lag else None
    await server.run()
    if measuring is not None:
        measuring.cancel()


def _end_in_order(*_: Any) -> None:
    """Has the event loop close what the environment opened; once, however often it is asked."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> None:
    """Serves until terminated."""
    parser = argparse.ArgumentParser(description="Serve one environment over ZMQ.")
    parser.add_argument("--address", required=True, help="tcp://host:port to listen on")
    parser.add_argument(
        "--config",
        required=True,
        type=Path,
        help='{"id", "args", "timeout_s", "path", "log_level", "lag"} as JSON',
    )
    options = parser.parse_args()
    input = json.loads(options.config.read_text())
    secrets: list[str] = []
    own = loading.own_modules(input["id"], input.get("path"))
    level = input.get("log_level", "info")
    set_up_logs(own, level)
    from ratchet.activities.envs.playing import RolloutServer

    try:
        args = loading.with_variables(input["args"], secrets)
        set_up_logs(own, level, secrets)
        config = loading.server_config(input["id"], args, input["timeout_s"])
        server = RolloutServer(config, address=options.address)
    except Exception as error:
        # The environment is the user's code: its errors are for the user to read.
        logging.getLogger(__name__).debug("environment does not load", exc_info=True)
        reason = writable(loading.without(secrets, f"{type(error).__name__}: {error}"))
        print(f"env server: {input['id']!r} does not load: {reason}", file=sys.stderr)
        sys.exit(2)
    signal.signal(signal.SIGTERM, _end_in_order)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(server, input.get("lag")))


if __name__ == "__main__":
    main()
