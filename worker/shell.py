"""What a shell needs to find the local stack: `eval "$(python -m ratchet.worker.shell)"`.

Then `ratchet` and `temporal` are on its PATH and know where the stack is. `temporal` learns that
from its own config file: with TEMPORAL_ADDRESS in the shell, `up` would take the server for someone
else's.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from shlex import quote

import tomli_w

from ratchet.configs.home import home_folder
from ratchet.worker.stack import Stack

PROFILE = "temporal.toml"


def exports(home: Path, env: Mapping[str, str] = os.environ) -> list[str]:
    """Lines for a POSIX shell; writes Temporal's config file of the stack under `home`, unless
    TEMPORAL_ADDRESS names another server. Raises ValueError if no stack was started, or if one was
    started with another server that TEMPORAL_ADDRESS does not name here.
    """
    stack = Stack(home)
    if "api" not in stack.record["ports"]:
        raise ValueError(f"no stack was started under {home}: `make up` starts one")
    lines = [
        f'export PATH={quote(str(Path(sys.executable).parent))}:"$PATH"',
        f"export RATCHET_HOME={quote(str(home))}",
    ]
    if not env.get("TEMPORAL_ADDRESS"):
        if not stack.has_own_temporal():
            raise ValueError(
                f"the stack under {home} uses a Temporal server of yours: set TEMPORAL_ADDRESS in "
                "this shell, as it was set for `make up`"
            )
        address = f"127.0.0.1:{stack.record['ports']['temporal']}"
        profile = {"profile": {"default": {"address": address, "namespace": "default"}}}
        (home / PROFILE).write_text(tomli_w.dumps(profile))
        lines.append(f"export TEMPORAL_CONFIG_FILE={quote(str(home / PROFILE))}")
    return lines


def main() -> int:
    """Entry point; returns the exit status."""
    try:
        print("\n".join(exports(home_folder())))
    except ValueError as error:
        print(f"env: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
