"""The seam for devices: what a worker's machine offers to the servers that it hosts, and what each
server gets. `activities/inference/devices.py` has the implementation in use.
"""

from typing import Protocol

from ratchet.activities.contracts.hosting import HostInput
from ratchet.configs.run import RunConfig


class Devices(Protocol):
    """The devices of one machine."""

    def accelerators(self) -> list[str]:
        """The accelerators that servers may use, by name; empty: servers compute on the CPU."""
        ...

    def share(self, host: HostInput, config: RunConfig) -> dict[str, str]:
        """A server's share, as variables of its environment."""
        ...
