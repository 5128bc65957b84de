"""Carries faults out, each with a witness: proof, taken from outside the product, that it landed.

A fault that could not be carried out has `landed` False and says why; it is never taken for one
that the product survived. Every fault ends by itself: what was stopped is continued, what was cut
or filled is restored, whatever happens in between.
"""

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable
from typing import cast

import psutil

from tests.chaos import history
from tests.chaos.checkpoint_faults import kill_in_checkpoint
from tests.chaos.disk import Disk
from tests.chaos.push_faults import kill_in_push
from tests.chaos.schedule import Spec
from tests.chaos.targets import SERVERS, Role, gone, kernel_state
from tests.chaos.world import (
    REPLACED,
    TARGET_WITHIN_S,
    NotLanded,
    Witness,
    World,
    target,
    until_gone,
)

STALL_S: dict[str, float] = {"api": 5.0, "temporal": 8.0, "orchestrator-worker": 14.0}
"""How long a process is stopped; what is not named is stopped for LONG_STALL_S."""
LONG_STALL_S = 22.0
"""Longer than the heartbeat time-out, so that work is given away and its owner comes back late."""
SERVER_STALL_S = 35.0
"""A server is stopped until its host replaces it, and at most so long."""
STOPS_WITHIN_S = 5.0
CUT_S = 6.0
FREEZE_S = 6.0
REFUSE_S = 8.0


def can_cut_sockets() -> bool:
    """Whether established connections of others may be ended here (`ss -K`)."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as ours:
            ours.settimeout(1.0)
            _kill_sockets(port)
            try:
                return ours.recv(1) == b""
            except TimeoutError:
                return False
            except OSError:
                return True


def possible(disk: Disk, specs: list[Spec]) -> list[Spec]:
    """Those of `specs` that can be carried out on this machine."""
    lacking = set()
    if disk.kind == "none":
        lacking |= {"full-disk", "failing-store"}
    if disk.kind != "ext4":
        lacking.add("slow-store")
    if not can_cut_sockets():
        lacking.add("cut-engine")
    return [spec for spec in specs if spec.what not in lacking]


async def inject(world: World, spec: Spec) -> Witness:
    """Carries one fault out, up to its end; raises nothing that can happen to a fault."""
    perform = _CARRIERS[spec.what]
    at = time.time()
    try:
        at, proof = await perform(world, spec)
    except (NotLanded, psutil.NoSuchProcess, ProcessLookupError) as error:
        return Witness(spec, at, time.time(), False, str(error))
    return Witness(spec, at, time.time(), True, proof)


async def _kill(world: World, spec: Spec) -> tuple[float, str]:
    process = await target(world, cast(Role, spec.role))
    created, at = process.create_time(), time.time()
    process.kill()
    await until_gone(process.pid, created)
    return at, f"SIGKILL: process {process.pid} is gone"


async def _stall(world: World, spec: Spec) -> tuple[float, str]:
    process = await target(world, cast(Role, spec.role))
    created, at = process.create_time(), time.time()
    usual = SERVER_STALL_S if spec.role in SERVERS else LONG_STALL_S
    until = time.monotonic() + STALL_S.get(spec.role, usual)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        # A process that waits for a core stops once it has had one.
        stopped_by = time.monotonic() + STOPS_WITHIN_S
        while (state := kernel_state(process.pid)) != "T" and time.monotonic() < stopped_by:
            await asyncio.sleep(0.02)
        if state != "T":
            raise NotLanded(f"process {process.pid} is in state {state or 'gone'} and not in T")
        # Who keeps a server may end it while it is stopped: then there is nobody to continue.
        while time.monotonic() < until and not gone(process.pid, created):
            await asyncio.sleep(0.1)
    finally:
        ended = gone(process.pid, created)
        if not ended:
            os.kill(process.pid, signal.SIGCONT)
    how = REPLACED if ended else "went on afterwards"
    return at, f"SIGSTOP: process {process.pid} in state T for {time.time() - at:.1f} s, {how}"


async def _cut_temporal(world: World, spec: Spec) -> tuple[float, str]:
    proxy = world.stack.proxy
    assert proxy is not None
    at = time.time()
    count = await asyncio.to_thread(proxy.cut)
    try:
        with socket.socket() as probe:
            refused = probe.connect_ex(("127.0.0.1", proxy.port)) != 0
        await asyncio.sleep(CUT_S)
    finally:
        await asyncio.to_thread(proxy.restore)
    if not (count and refused):
        raise NotLanded(f"{count} connections were cut, refused afterwards: {refused}")
    return at, f"{count} connections to Temporal were reset and others refused for {CUT_S:.0f} s"


def _kill_sockets(port: int) -> None:
    command = ["ss", "-K", "dst", "127.0.0.1", "dport", "=", f":{port}"]
    try:
        subprocess.run(command, capture_output=True, timeout=10)
    except FileNotFoundError:
        return


def _peers(process: psutil.Process) -> tuple[int, int]:
    """The port that an engine listens on, and how many connections it has there."""
    found = process.net_connections("tcp")
    ports = [c.laddr.port for c in found if c.status == psutil.CONN_LISTEN]
    if not ports:
        raise NotLanded("the engine does not listen yet")
    return ports[0], sum(
        c.status == psutil.CONN_ESTABLISHED and c.laddr.port == ports[0] for c in found
    )


async def _cut_engine(world: World, spec: Spec) -> tuple[float, str]:
    deadline = time.monotonic() + TARGET_WITHIN_S
    while time.monotonic() < deadline:
        process = await target(world, "engine-api")
        try:
            port, before = _peers(process)
        except NotLanded:
            before = 0
        if before:
            at = time.time()
            await asyncio.to_thread(_kill_sockets, port)
            _, after = _peers(process)
            if after < before:
                return at, f"{before - after} of {before} connections to the engine were ended"
        await asyncio.sleep(0.05)
    raise NotLanded("the engine had no connection that could be ended")


async def _slow_store(world: World, spec: Spec) -> tuple[float, str]:
    at = time.time()
    frozen = world.disk.freeze(FREEZE_S)
    await asyncio.sleep(0.2)
    began = time.monotonic()
    refused = await asyncio.to_thread(world.disk.refusal, size=1)
    took = time.monotonic() - began
    code = await asyncio.to_thread(frozen.wait)
    if code or refused or took < FREEZE_S / 2:
        raise NotLanded(f"freezing ended with {code}; a write took {took:.1f} s {refused}")
    return at, f"a write to the store took {took:.1f} s"


async def _failing_store(world: World, spec: Spec) -> tuple[float, str]:
    at = time.time()
    try:
        refusal = await asyncio.to_thread(world.disk.read_only)
        if not refusal:
            raise NotLanded("the store took writes all the same")
        await asyncio.sleep(REFUSE_S)
    finally:
        await asyncio.to_thread(world.disk.writable)
    return at, f"writes to the store met {refusal} for {REFUSE_S:.0f} s"


async def _full_disk(world: World, spec: Spec) -> tuple[float, str]:
    at = time.time()
    try:
        refusal = await asyncio.to_thread(world.disk.fill)
        if refusal != "ENOSPC":
            raise NotLanded(f"a write to the full disk met {refusal or 'no error'}")
        while time.time() < at + REFUSE_S:
            await asyncio.sleep(0.3)
            await asyncio.to_thread(world.disk.fill)
    finally:
        await asyncio.to_thread(world.disk.empty)
    return at, f"writes to the store met ENOSPC for {REFUSE_S:.0f} s"


# -- double delivery ------------------------------------------------------------------------


async def _redeliver(world: World, spec: Spec) -> tuple[float, str]:
    """Sends the run a report of groups, and a report of a server, that it has had before."""
    handle = world.client.get_workflow_handle(world.run_id)
    deadline = time.monotonic() + TARGET_WITHIN_S
    while time.monotonic() < deadline:
        found = await history.signals_of(handle)
        reports = [value for name, value in found if name == "dispatch_report" and value["groups"]]
        if reports:
            at = time.time()
            hosts = [value for name, value in found if name == "host_report"]
            again = [("dispatch_report", reports[-1])] + [("host_report", v) for v in hosts[:1]]
            for name, value in again:
                await handle.signal(name, value)
            after = await history.signals_of(handle)
            if all(after.count(pair) >= 2 for pair in again):
                groups = [group["group"] for group in reports[-1]["groups"]]
                return at, f"{len(again)} reports are twice in the history, one of {groups}"
        await asyncio.sleep(1.0)
    raise NotLanded("the run's history showed no report that could be sent again")


Carrier = Callable[[World, Spec], Awaitable[tuple[float, str]]]

_CARRIERS: dict[str, Carrier] = {
    "kill": _kill,
    "stall": _stall,
    "cut-temporal": _cut_temporal,
    "cut-engine": _cut_engine,
    "slow-store": _slow_store,
    "failing-store": _failing_store,
    "full-disk": _full_disk,
    "kill-in-checkpoint": kill_in_checkpoint,
    "kill-in-push": kill_in_push,
    "redeliver": _redeliver,
}
