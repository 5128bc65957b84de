"""What every request handler uses: settings, Temporal, the store. Lives on the app's state."""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

from fastapi import Depends, Path, Request, Response

from ratchet.activities.contracts.hosting import keepers
from ratchet.activities.contracts.names import attempt_id
from ratchet.activities.contracts.roles import WorkerRole
from ratchet.activities.storage.store import CorruptArtifact, StoreUnavailable
from ratchet.api.http.keyring import Keyring
from ratchet.api.http.shared_call import Shared
from ratchet.api.schemas.problems import ApiProblem, shown
from ratchet.api.schemas.run import CheckpointSummary, Run, WaitingFor
from ratchet.api.services.disk import Disk
from ratchet.api.services.ended import forgotten
from ratchet.api.services.run_list import RunList
from ratchet.api.services.run_view import OPEN, run_object, status_of
from ratchet.api.settings import Settings
from ratchet.api.store.artifacts import checkpoints_of
from ratchet.api.store.notes import notes_of
from ratchet.api.store.records import Records
from ratchet.api.store.rollouts import Rollouts
from ratchet.api.temporal.client import Execution, Temporal, a_worker_on
from ratchet.api.temporal.histories import Histories
from ratchet.configs.live import changed
from ratchet.configs.run import RunConfig
from ratchet.configs.versions import NewerSchema

T = TypeVar("T")

RUN_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
FRESH_S = 0.25
PROBED_S = 1.0
READ_S = 10.0
MEASURED_S = 0.5
SILENT_AFTER_S = 25.0
"""Workers report every ten seconds."""
POLLED_S = 5.0
JSON = "application/json"


@dataclass(frozen=True)
class Services:
    """One per app."""

    settings: Settings
    temporal: Temporal
    records: Records
    histories: Histories
    rollouts: Rollouts
    run_list: RunList
    disk: Disk
    keyring: Keyring | None = None
    """Who may use the API; None: everyone who reaches it."""
    _executions: Shared[Execution | None] = field(default_factory=lambda: Shared(FRESH_S))
    _replies: Shared[bytes] = field(default_factory=lambda: Shared(FRESH_S))
    probes: Shared[None] = field(default_factory=lambda: Shared(PROBED_S))
    """Whether Temporal answers and the store is writable."""
    polled: Shared[set[WorkerRole]] = field(default_factory=lambda: Shared(POLLED_S))
    """Roles with at least one worker."""
    _reader: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="configs")
    )
    """One thread, so that however many configs are read, other requests wait for one at most."""

    async def aside(self, work: Callable[[], T]) -> T:
        """The result of `work` on a config, which may take long to compute; raises what it raises,
        and 503 if it and the work queued before it take longer than READ_S.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(READ_S):
                return await loop.run_in_executor(self._reader, work)
        except TimeoutError:
            raise ApiProblem(
                503,
                "config-unread",
                "The config was not read in time",
                f"Configs are read one at a time, and this one was not finished after {READ_S:.0f} "
                "s; try again, or make it smaller.",
                retry_after_s=5,
            ) from None

    async def execution(self, run_id: str) -> Execution:
        """The run's newest execution; raises 404 if neither Temporal nor the store knows one."""
        if RUN_ID.fullmatch(run_id) is None:
            raise unknown_run(run_id)
        result = await self._executions.get(run_id, lambda: self._described(run_id))
        if result is None:
            raise unknown_run(run_id)
        return result

    async def _described(self, run_id: str) -> Execution | None:
        """What Temporal, or else the store, knows about a run that was not deleted."""
        # A run can be shown and ended while the store is away.
        with contextlib.suppress(StoreUnavailable):
            if run_id in await asyncio.to_thread(self.run_list.index.deleted):
                return None
        result = await self.temporal.describe(run_id)
        return result or await asyncio.to_thread(forgotten, self.records, run_id)

    def touched(self, run_id: str) -> None:
        """Drops what is cached about the run, which was just signalled or changed."""
        self._executions.forget(run_id)
        self.run_list.touched()
        self._replies.forget(f"{run_id} {JSON}")

    async def reply(
        self, asked: str, make: Callable[[], Awaitable[bytes]], media: str = JSON
    ) -> Response:
        """The reply that `make` builds, shared by identical requests: `asked` and the media type
        identify it. Requests for a run itself use the run's id, so that `touched` can drop them.
        Raises what `make` raises.
        """
        return Response(await self._replies.get(f"{asked} {media}", make), media_type=media)

    def attempt_of(self, execution: Execution) -> str:
        """Id of the attempt that an execution runs."""
        return attempt_id(execution.id, int(execution.memo.get("attempt") or 1))

    def current_config(self, execution: Execution) -> RunConfig:
        """The config of a run with all changes so far. Blocks; raises 404."""
        try:
            config = self.records.config_of(self.attempt_of(execution))
        except FileNotFoundError:
            raise unknown_run(execution.id) from None
        changes = execution.memo.get("config_changes") or {}
        if changes:
            config = changed(config.model_dump(mode="json"), {}, changes)[1]
        metadata = execution.memo.get("metadata")
        return config if metadata is None else config.model_copy(update={"metadata": metadata})

    def _silent(self, execution: Execution) -> dict[str, float]:
        """Seconds since a worker that hosts servers of the run last reported, by role, where that
        is long ago. Blocks.
        """
        config = self.records.config(execution.id)
        hosting = keepers(config) if config else ()
        return self.records.silent(execution.id, hosting, SILENT_AFTER_S)

    async def show(self, execution: Execution) -> Run:
        """The whole run object, with live gauges, or with the reason of an unannounced end."""
        progress, reason = None, ""
        silent: dict[str, float] = {}
        if execution.state in OPEN:
            # A run is shown while the store is away, or has lost the config: why it waits matters
            # most then.
            with contextlib.suppress(StoreUnavailable, CorruptArtifact, NewerSchema):
                progress = await asyncio.to_thread(
                    self.records.progress, execution.id, self.settings.live_max_age_s
                )
                if status_of(execution) == "running":
                    silent = await asyncio.to_thread(self._silent, execution)
        elif execution.run and execution.state != "completed" and not execution.memo.get("error"):
            reason = await self.temporal.close_reason(execution)
        run = run_object(
            execution,
            ui=self.settings.temporal_ui,
            namespace=self.temporal.namespace,
            progress=progress,
            reason=reason,
        )
        run.silent = silent
        if run.status == "queued" and run.waiting_for is None:
            missing = await self.temporal.unpolled(self.settings.queues)
            if missing:
                run = run.model_copy(update={"waiting_for": WaitingFor(name=a_worker_on(missing))})
        if execution.state not in OPEN:
            with contextlib.suppress(StoreUnavailable):
                row = self.run_list.row_of(execution)
                archived = await asyncio.to_thread(self.run_list.index.archived, row)
                run = run.model_copy(update={"archived": archived})
                if run.checkpoint is None and run.kind == "train":
                    run = await asyncio.to_thread(self._with_checkpoint, run)
        (run,) = await self.noted([run])
        return await self.disk.shown(run, MEASURED_S)

    def _with_checkpoint(self, run: Run) -> Run:
        """A run that has ended, with the checkpoint that `resume` would continue from: one that was
        terminated, or that Temporal has forgotten, may not have reported it. Blocks.
        """
        with contextlib.suppress(CorruptArtifact):
            if held := checkpoints_of(self.records, run.id):
                return run.model_copy(update={"checkpoint": CheckpointSummary(step=held[-1].step)})
        return run

    async def noted(self, runs: list[Run]) -> list[Run]:
        """The runs with their notes, if the store can be read."""
        with contextlib.suppress(StoreUnavailable):
            ids = [run.id for run in runs]
            notes = await asyncio.to_thread(notes_of, self.records.store, ids)
            return [run.model_copy(update={"note": notes.get(run.id, "")}) for run in runs]
        return runs


def unknown_run(run_id: str) -> ApiProblem:
    """404 for a run."""
    detail = f"There is no run {shown(run_id)!r}; GET /v1/runs lists all runs."
    return ApiProblem(404, "unknown-run", "No such run", detail)


def asked(request: Request) -> str:
    """Everything that a GET specifies besides its headers."""
    return f"{request.scope['path']}?{request.scope['query_string'].decode('latin-1')}"


# A coroutine, since FastAPI calls plain functions in threads.
async def _services(request: Request) -> Services:
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


Served = Annotated[Services, Depends(_services)]
RunId = Annotated[str, Path(description="The run's id.", examples=["reverse-1a2b3c"])]
