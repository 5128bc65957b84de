"""`python -m ratchet.worker --roles orchestrator,rollout,trainer,inference,env` hosts roles."""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys

from ratchet.activities.contracts.redact import log_without_secrets, writable
from ratchet.activities.contracts.roles import SERVERS, WORKER_ROLES
from ratchet.activities.hosting.reaper import sweep
from ratchet.activities.hosting.scratch import sweep_folders
from ratchet.activities.runtime.children import hide_rooms, reach_own_machine
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.storage.store import ArtifactStore, StoreUnavailable, UnusableStore
from ratchet.configs.home import STORES_FILE, private_folder
from ratchet.worker.client import TemporalUnreachable, connect, register_search_attributes
from ratchet.worker.health import Pulse, serve_health
from ratchet.worker.lag import LagRecorder
from ratchet.worker.memory import limit_arenas
from ratchet.worker.roles import BUILDERS
from ratchet.worker.run_logs import RunLogs
from ratchet.worker.settings import WorkerSettings, own_queue, parse_roles
from ratchet.worker.versioning import make_first_current

LOW_DISK_BYTES = 1024**3


async def serve(roles: list[str], settings: WorkerSettings) -> None:
    """Runs the roles' workers until SIGTERM or SIGINT."""
    client = await connect()
    await register_search_attributes(client)
    private_folder(settings.home)
    store = ArtifactStore(settings.store_url, settings.home / STORES_FILE)
    free = None
    try:
        await asyncio.to_thread(store.require_usable)
        free = store.free_bytes()
    except UnusableStore:
        raise
    except StoreUnavailable as error:
        logging.warning("%s; runs wait for it", error)
    if free is not None and free < LOW_DISK_BYTES:
        # Runs that wait for space should have workers once it is available.
        logging.warning(
            "the artifact store %s has %.0f MiB left: free at least 1 GiB there, or runs will "
            "pause themselves when it is full",
            settings.store_url,
            free / 2**20,
        )
    if any(role.kept_by in roles for role in SERVERS.values()):
        sweep(settings.home)
        sweep_folders(settings.home / "scratch" / "training")
    lag = LagRecorder(store)
    workers = []
    for role in roles:
        ctx = WorkerContext(
            home=settings.home,
            store_url=settings.store_url,
            own_queue=own_queue(settings.queues.of(role)),
        )
        versioned = {"deployment": settings.deployment} if role == "orchestrator" else {}
        workers += BUILDERS[role](client, ctx, settings.queues, lag.interceptors(role), **versioned)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    pulse = Pulse(roles)
    with serve_health(pulse, settings.health_port):
        aside = [asyncio.create_task(pulse.run()), asyncio.create_task(lag.run())]
        if "orchestrator" in roles:
            aside.append(asyncio.create_task(RunLogs(settings.home).run()))
        async with contextlib.AsyncExitStack() as running:
            for worker in workers:
                await running.enter_async_context(worker)
            if settings.deployment is not None and "orchestrator" in roles:
                await make_first_current(client, settings.deployment)
            pulse.ready = True
            logging.info("worker is up: %s", ", ".join(roles))
            await stop.wait()
            logging.info("worker is shutting down")
        for task in aside:
            task.cancel()


def main() -> int:
    """Entry point; returns the exit status."""
    limit_arenas()
    hide_rooms()
    reach_own_machine()
    parser = argparse.ArgumentParser(prog="python -m ratchet.worker", description=__doc__)
    parser.add_argument(
        "--roles", default=",".join(WORKER_ROLES), help=f"any of {', '.join(WORKER_ROLES)}"
    )
    args = parser.parse_args()
    log_without_secrets(logging.INFO, "%(asctime)s %(levelname)s %(name)s %(message)s")
    for noisy in ("httpx", "temporalio.activity"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        asyncio.run(serve(parse_roles(args.roles), WorkerSettings.from_env()))
    except (ValueError, TemporalUnreachable, UnusableStore) as error:
        print(f"worker: {writable(str(error))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # The SDK's native runtime can crash during interpreter shutdown (sdk-python #300).
    os._exit(status)
