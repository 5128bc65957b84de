"""The processes that faults hit, and how the effect of a fault is detected."""

import asyncio
import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import psutil
from temporalio.client import Client

from ratchet.activities.storage.store import ArtifactStore
from tests.chaos.disk import Disk
from tests.chaos.schedule import Spec
from tests.chaos.supervisor import ChaosStack
from tests.chaos.targets import Role, find, gone

TARGET_WITHIN_S = 75.0
DEAD_WITHIN_S = 5.0
REPLACED = "was replaced meanwhile"
"""How the proof of a stall says that the process was ended while it was stopped."""


@dataclass(frozen=True)
class Witness:
    """A fault as it was carried out, from `at` to `until` (Unix times)."""

    spec: Spec
    at: float
    until: float
    landed: bool
    proof: str

    @property
    def rode_out(self) -> bool:
        """Whether what was stopped was still there when the fault was over."""
        return self.spec.what == "stall" and REPLACED not in self.proof


@dataclass(frozen=True)
class World:
    """What faults are carried out on. `client` reaches Temporal past the proxy."""

    stack: ChaosStack
    disk: Disk
    client: Client
    store: ArtifactStore
    run_id: str


class NotLanded(Exception):
    """The fault could not be carried out; the message says why."""


async def target(world: World, role: Role) -> psutil.Process:
    """The process of `role`, once there is one; raises NotLanded after TARGET_WITHIN_S."""
    deadline = time.monotonic() + TARGET_WITHIN_S
    while (process := find(world.stack, role)) is None:
        if time.monotonic() > deadline:
            raise NotLanded(f"no {role} ran for {TARGET_WITHIN_S:.0f} s")
        await asyncio.sleep(0.2)
    return process


async def until_gone(pid: int, created: float) -> None:
    """Waits for a killed process to end; raises NotLanded if it does not."""
    deadline = time.monotonic() + DEAD_WITHIN_S
    while not gone(pid, created):
        if time.monotonic() > deadline:
            raise NotLanded(f"process {pid} outlived its SIGKILL")
        await asyncio.sleep(0.02)


def as_json(witness: Witness) -> dict[str, Any]:
    """A witness as JSON."""
    return {**dataclasses.asdict(witness), "spec": witness.spec.name}
