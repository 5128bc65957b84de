"""What the supervisor of a local stack reports about its services, in a file below RATCHET_HOME.

Invariant: a file that was not touched for STALE_AFTER_S means nothing: there is no supervisor, or
it has stalled.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

STALE_AFTER_S = 15.0

ServiceStatus = Literal["starting", "up", "down", "crash-looping"]


@dataclass(frozen=True)
class ServiceState:
    """The state of a service, `since` when (ISO 8601), and its log below RATCHET_HOME. `restarts`
    counts all since its supervisor started; `ends` those in a row, without a longer healthy time in
    between.
    """

    name: str
    state: ServiceStatus
    since: str
    restarts: int
    ends: int
    log: str


def services_file(home: Path) -> Path:
    """The path of the file."""
    return home / "services.json"


def read_services(home: Path) -> list[ServiceState] | None:
    """The states of the services below `home`; None if there is no supervisor."""
    try:
        with services_file(home).open() as file:
            fresh = time.time() - services_file(home).stat().st_mtime < STALE_AFTER_S
            return [ServiceState(**state) for state in json.load(file)] if fresh else None
    except FileNotFoundError:
        return None
