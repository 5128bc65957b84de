"""Writes a taskset's task data as JSON lines.

`python -m ratchet.activities.envs.dump < request.json` runs an environment's code in a separate
process. The request has 'id', 'args', 'kind', 'count' and 'out'; at most `count` tasks are written,
in the taskset's order. If that fails, it ends with one line of explanation: with code UNREACHABLE
if a disk or a connection failed, which can be fixed outside, and with code BROKEN if the
environment itself did.
"""

import contextlib
import itertools
import json
import os
import sys

from ratchet.activities.envs import loading
from ratchet.activities.runtime.children import end_with_parent
from ratchet.activities.storage.store import remedy

BROKEN = 2
UNREACHABLE = 3


def refusal(error: BaseException | None) -> OSError | None:
    """The error of the operating system or a connection that `error` is or was raised from.

    Dataset libraries wrap such errors, and connection libraries raise types of their own.
    """
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error


def main() -> None:
    """Writes to a temporary name first, so that a half-written file is never read."""
    end_with_parent()
    request = json.load(sys.stdin)
    part = f"{request['out']}.part-{os.getpid()}"
    secrets: list[str] = []
    try:
        args = loading.with_variables(request["args"], secrets)
        taskset = loading.load_taskset(request["id"], args, request["kind"])
        with open(part, "w", encoding="utf-8") as file:
            for task in itertools.islice(iter(taskset), request["count"]):
                file.write(json.dumps(task.data.model_dump(mode="json")) + "\n")
        os.replace(part, request["out"])
    except Exception as error:
        with contextlib.suppress(OSError):
            os.unlink(part)
        # The environment is the user's code: its errors are for the user to read.
        reason = f"taskset {request['id']!r} does not load: {type(error).__name__}: {error}"
        cause = refusal(error)
        if cause is not None and cause is not error:
            reason += f" ({type(cause).__name__}: {cause})"
        if cause is not None:
            reason += f"; {remedy(cause)}"
        print(" ".join(loading.without(secrets, reason).split()), file=sys.stderr)
        sys.exit(BROKEN if cause is None else UNREACHABLE)


if __name__ == "__main__":
    main()
