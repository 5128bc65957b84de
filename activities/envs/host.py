"""How the env server of a run is started and checked for health.

The servers per run and env name, one unless `workers` says otherwise, serve both training and
evaluation, unless their sections need different servers.
"""

import asyncio
import json
from typing import Any

from ratchet.activities.contracts.hosting import HostInput
from ratchet.activities.contracts.logs import env_log
from ratchet.activities.contracts.roles import sections_of
from ratchet.activities.contracts.rollouts import LONGEST_WAIT_S
from ratchet.activities.envs import load_times, loading
from ratchet.activities.envs.probe import probe
from ratchet.activities.hosting.process import GRACE_S
from ratchet.activities.hosting.spec import ServerSpec, free_port
from ratchet.activities.runtime.children import module_command
from ratchet.activities.runtime.context import WorkerContext
from ratchet.configs.home import private_file

PROBE_S = 3.0


async def env_spec(ctx: WorkerContext, host: HostInput, epoch: int) -> ServerSpec:
    """The server of env `host.name` for one epoch, on a fresh port of this machine."""
    sections = sections_of(ctx.config(host.run_id), host.name)
    if not sections:
        raise ValueError(f"the run has no env {host.name!r}")
    kind, env = sections[0]
    address = f"tcp://127.0.0.1:{free_port()}"
    scratch = ctx.scratch(f"env-{host.run_id}-{host.index}-{epoch}")
    lag = scratch / "lag.json"
    input: dict[str, Any] = {
        "id": env.id,
        "args": env.args,
        "timeout_s": max(served.timeout_s for _, served in sections) + LONGEST_WAIT_S,
        "path": env.path,
        "log_level": env.log_level,
        "lag": str(lag),
    }

    async def healthy() -> bool:
        return await probe(address, PROBE_S) == "up"

    def start_limit() -> float:
        return max(load_times.start_limit(ctx.store, served) for _, served in sections)

    # Command lines are visible to everyone on the machine.
    file = private_file(scratch / "server.json", json.dumps(input))
    return ServerSpec(
        name=f"env-{host.name}-{epoch}",
        argv=module_command(
            "ratchet.activities.envs.server", "--address", address, "--config", str(file)
        ),
        address=address,
        cwd=scratch,
        probe=healthy,
        # Unbuffered, so that an environment's output is in its log at once.
        env={**loading.process_env(env.path, scratch), "PYTHONUNBUFFERED": "1"},
        start_timeout_s=await asyncio.to_thread(start_limit),
        log=env_log(host.run_id, kind, host.name.rpartition("/")[2]),
        grace_s=GRACE_S,
        lag=lag,
    )
