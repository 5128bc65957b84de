"""Says how the env server of a run is started and known to be healthy.

One server a run and env name serves both training and evaluation.
"""

import asyncio
import json
from typing import Any

from ratchet.activities.contracts.hosting import HostInput
from ratchet.activities.contracts.rollouts import LONGEST_WAIT_S
from ratchet.activities.envs import load_times, loading
from ratchet.activities.envs.probe import probe
from ratchet.activities.hosting.process import GRACE_S
from ratchet.activities.hosting.spec import ServerSpec, free_port
from ratchet.activities.runtime.children import module_command
from ratchet.activities.runtime.context import WorkerContext
from ratchet.configs.env import EnvConfig
from ratchet.configs.home import private_file
from ratchet.configs.run import RunConfig

PROBE_S = 3.0


def find_env(config: RunConfig, name: str) -> EnvConfig:
    """The env section called `name`, the training one if there are two."""
    for env in (*config.train.env, *config.eval.env):
        if env.name == name:
            return env
    raise ValueError(f"the run has no env {name!r}")


def longest_timeout(config: RunConfig, name: str) -> float:
    """The longest that a rollout of env `name` may execute, train or eval, in seconds."""
    envs = (*config.train.env, *config.eval.env)
    return max(env.timeout_s for env in envs if env.name == name)


async def env_spec(ctx: WorkerContext, host: HostInput, epoch: int) -> ServerSpec:
    """The server of env `host.name` for one epoch, on a fresh port of this machine."""
    config = ctx.config(host.run_id)
    env = find_env(config, host.name)
    address = f"tcp://127.0.0.1:{free_port()}"
    input: dict[str, Any] = {
        "id": env.id,
        "args": env.args,
        "timeout_s": longest_timeout(config, host.name) + LONGEST_WAIT_S,
    }

    async def healthy() -> bool:
        return await probe(address, PROBE_S) == "up"

    scratch = ctx.scratch(f"env-{host.run_id}-{host.name}-{epoch}")
    # Everyone on the machine may read command lines.
    file = private_file(scratch / "server.json", json.dumps(input))
    return ServerSpec(
        name=f"env-{host.name}-{epoch}",
        argv=module_command(
            "ratchet.activities.envs.server", "--address", address, "--config", str(file)
        ),
        address=address,
        cwd=scratch,
        probe=healthy,
        env=loading.process_env(env.path, scratch),
        start_timeout_s=await asyncio.to_thread(load_times.start_limit, ctx.store, env),
        grace_s=GRACE_S,
    )
