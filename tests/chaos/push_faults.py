"""Kills while weights are pushed and, where the trainer is the target, the next batch trains.

The victim is stopped, Temporal is asked once more what the run has in progress, and only if the
victim's own part in it still is, the victim is killed; else it goes on, and a later push is waited
for.
"""

import asyncio
import os
import signal
import time
from typing import cast

from temporalio.api.enums.v1 import PendingActivityState

from ratchet.activities.contracts import names
from tests.chaos.schedule import Spec
from tests.chaos.targets import Role
from tests.chaos.world import NotLanded, World, target, until_gone

PUSH_WITHIN_S = 120.0
"""Also where an engine that an earlier fault took down comes back first."""
TRAINS = ("trainer-process", "trainer-worker")


async def kill_in_push(world: World, spec: Spec) -> tuple[float, str]:
    """Kills the process of a role while an engine takes new weights."""
    role = cast(Role, spec.role)
    own = names.TRAIN_STEP if role in TRAINS else names.SYNC_WEIGHTS
    wanted = {names.SYNC_WEIGHTS, own}
    process = await target(world, role)
    created, deadline = process.create_time(), time.monotonic() + PUSH_WITHIN_S
    while time.monotonic() < deadline:
        if not wanted <= await in_progress(world):
            continue
        os.kill(process.pid, signal.SIGSTOP)
        at = time.time()
        if own in await in_progress(world):
            process.kill()
            await until_gone(process.pid, created)
            works = " and ".join(sorted(wanted))
            return at, f"SIGKILL: {role} {process.pid} is gone, from amid {works}"
        os.kill(process.pid, signal.SIGCONT)
        await asyncio.sleep(0.05)
    raise NotLanded(f"no push was seen in progress for {PUSH_WITHIN_S:.0f} s")


async def in_progress(world: World) -> set[str]:
    """Activities of the run that have started, by type."""
    described = await world.client.get_workflow_handle(world.run_id).describe()
    started = PendingActivityState.PENDING_ACTIVITY_STATE_STARTED
    pending = described.raw_description.pending_activities
    return {each.activity_type.name for each in pending if each.state == started}
