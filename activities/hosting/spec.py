"""What a role specifies about the server that the host activity keeps alive."""

import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from ratchet.activities.contracts.hosting import EngineLoad, HostInput
from ratchet.activities.runtime.context import WorkerContext

LOST_AFTER_S = 12.0
"""How long a server may be silent, in seconds."""
QUICK_GRACE_S = 1.0
"""For servers without state that a graceful shutdown would save."""


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


SendLoad = Callable[[EngineLoad], Awaitable[None]]


@dataclass(frozen=True)
class ServerSpec:
    """A server process to start in its own process group.

    `env` is added to the worker's environment. `probe` returns whether the server is healthy now;
    it is called about once a second and limits its own time. A server that was healthy and then is
    not for `lost_after_s` is ended; one that is stopped has `grace_s` to end on its own. `model` is
    passed on in reports. `report_load` sends the load of a server that is up, forever; it raises
    ValueError if the server does not report its load. `log` is its log file, below RATCHET_HOME; ''
    for a file of its host's own. `lag` is the file to which it writes its event-loop lag, {"time",
    "event_loop_lag"}, if it measures it.
    """

    name: str
    argv: list[str]
    address: str
    cwd: Path
    probe: Callable[[], Awaitable[bool]]
    env: dict[str, str] = field(default_factory=dict)
    model: str = ""
    start_timeout_s: float = 240.0
    lost_after_s: float = LOST_AFTER_S
    grace_s: float = QUICK_GRACE_S
    report_load: Callable[[SendLoad], Awaitable[None]] | None = None
    log: str = ""
    lag: Path | None = None


SpecBuilder = Callable[[WorkerContext, HostInput, int], Awaitable[ServerSpec]]
"""Builds the spec of a host's server for an epoch. Each epoch gets fresh ports or sockets."""
