"""`ratchet env-server`: serves an environment for `env.address` of a config. Needs no API.

The client imports nothing of a server: the server is another program of this package, whose
dependencies come with the extra `rollout`.
"""

import importlib.util
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from ratchet.api.client.options import REFUSED
from ratchet.configs.env import ADDRESS, LogLevel
from ratchet.configs.home import private_file
from ratchet.configs.load import ConfigError, parse, toml_value

NEEDED, EXTRA = "verifiers", "rollout"
BACKSTOP_S = 86_400.0


def read_args(text: str) -> dict[str, Any]:
    """Arguments of a taskset from JSON, a TOML table, or '@' and the name of a file with either.

    Raises typer.BadParameter.
    """
    try:
        if text.startswith("@"):
            file = Path(text[1:])
            data = parse(file.read_text(), media="json" if file.suffix == ".json" else "toml")
        else:
            data = toml_value(text) if "=" in text else json.loads(text)
    except (OSError, ConfigError, ValueError) as error:
        raise typer.BadParameter(f"cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise typer.BadParameter(
            """must be a table: '{"n": 3}' as JSON, '{ n = 3 }' as TOML, or @FILE (.json, .toml)"""
        )
    return data


def _address(value: str) -> str:
    if not re.fullmatch(ADDRESS, value):
        raise typer.BadParameter("must have the form tcp://host:port, such as tcp://0.0.0.0:5000")
    return value


def env_server(
    env_id: Annotated[str, typer.Option("--id", help="verifiers id of the taskset.")],
    args: Annotated[
        str,
        typer.Option(
            help="Arguments of the taskset as JSON or a TOML table, or @FILE; secrets as "
            '{"env_var": "NAME"}, which names a variable of this process.'
        ),
    ] = "{}",
    bind: Annotated[
        str, typer.Option(callback=_address, help="Address to listen on; 0.0.0.0 is every network.")
    ] = "tcp://127.0.0.1:5000",
    path: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="Folder with its module, if it is not installed."
        ),
    ] = None,
    log_level: Annotated[
        LogLevel, typer.Option(help="Lowest level that the environment's own loggers write.")
    ] = "info",
    timeout_s: Annotated[
        float, typer.Option(min=1, help="Time limit of a rollout whose client is gone, in seconds.")
    ] = BACKSTOP_S,
) -> None:
    """Serve one environment until interrupted; a config refers to it by `address`.

    It has no authentication: everyone who reaches it may run its rollouts.
    """
    if importlib.util.find_spec(NEEDED) is None:
        print(
            f"ratchet: env-server needs the extra {EXTRA!r}, which is not installed here: "
            f"pip install 'ratchet-rl[{EXTRA}]' (from a checkout: pip install '.[{EXTRA}]')",
            file=sys.stderr,
        )
        raise typer.Exit(REFUSED)
    given = {
        "bind": bind,
        "id": env_id,
        "args": read_args(args),
        "timeout_s": timeout_s,
        "path": str(path.resolve()) if path else None,
        "log_level": log_level,
    }
    folder = Path(tempfile.mkdtemp(prefix="ratchet-env-server-"))
    file = private_file(folder / "server.json", json.dumps(given))
    sys.stdout.flush()
    # Referred to by name, not imported: the client contains no server code.
    argv = [sys.executable, "-P", "-m", "ratchet.activities.envs.by_hand", str(file)]
    os.execv(argv[0], argv)
