"""A short run on the whole real stack, with everything a user does to it on the way.

In mid-run the API, the workflow worker and the rollout worker are killed and started again, and
every server that the run keeps at one time; signals come from Temporal's own CLI.
"""

from dataclasses import dataclass
from typing import Any

from ratchet.activities.storage.store import ArtifactStore
from ratchet.worker.stack import Addresses, Stack
from tests.e2e.driving import ENDED, ENGINE, cli_signal, get, kill, kill_server, launch, wait_until

STEPS = 12
SERVERS = {
    "env": "ratchet.activities.envs.server",
    "trainer": "ratchet.activities.training.process",
    "engine": ENGINE,
}


@dataclass
class Trained:
    """A run that has ended, what the API said of it then, and the store that it lies in."""

    where: Addresses
    id: str
    said: Any
    store: ArtifactStore


def train(stack: Stack) -> Trained:
    """Brings the stack up, and a run to its end through kills and signals."""
    where = stack.up()
    kept = ["retention.weights=all", "retention.batches=all"]
    run_id = launch(where, "reverse_text", f"max_steps={STEPS}", "eval.interval=6", *kept)
    wait_until(where, run_id, lambda run: run["step"] >= 1)
    kill(stack, "worker-orchestrator")
    kill(stack, "api")
    assert stack.up() == where
    wait_until(where, run_id, lambda run: run["step"] >= 2)
    kill(stack, "worker-rollout")
    stack.up()
    step = get(where, f"/v1/runs/{run_id}")["step"]
    for server in SERVERS.values():
        kill_server(stack, server)
    wait_until(where, run_id, lambda run: all(run["restarts"][role] >= 1 for role in SERVERS))
    wait_until(where, run_id, lambda run: run["step"] > step)
    cli_signal(where, run_id, "no_such_signal")
    cli_signal(where, run_id, "trigger_eval", "--input", '{"envs": ["reverse-text"]}')
    said = wait_until(where, run_id, lambda run: run["status"] in ENDED)
    return Trained(where, run_id, said, ArtifactStore(f"file://{stack.home}/store"))
