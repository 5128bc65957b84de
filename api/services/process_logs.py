"""Which log a source names, and the reply if it is not on the API's machine."""

import socket
from dataclasses import dataclass

from temporalio.api.enums.v1 import TaskQueueType

from ratchet.activities.contracts.logs import env_log, orchestrator_log
from ratchet.activities.contracts.roles import SERVERS, WorkerRole, sections_of
from ratchet.api.schemas.problems import ApiProblem, printable
from ratchet.api.services.core import Services
from ratchet.configs.run import RunConfig

ENV = "env:"
ORCHESTRATOR = "orchestrator"
MANY_CORES = 1_000_000
"""As many as no machine has: logs are looked for of every server that a run may have started."""


@dataclass(frozen=True)
class ProcessLog:
    """A log at `path` below RATCHET_HOME, written on the machines of workers of `role`, unless
    someone else runs the server, at `address`.
    """

    source: str
    path: str
    role: WorkerRole
    address: str = ""


def log_of(config: RunConfig, run_id: str, source: str) -> ProcessLog:
    """The log that a source names; raises 422 that lists all sources."""
    servers = SERVERS["env"].plan(config, MANY_CORES)
    if source == ORCHESTRATOR:
        return ProcessLog(source, orchestrator_log(run_id), "orchestrator")
    kind, _, name = source.removeprefix(ENV).rpartition("/")
    named = (f"{kind}/{name}", name, f"train/{name}")
    for server in named if source.startswith(ENV) and kind in ("", "train", "eval") else ():
        sections = sections_of(config, server) if server in servers else []
        if sections and (not kind or kind in [own for own, _ in sections]):
            path = env_log(run_id, sections[0][0], name)
            return ProcessLog(source, path, "env", servers[server])
    known = ", ".join([ORCHESTRATOR, *(f"{ENV}{server}" for server in servers)])
    detail = f"source: this run has no {printable(source)!r}; its sources: {known}."
    raise ApiProblem(422, "invalid-request", "The request has invalid parameters", detail)


async def missing_log(services: Services, log: ProcessLog) -> ApiProblem:
    """404 for a missing log: it says which process writes it, and where."""
    title = "The log is not on the API's machine"
    if log.address:
        detail = (
            f"{log.source}: someone else runs the env server at {log.address}; its log is where "
            "it was started."
        )
        return ApiProblem(404, "no-such-log", title, detail)
    queues, orchestrates = services.settings.queues, log.role == ORCHESTRATOR
    kind = (
        TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW
        if orchestrates
        else TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY
    )
    pollers = await services.temporal.pollers(queues.of(log.role), kind)
    workers = ", ".join(sorted({poller.identity for poller in pollers})) or "none polls now"
    detail = (
        f"{log.source}: a worker of role {log.role} writes it to RATCHET_HOME/{log.path} on its "
        f"own machine ({workers}), and {socket.gethostname()}, where this API runs, has no such "
        "file. Read it there, or let the API share that worker's RATCHET_HOME; a process that has "
        "not started yet has no log."
    )
    return ApiProblem(404, "no-such-log", title, detail)
