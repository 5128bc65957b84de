"""What a worker's machine offers to the servers that it keeps, and what each of them is given: the
seam. `activities/inference/devices.py` has the one that is used.
"""

from typing import Protocol

from ratchet.activities.contracts.hosting import HostInput
from ratchet.configs.run import RunConfig


class Devices(Protocol):
    """The devices of one machine."""

    def accelerators(self) -> list[str]:
        """Those that servers may use, by name; none: they compute on its CPU."""
        ...

    def given(self, host: HostInput, config: RunConfig) -> dict[str, str]:
        """The share of a server of a run, as variables of its environment."""
        ...
