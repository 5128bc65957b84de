"""Writes the task data of tasksets as JSON lines.

`python -m ratchet.activities.envs.dump < requests.json` runs code of environments in a separate
process. It reads a list of requests with 'id', 'args', 'kind', 'count' and 'out'; at most `count`
tasks are written to 'out', in the taskset's order. A request that fails leaves a `Refusal` at
`refusal_of(out)` instead, and does not keep the process from the next one.
"""

import itertools
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ratchet.activities.envs import loading
from ratchet.activities.runtime.children import end_with_parent
from ratchet.activities.storage import files
from ratchet.activities.storage.store import remedy


@dataclass(frozen=True)
class Refusal:
    """Why a taskset does not load: `unreachable` if a disk or a connection failed, which can be
    fixed outside; else the environment itself did.
    """

    reason: str
    unreachable: bool


def refusal_of(out: str) -> str:
    """Where the refusal of a request that writes to `out` is."""
    return f"{out}.refused"


def os_error_behind(error: BaseException | None) -> OSError | None:
    """The error of the operating system or a connection that `error` is or was raised from.

    Dataset libraries wrap such errors, and connection libraries raise types of their own.
    """
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error


def write(request: dict[str, Any]) -> Refusal | None:
    """Writes to a temporary name first, so that a half-written file is never read."""
    secrets: list[str] = []
    try:
        args = loading.with_variables(request["args"], secrets)
        taskset = loading.load_taskset(request["id"], args, request["kind"])
        tasks = itertools.islice(iter(taskset), request["count"])
        lines = (f"{json.dumps(task.data.model_dump(mode='json'))}\n".encode() for task in tasks)
        files.replace(Path(request["out"]), lines, sync=False)
    except Exception as error:
        # The environment is the user's code: its errors are for the user to read.
        reason = f"taskset {request['id']!r} does not load: {type(error).__name__}: {error}"
        cause = os_error_behind(error)
        if cause is not None and cause is not error:
            reason += f" ({type(cause).__name__}: {cause})"
        if cause is not None:
            reason += f"; {remedy(cause)}"
        text = " ".join(loading.without(secrets, reason).split())
        return Refusal(text, unreachable=cause is not None)
    return None


def main() -> None:
    """Carries out every request."""
    end_with_parent()
    for request in json.load(sys.stdin):
        refusal = Path(refusal_of(request["out"]))
        # That of a process that was killed says nothing about this one.
        refusal.unlink(missing_ok=True)
        if (refused := write(request)) is not None:
            refusal.write_text(json.dumps(asdict(refused)), encoding="utf-8")


if __name__ == "__main__":
    main()
