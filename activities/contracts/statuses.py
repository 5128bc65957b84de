"""The statuses of a run, as its memo, the API and the client name them."""

from typing import Literal, get_args

RunStatus = Literal[
    "queued",
    "starting",
    "running",
    "pausing",
    "paused",
    "stopping",
    "succeeded",
    "failed",
    "cancelled",
]
STATUSES: tuple[str, ...] = get_args(RunStatus)
ENDED: tuple[RunStatus, ...] = ("succeeded", "failed", "cancelled")
