"""The list of roles: what worker processes do, and which servers they keep for runs.

Everything that goes by role reads this list: queues, workers, the fleet of a run, the API. Two
tables hold what a role is made of in code: `worker/roles.py` builds the workers of a role, and the
spec of a server says how it is started. Invariant: servers are planned, opened and listed in the
order of SERVERS, which recorded histories rely on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from ratchet.configs.run import RunConfig

LagRole = Literal["orchestrator", "trainer", "inference", "env"]
"""Worker roles of which event-loop lag is all that is measured."""
WorkerRole = Literal["orchestrator", "rollout", LagRole]
"""What a worker process does; each has a task queue of its own (`names.Queues`)."""
WORKER_ROLES: tuple[WorkerRole, ...] = get_args(WorkerRole)

ServerRole = Literal["engine", "env", "trainer"]
"""What a server is for its run."""


@dataclass(frozen=True)
class Role:
    """The servers of one role: workers of `kept_by` keep them. `plan` says which ones a run needs,
    name to address, in order; we start those without an address. Events name a server by its
    index, unless it is `named`.
    """

    kept_by: WorkerRole
    plan: Callable[[RunConfig], Mapping[str, str]]
    named: bool = False


def _engines(config: RunConfig) -> dict[str, str]:
    return {f"engine-{k}": "" for k in range(config.inference.engines)}


def _envs(config: RunConfig) -> dict[str, str]:
    addresses: dict[str, str] = {}
    for env in [*config.train.env, *config.eval.env]:
        addresses.setdefault(env.name, env.address or "")
    return addresses


SERVERS: dict[ServerRole, Role] = {
    "trainer": Role("trainer", lambda config: {"trainer": ""}),
    "engine": Role("inference", _engines),
    "env": Role("env", _envs, named=True),
}
