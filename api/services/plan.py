"""What a run of a config would do, in numbers: what a dry run answers. Pure."""

import math

from ratchet.activities.contracts.hosting import planned_hosts
from ratchet.api.schemas.plan import Plan, PlannedEval
from ratchet.configs.run import RunConfig


def plan_of(config: RunConfig) -> Plan:
    """The plan of a valid config."""
    batch = config.train.batch_size
    groups: dict[str, float] | None = None
    if batch:
        total = sum(env.ratio for env in config.train.env)
        mean = sum(env.ratio / total * config.train.size_of(env) for env in config.train.env)
        groups = {env.name: round(batch / mean * env.ratio / total, 2) for env in config.train.env}
    evals = []
    for env in config.eval.env:
        interval = config.eval_interval(env.name)
        evals.append(
            PlannedEval(
                env=env.name,
                interval=interval,
                count=math.ceil(config.max_steps / interval) + (not config.eval.skip_first_step),
                rollouts=config.eval_num_examples(env.name) * config.eval_group_size(env.name),
            )
        )
    servers: dict[str, list[str]] = {}
    for host in planned_hosts(config):
        if host.managed:
            servers.setdefault(host.role, []).append(host.name)
    return Plan(
        steps=config.max_steps,
        rollouts_per_step=batch,
        groups_per_step=groups,
        train_rollouts=batch * config.max_steps if batch else None,
        permits=config.permits,
        algorithms={env.name: config.algorithm(env.name).type for env in config.train.env},
        evals=evals,
        checkpoints=math.ceil(config.max_steps / config.checkpoint.interval),
        servers=servers,
    )
