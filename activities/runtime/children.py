"""Processes that a worker starts: how our modules are run, and how helpers end with their worker.

Helpers (prepare, dump and check) have no keeper: their worker ends them as long as it lives, and
the kernel does it afterwards. Servers have one (`ratchet.activities.hosting.keeper`).

Invariants: every process that may run other people's code is given `child_env`, which holds no door
to Temporal and no key of the API. No such process finds a module in its working folder, where users
keep code of any name, nor one of our rooms as `api` or `worker`: a worker begins with
`hide_rooms()`.
For helpers the starter passes `as_parent()` in the environment, and the helper's main() begins with
`end_with_parent()`. The kernel's signal is sent when the THREAD ends that started the helper, so
that has to be one that lives as long as its process: the worker's event loop, in the main thread.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

PARENT = "RATCHET_PARENT_PID"
API_KEYS = ("RATCHET_API_KEY", "RATCHET_API_KEYS")
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_PR_SET_PDEATHSIG = 1
_ROOMS = Path(__file__).resolve().parents[2]
"""Where the rooms lie: a checkout, or `ratchet` itself in an installed package."""


def module_command(module: str, *args: str) -> list[str]:
    """Runs a module with the interpreter of this process, and without its working folder (`-P`)."""
    return [sys.executable, "-P", "-m", module, *args]


def hide_rooms() -> None:
    """Takes the folder of the rooms off the import path of this process and of all it starts.

    A person puts a checkout there by `python -m` in it, or by PYTHONPATH. `api`, `configs` and
    `worker` would then be ours, where users' code means its own.
    """
    sys.path[:] = _without_rooms(sys.path)
    if inherited := os.environ.pop("PYTHONPATH", None):
        os.environ["PYTHONPATH"] = os.pathsep.join(_without_rooms(inherited.split(os.pathsep)))


def _without_rooms(folders: list[str]) -> list[str]:
    return [folder for folder in folders if Path(folder).resolve() != _ROOMS]


def reach_own_machine(env: MutableMapping[str, str] = os.environ) -> None:
    """Has this process, and all that it starts, reach this machine's servers without the proxies
    of the environment, whatever library asks. `NO_PROXY` keeps what it names.
    """
    named = env.get("no_proxy") or env.get("NO_PROXY") or ""
    names = [name.strip() for name in named.split(",") if name.strip()]
    if "*" not in names:
        names += [name for name in LOOPBACK if name not in names]
    # Some libraries read only the one, some prefer the other.
    env["NO_PROXY"] = env["no_proxy"] = ",".join(names)


def child_env(*more: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that a worker starts, helper or server: the worker's own less
    what leads into the service itself, and then `more`.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TEMPORAL_") and name not in API_KEYS
    }
    for added in more:
        kept |= added
    return kept


def as_parent() -> dict[str, str]:
    """Environment variables for a helper that is to end with this process."""
    return {PARENT: str(os.getpid())}


def end_with_parent() -> None:
    """Has this process killed when the one that started it ends; at once if it has ended already.

    Nothing happens if nobody passed `as_parent()`, as when a person starts the module by hand.
    """
    # Taken out, as it is nothing to whatever this process starts.
    parent = os.environ.pop(PARENT, None)
    if parent is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # A parent that went before that call was no longer there to be noticed.
    if os.getppid() != int(parent):
        os.kill(os.getpid(), signal.SIGKILL)
