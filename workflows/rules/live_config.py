"""The limits and train-env ratios that follow from a changed config. Pure."""

from ratchet.configs.run import RunConfig
from ratchet.workflows.protocol.state import Limits, Shares


def ratios_of(config: RunConfig) -> dict[str, float]:
    """The ratios by which the train envs take turns."""
    return {env.name: env.ratio for env in config.train.env}


def shares_after(
    shares: list[Shares], before: RunConfig, after: RunConfig, start: int
) -> list[Shares]:
    """The shares once ratios may have changed from train counter `start` on."""
    if ratios_of(before) == ratios_of(after):
        return shares
    kept = [share for share in shares or [Shares(0, ratios_of(before))] if share.start < start]
    return [*kept, Shares(start, ratios_of(after))]


def limits_of(config: RunConfig, before: Limits | None = None) -> Limits:
    """The limits that a config sets; 'auto' permits continue from those in `before`."""
    auto = config.permits is None
    first = config.dispatch.concurrency.initial or config.largest_part
    permits = config.permits or (before.permits if before else first)
    return Limits(
        permits=max(permits, config.largest_part),
        auto=auto,
        tasks_per_minute=config.dispatch.tasks_per_minute,
    )
