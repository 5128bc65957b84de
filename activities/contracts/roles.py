"""The list of roles: what worker processes do, and which servers they host for runs.

Everything that depends on roles reads this list: queues, workers, the fleet of a run, the API. Two
tables hold a role's code: `worker/roles.py` builds the workers of a role, and the spec of a server
says how it is started. Invariant: servers are planned, opened and listed in the order of SERVERS,
which recorded histories rely on.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from ratchet.configs.env import MOST_WORKERS, EnvConfig
from ratchet.configs.run import RunConfig

LagRole = Literal["orchestrator", "trainer", "inference", "env"]
"""Worker roles that report nothing but event-loop lag."""
WorkerRole = Literal["orchestrator", "rollout", LagRole]
"""The work of a worker process; each role has its own task queue (`names.Queues`)."""
WORKER_ROLES: tuple[WorkerRole, ...] = get_args(WorkerRole)

ServerRole = Literal["engine", "env", "trainer"]
"""The purpose of a server for its run."""


@dataclass(frozen=True)
class Role:
    """The servers of one role, which workers of `kept_by` host. `plan` says which ones a run needs,
    name to address, in order, given the cores of a machine for envs (0: not known); the run starts
    those without an address. Events name a server by its index, unless it is `named`.
    """

    kept_by: WorkerRole
    plan: Callable[[RunConfig, int], Mapping[str, str]]
    named: bool = False


PERMITS_PER_WORKER = 256
"""Rollouts in flight for which one server of an env is enough."""


def _trainer(config: RunConfig, cores: int) -> dict[str, str]:
    return {"trainer": ""} if config.trains else {}


def _engines(config: RunConfig, cores: int) -> dict[str, str]:
    return {f"engine-{k}": "" for k in range(config.inference.engines)}


_STARTED_BY = ("args", "path", "log_level")
"""Keys of an env that affect how its server is started."""


def _workers(config: RunConfig, env: EnvConfig, cores: int) -> int:
    """How many servers an env's section needs. Half of the cores are left to what they serve."""
    if env.workers != "auto":
        return env.workers
    envs = {other.name for other in (*config.train.env, *config.eval.env)}
    permits = config.permits or config.dispatch.concurrency.max_inflight
    most = cores // 2 // len(envs) if env.address is None else 1
    return max(1, min(math.ceil(permits / PERMITS_PER_WORKER), most, MOST_WORKERS))


def _envs(config: RunConfig, cores: int) -> dict[str, str]:
    """One server per env name, but 'train/<name>' and 'eval/<name>' if its sections need different
    servers; as many of each as the sections that share it ask for.
    """
    train = {env.name: env for env in config.train.env}
    apart = {
        env.name
        for env in config.eval.env
        if (twin := train.get(env.name)) is not None
        and not env.address
        and any(getattr(env, key) != getattr(twin, key) for key in _STARTED_BY)
    }
    addresses: dict[str, str] = {}
    workers: dict[str, int] = {}
    for kind, envs in (("train", config.train.env), ("eval", config.eval.env)):
        for env in envs:
            server = f"{kind}/{env.name}" if env.name in apart else env.name
            addresses.setdefault(server, env.address or "")
            count = _workers(config, env, cores)
            workers[server] = max(workers.get(server, 1), count)
    return {
        server if number == 1 else f"{server}:{number}": address
        for server, address in addresses.items()
        for number in range(1, workers[server] + 1)
    }


def shared_name(server: str) -> str:
    """What servers that share the work of one have in common: they are 'x', 'x:2', 'x:3', …"""
    return server.partition(":")[0]


def sections_of(config: RunConfig, server: str) -> list[tuple[str, EnvConfig]]:
    """The env sections, each with its kind, that an env server serves."""
    kind, _, name = shared_name(server).rpartition("/")
    sections: list[tuple[str, EnvConfig]] = [("train", env) for env in config.train.env]
    sections += [("eval", env) for env in config.eval.env]
    return [(own, env) for own, env in sections if env.name == name and kind in ("", own)]


SERVERS: dict[ServerRole, Role] = {
    "trainer": Role("trainer", _trainer),
    "engine": Role("inference", _engines),
    "env": Role("env", _envs, named=True),
}
