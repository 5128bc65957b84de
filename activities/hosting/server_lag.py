"""Records how late the event loop of a server wakes, for the run that it works for.

A server that measures it writes its latest figures to a file (`ServerSpec.lag`), and whoever keeps
the server adds them to a series. Nothing decides anything by it, and no server fails with it.
"""

import asyncio
import json
import logging
import re
import socket
import uuid
from pathlib import Path

from ratchet.activities.contracts.hosting import HostInput
from ratchet.activities.contracts.roles import SERVERS
from ratchet.activities.storage.series import Sample, Series
from ratchet.activities.storage.store import ArtifactStore

LOOKS_EVERY_S = 2.0

log = logging.getLogger(__name__)


def source_of(host: HostInput) -> str:
    """Names one epoch of a server in a series: by the role that keeps it, its name and machine."""
    name = re.sub(r"[^A-Za-z0-9._]", "-", host.name or str(host.index))
    machine, epoch = socket.gethostname(), uuid.uuid4().hex[:6]
    return f"{SERVERS[host.role].kept_by}-server-{name}-{machine}-{epoch}"


async def record_lag(store: ArtifactStore, host: HostInput, file: Path) -> None:
    """Adds whatever the server writes to `file` to a series of its run, until cancelled."""
    series = Series(host.run_id, source_of(host))
    while True:
        await asyncio.sleep(LOOKS_EVERY_S)
        try:
            await asyncio.to_thread(_record, store, series, file)
        except Exception:
            # No run is worth losing over a gauge. The next sample's chunk has this one, too.
            log.warning("event-loop lag of %s was not stored", host.host_id, exc_info=True)


def _record(store: ArtifactStore, series: Series, file: Path) -> None:
    if not file.exists():
        return
    sample: Sample = json.loads(file.read_text())
    if sample["event_loop_lag"] is not None and sample["time"] > series.last:
        series.add(sample).write(store)
