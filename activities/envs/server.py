"""An env server: `python -m ratchet.activities.envs.server --address tcp://… --config FILE`.

Serves one environment to any number of rollouts, in one process. Tasks come with each request,
so the same server serves training and evaluation. Ends with code 2 and one line of explanation
if the environment does not load. The caller arranges the import path (`loading.process_env`).
"""

import argparse
import json
import logging
import sys
from pathlib import Path

from ratchet.activities.envs import loading


def _quiet_logs() -> None:
    logging.basicConfig(
        level=logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        stream=sys.stderr,
    )


def main() -> None:
    """Serves until terminated."""
    parser = argparse.ArgumentParser(description="Serve one environment over ZMQ.")
    parser.add_argument("--address", required=True, help="tcp://host:port to listen on")
    parser.add_argument(
        "--config", required=True, type=Path, help='{"id", "args", "timeout_s"} as JSON'
    )
    options = parser.parse_args()
    input = json.loads(options.config.read_text())
    _quiet_logs()
    from verifiers.v1.serve import EnvServer, serve_env

    secrets: list[str] = []
    try:
        args = loading.with_variables(input["args"], secrets)
        config = loading.server_config(input["id"], args, input["timeout_s"])
        # Built once here only to fail early: what it holds is what serving will hold.
        EnvServer(config, address="tcp://127.0.0.1:*").frontend.close()
    except Exception as error:
        # The environment is the user's code: whatever it raises is theirs to read.
        logging.getLogger(__name__).debug("environment does not load", exc_info=True)
        reason = loading.without(secrets, f"{type(error).__name__}: {error}")
        print(f"env server: {input['id']!r} does not load: {reason}", file=sys.stderr)
        sys.exit(2)
    serve_env(
        max_workers=1,
        address=options.address,
        config_data=config.model_dump(mode="json"),
        log_setup=_quiet_logs,
    )


if __name__ == "__main__":
    main()
