"""Runs an env server without a worker: `python -m ratchet.activities.envs.by_hand FILE`.

FILE is JSON, {"bind"} and the config of an env server ({"id", "args", "timeout_s", "path",
"log_level"}); `ratchet env-server` writes it, since command lines are visible to everyone on the
machine. The server gets the same import path and environment variables as a worker's server. Its
log goes to standard error.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from ratchet.activities.envs import loading
from ratchet.activities.runtime.children import child_env, hide_rooms, module_command


def main(file: str) -> None:
    """Does not return: the server replaces this process."""
    hide_rooms()
    input = json.loads(Path(file).read_text())
    scratch = Path(tempfile.mkdtemp(prefix="ratchet-env-server-"))
    argv = module_command(
        "ratchet.activities.envs.server", "--address", input["bind"], "--config", file
    )
    own = {**loading.process_env(input["path"], scratch), "PYTHONUNBUFFERED": "1"}
    os.chdir(scratch)
    os.execve(argv[0], argv, child_env(own))


if __name__ == "__main__":
    main(sys.argv[1])
