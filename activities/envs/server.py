"""An env server: `python -m ratchet.activities.envs.server --address tcp://… --config FILE`.

Serves one environment to any number of rollouts, in one process. Tasks come with each request,
so the same server serves training and evaluation. Ends with code 2 and one line of explanation
if the environment does not load. The caller arranges the import path (`loading.process_env`).
"""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from ratchet.activities.envs import loading


class _Masked(logging.Formatter):
    """Lines `<time> <LEVEL> <logger>: <message>`, the time in UTC, without any of `secrets`."""

    def __init__(self, secrets: Sequence[str]) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._secrets = secrets

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        return moment.replace("+00:00", "Z")

    def format(self, record: logging.LogRecord) -> str:
        return loading.without(self._secrets, super().format(record))


def set_up_logs(own: Sequence[str], level: str, secrets: Sequence[str] = ()) -> None:
    """Writes messages of loggers `own` from `level` on, and warnings of all others."""
    threshold = logging.getLevelNamesMapping()[level.upper()]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Masked(secrets))
    logging.basicConfig(level=max(threshold, logging.WARNING), handlers=[handler], force=True)
    for name in own:
        logging.getLogger(name).setLevel(threshold)


def main() -> None:
    """Serves until terminated."""
    parser = argparse.ArgumentParser(description="Serve one environment over ZMQ.")
    parser.add_argument("--address", required=True, help="tcp://host:port to listen on")
    parser.add_argument(
        "--config",
        required=True,
        type=Path,
        help='{"id", "args", "timeout_s", "path", "log_level"} as JSON',
    )
    options = parser.parse_args()
    input = json.loads(options.config.read_text())
    secrets: list[str] = []
    own = loading.own_modules(input["id"], input.get("path"))
    set_up_logs(own, input.get("log_level", "info"))
    from verifiers.v1.serve import EnvServer, serve_env

    try:
        args = loading.with_variables(input["args"], secrets)
        config = loading.server_config(input["id"], args, input["timeout_s"])
        # Built once here only to fail early: serving builds the same.
        EnvServer(config, address="tcp://127.0.0.1:*").frontend.close()
    except Exception as error:
        # The environment is the user's code: its errors are for the user to read.
        logging.getLogger(__name__).debug("environment does not load", exc_info=True)
        reason = loading.without(secrets, f"{type(error).__name__}: {error}")
        print(f"env server: {input['id']!r} does not load: {reason}", file=sys.stderr)
        sys.exit(2)
    serve_env(
        max_workers=1,
        address=options.address,
        config_data=config.model_dump(mode="json"),
        log_setup=partial(set_up_logs, own, input.get("log_level", "info"), secrets),
    )


if __name__ == "__main__":
    main()
