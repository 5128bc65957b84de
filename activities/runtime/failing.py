"""What failures of storage look like to a workflow: an interceptor around every activity.

Invariant: a failure that another attempt would only repeat is never retried by Temporal, so that
the workflow hears of it at once: STORE_FAILED when the store or a scratch disk has to be mended, or
this worker replaced by one of the build that wrote what it is to read; CORRUPT when an artifact
cannot be read whatever is mended.
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
"""What an operating system says of a disk, wherever it lies; other errors may be about a socket."""


def final(kind: str, message: object) -> ApplicationError:
    """A failure of a type in `names` that another attempt would only repeat."""
    return ApplicationError(str(message), type=kind, non_retryable=True)


def failure_of(error: BaseException, where: str) -> ApplicationError | None:
    """The failure that a workflow is told of, if `error` is one of storage. `where` names the work
    that met it.
    """
    if isinstance(error, StoreUnavailable | NewerSchema):
        return final(names.STORE_FAILED, error)
    if isinstance(error, OSError) and error.errno in DISK_FAILURES:
        return final(names.STORE_FAILED, f"{where} cannot use its disk: {error}; {remedy(error)}")
    if isinstance(error, CorruptArtifact):
        return final(names.CORRUPT, f"{error}; {error.remedy}")
    return None


class StorageFailures(Interceptor):
    """Turns failures of storage into those of `failure_of`, in every activity of a worker."""

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
