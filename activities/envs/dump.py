"""Writes a taskset's task data as JSON lines: `python -m activities.envs.dump < request.json`.

Runs an environment's code in a process of its own. The request has 'id', 'args', 'kind', 'count'
and 'out'; at most `count` tasks are written, in the taskset's order. Ends with code 2 and one
line of explanation if the taskset does not load.
"""

import itertools
import json
import os
import sys

from activities.envs import loading


def main() -> None:
    """Writes to a temporary name first, so that a half-written file is never read."""
    request = json.load(sys.stdin)
    try:
        taskset = loading.load_taskset(request["id"], request["args"], request["kind"])
        part = f"{request['out']}.part-{os.getpid()}"
        with open(part, "w", encoding="utf-8") as file:
            for task in itertools.islice(iter(taskset), request["count"]):
                file.write(json.dumps(task.data.model_dump(mode="json")) + "\n")
    except Exception as error:
        # The environment is the user's code: whatever it raises is theirs to read.
        reason = f"{type(error).__name__}: {error}"
        print(f"taskset {request['id']!r} does not load: {reason}", file=sys.stderr)
        sys.exit(2)
    os.replace(part, request["out"])


if __name__ == "__main__":
    main()
