"""`python -m ratchet.worker.mirrors`: a process per target, and one that restarts them.

A target's process ends itself if nothing makes progress for too long, since hanging third-party
code can only be killed, and if its parent is gone. Both are safe at any moment.
"""

import argparse
import hashlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from ratchet.activities.contracts.redact import log_without_secrets
from ratchet.api.client import Ratchet
from ratchet.configs.home import home_folder
from ratchet.worker.mirrors.forward import SAMPLES, Forwarder
from ratchet.worker.mirrors.state import States
from ratchet.worker.mirrors.targets import KINDS, target_of

STUCK_S = 600.0
"""A target that takes this long for a batch hangs."""
AGAIN_S, MOST_AGAIN_S = 1.0, 60.0


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a count; use a whole number from 0 on")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m ratchet.worker.mirrors", description=__doc__)
    made.add_argument(
        "--to",
        action="append",
        required=True,
        metavar="TARGET",
        help=f"{KINDS}; may be repeated",
    )
    made.add_argument("--run", nargs="+", default=["all"], metavar="ID", help="default: all runs")
    made.add_argument("--api", help="the API's address; default: RATCHET_API, else the stack's")
    made.add_argument("--every", type=float, help="seconds between queries; default: by target")
    made.add_argument(
        "--samples",
        type=_count,
        default=SAMPLES,
        help="replies in the table of each eval; 0: no table; default: %(default)s",
    )
    made.add_argument("--state", type=Path, help="folder that records what was sent to whom")
    made.add_argument("--child-of", type=int, help=argparse.SUPPRESS)
    return made


def state_folder(root: Path, spec: str, address: str) -> Path:
    """Folder that records what a target was sent from an API."""
    digest = hashlib.sha256(f"{spec} {address}".encode()).hexdigest()[:8]
    return root / f"{re.sub(r'[^A-Za-z0-9]+', '-', spec)[-40:]}-{digest}"


class Watchdog:
    """Ends this process after `STUCK_S` seconds without progress, or once its parent is gone."""

    def __init__(self, starter: int) -> None:
        self._starter = starter
        self._last = time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()

    def alive(self) -> None:
        """Records progress."""
        self._last = time.monotonic()

    def _watch(self) -> None:
        while os.getppid() == self._starter and time.monotonic() - self._last < STUCK_S:
            time.sleep(0.5)
        # Threads of packages would delay an ordinary exit.
        os._exit(1)


def forward(input: argparse.Namespace) -> None:
    """Mirrors to the one target in `input`; never returns."""
    dog = Watchdog(input.child_of)
    (spec,) = input.to
    with Ratchet(input.api) as client:
        root = input.state or home_folder() / "mirrors"
        states = States(state_folder(root, spec, client.address))
        target = target_of(spec)
        forwarder = Forwarder(client, target, states, input.run, dog.alive, input.samples)
        forwarder.run_forever(input.every)


def _command(input: argparse.Namespace, spec: str) -> list[str]:
    command = [sys.executable, "-m", "ratchet.worker.mirrors", "--to", spec, "--run", *input.run]
    for name in ("api", "every", "state", "samples"):
        if (value := getattr(input, name)) is not None:
            command += [f"--{name}", str(value)]
    return [*command, "--child-of", str(os.getpid())]


def supervise(input: argparse.Namespace) -> None:
    """Keeps a process per target running until SIGTERM or Ctrl-C."""
    commands = {spec: _command(input, spec) for spec in input.to}
    children = {spec: subprocess.Popen(command) for spec, command in commands.items()}
    again = {spec: (AGAIN_S, 0.0) for spec in commands}
    try:
        while True:
            time.sleep(0.2)
            for spec, child in children.items():
                wait_s, due = again[spec]
                if child.poll() is None:
                    continue
                if not due:
                    logging.warning(
                        "%s ended (%s), restarting in %.0f s", spec, child.returncode, wait_s
                    )
                    again[spec] = (wait_s, time.monotonic() + wait_s)
                elif time.monotonic() >= due:
                    children[spec] = subprocess.Popen(commands[spec])
                    again[spec] = (min(2 * wait_s, MOST_AGAIN_S), 0.0)
    finally:
        for child in children.values():
            child.kill()
            child.wait()


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit status: 0 stopped, 2 wrong usage."""
    made = parser()
    input = made.parse_args(arguments)
    name = "/".join(input.to) if input.child_of else "mirrors"
    log_without_secrets(logging.WARNING, f"%(asctime)s {name}: %(message)s")
    logging.getLogger("ratchet.mirrors").setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if input.child_of:
            forward(input)
        for spec in input.to:
            target_of(spec)
        Ratchet(input.api).close()
        supervise(input)
    except ValueError as error:
        made.error(str(error))
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
