"""How storage failures appear to a workflow: an interceptor around every activity.

Invariant: Temporal never retries a failure that another attempt would only repeat, so that the
workflow receives it at once: STORE_FAILED when someone must fix the store or a scratch disk, or
replace this worker by one of the build that wrote the data; CORRUPT when an artifact cannot be read
in any case.
"""

import errno
from typing import Any

from temporalio import activity
from temporalio.exceptions import ApplicationError
from temporalio.worker import ActivityInboundInterceptor, ExecuteActivityInput, Interceptor

from ratchet.activities.contracts import names
from ratchet.activities.storage.store import CorruptArtifact, StoreUnavailable, remedy
from ratchet.configs.versions import NewerSchema

DISK_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""Errors that the operating system raises about disks; other errors may be about a socket."""


def final(kind: str, message: object) -> ApplicationError:
    """A failure, of a type in `names`, that another attempt would only repeat."""
    return ApplicationError(str(message), type=kind, non_retryable=True)


def failure_of(error: BaseException, where: str) -> ApplicationError | None:
    """The failure that a workflow receives, if `error` is about storage. `where` names the work
    that raised it.
    """
    if isinstance(error, StoreUnavailable | NewerSchema):
        return final(names.STORE_FAILED, error)
    if isinstance(error, OSError) and error.errno in DISK_FAILURES:
        return final(names.STORE_FAILED, f"{where} cannot use its disk: {error}; {remedy(error)}")
    if isinstance(error, CorruptArtifact):
        return final(names.CORRUPT, f"{error}; {error.remedy}")
    return None


class StorageFailures(Interceptor):
    """Turns storage failures into those of `failure_of`, in every activity of a worker."""

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        """Wraps the activities of a worker."""
        return _Inbound(next)


class _Inbound(ActivityInboundInterceptor):
    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        try:
            return await super().execute_activity(input)
        except Exception as error:
            failure = failure_of(error, activity.info().activity_type)
            if failure is None:
                raise
            raise failure from error
