"""Processes that a worker starts: how our modules are run, and how helpers end with their worker.

Helpers (prepare, dump and check) have no keeper: their worker ends them while it lives, and the
kernel does so afterwards. Servers have one (`ratchet.activities.hosting.keeper`).

Invariants: every process that may run other people's code gets `child_env`, which gives no access
to Temporal and holds no key of the API. No such process imports a module from its working folder,
where users keep code of any name, nor one of our rooms as `api` or `worker`: a worker begins with
`hide_rooms()`.
A helper's starter passes `as_parent()` in the environment, and the helper's main() begins with
`end_with_parent()`. The kernel sends its signal when the THREAD ends that started the helper, so
that must be a thread that lives as long as its process: the worker's event loop, in the main one.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from ratchet.activities.contracts.names import LOOPBACK

PARENT = "RATCHET_PARENT_PID"
API_KEYS = ("RATCHET_API_KEY", "RATCHET_API_KEYS")
_PR_SET_PDEATHSIG = 1
_ROOMS = Path(__file__).resolve().parents[2]
"""The folder of the rooms: a checkout, or `ratchet` itself in an installed package."""


def module_command(module: str, *args: str) -> list[str]:
    """Runs a module with this process's interpreter, and without its working folder (`-P`)."""
    return [sys.executable, "-P", "-m", module, *args]


def hide_rooms() -> None:
    """Removes the folder of the rooms from the import path of this process and its children.

    `python -m` in a checkout, or PYTHONPATH, puts it there. `api`, `configs` and `worker` would
    then be ours, where users' code means its own.
    """
    sys.path[:] = _without_rooms(sys.path)
    if inherited := os.environ.pop("PYTHONPATH", None):
        os.environ["PYTHONPATH"] = os.pathsep.join(_without_rooms(inherited.split(os.pathsep)))


def _without_rooms(folders: list[str]) -> list[str]:
    return [folder for folder in folders if Path(folder).resolve() != _ROOMS]


def reach_own_machine(env: MutableMapping[str, str] = os.environ) -> None:
    """Makes this process and its children reach this machine's servers without the proxies of the
    environment, whichever library they use. `NO_PROXY` keeps its entries.
    """
    named = env.get("no_proxy") or env.get("NO_PROXY") or ""
    names = [name.strip() for name in named.split(",") if name.strip()]
    if "*" not in names:
        names += [name for name in LOOPBACK if name not in names]
    # Some libraries read only one of them, some prefer the other.
    env["NO_PROXY"] = env["no_proxy"] = ",".join(names)


def child_env(*more: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that a worker starts, helper or server: the worker's own without
    the variables that give access to the service itself, and then `more`.
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
    """Environment variables for a helper that should end with this process."""
    return {PARENT: str(os.getpid())}


def end_with_parent() -> None:
    """Makes the kernel kill this process when its starter ends; at once if that has ended already.

    Does nothing without `as_parent()`, for example when a person starts the module by hand.
    """
    # Removed, since it means nothing to this process's own children.
    parent = os.environ.pop(PARENT, None)
    if parent is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # A parent that ended before that call went unnoticed.
    if os.getppid() != int(parent):
        os.kill(os.getpid(), signal.SIGKILL)
