"""Groups of rollouts in tests: their scoring, and the activities without a Dispatch."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from temporalio.client import Client

from ratchet.activities.contracts.rollouts import GroupWork
from ratchet.activities.rollouts import groups
from ratchet.activities.rollouts.activities import RolloutActivities
from ratchet.activities.rollouts.releases import Releases
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.scoring.algorithms import Algorithm, Grpo
from ratchet.configs.algorithm import GrpoConfig


def score_group(
    work: GroupWork,
    rollouts: Sequence[dict[str, Any] | None],
    version: int,
    lost: str,
    algorithm: Algorithm | None = None,
    judge: groups.Judge | None = None,
    **options: Any,
) -> dict[str, Any]:
    """`groups.scored`, by default group-relative in training; not for a running event loop."""
    used = algorithm or (Grpo(GrpoConfig(), seq_len=1) if work.kind == "train" else None)
    return asyncio.run(groups.scored(work, rollouts, version, lost, used, judge, **options))


class _NoDispatch:
    """A client whose workflows hear nothing."""

    def get_workflow_handle(self, workflow_id: str) -> "_NoDispatch":
        return self

    async def signal(self, *args: object, **options: object) -> None:
        pass


def no_releases() -> Releases:
    """Reports that reach nobody, so that only the end of an activity frees its permits."""
    return Releases(cast(Client, _NoDispatch()))


def rollout_activities(ctx: WorkerContext) -> RolloutActivities:
    """Those of a worker whose reports reach nobody."""
    return RolloutActivities(ctx, no_releases())
