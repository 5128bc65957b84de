"""What the rollouts bench makes of command lines, CPU seconds and records of steps."""

import sys

import pytest

from ratchet.activities.runtime.children import module_command
from ratchet.api.schemas.metrics import EvalRecord, MetricsRow
from ratchet.worker.temporal_server import TEMPORAL
from tests.bench.rollouts import Sample, at, by_role, delivered, per_rollout, role_of


@pytest.mark.parametrize(
    ("command", "role"),
    [
        (module_command("ratchet.worker", "--roles", "orchestrator"), "orchestrator"),
        (module_command("ratchet.worker", "--roles", "rollout"), "rollout worker"),
        (module_command("ratchet.worker", "--roles", "inference"), "inference worker"),
        (module_command("ratchet.worker", "--roles", "trainer"), "trainer worker"),
        (module_command("ratchet.worker", "--roles", "env"), "env worker"),
        (module_command("ratchet.api", "--port", "8080"), "API"),
        (module_command("ratchet.activities.envs.server", "--address", "tcp://x"), "env server"),
        (module_command("ratchet.activities.envs.check"), "task loading"),
        (module_command("ratchet.activities.envs.dump"), "task loading"),
        (module_command("ratchet.activities.training.process", "--port", "1"), "trainer"),
        (module_command("ratchet.activities.training.prepare", "--out", "x"), "model checks"),
        (module_command("vllm.entrypoints.openai.api_server", "--host", "x"), "engine API"),
        (["VLLM::EngineCore"], "engine core"),
        ([str(TEMPORAL), "server", "start-dev"], "Temporal"),
        ([sys.executable, "-I", "-S", "/x/activities/hosting/keeper.py", "/r.json"], "keepers"),
        ([sys.executable, "-c", "from multiprocessing.resource_tracker import main"], "other"),
    ],
)
def test_every_process_of_a_stack_has_its_role(command: list[str], role: str) -> None:
    # As /proc has it, with spaces for zeros.
    assert role_of(" ".join(command) + " ") == role


def test_processes_of_a_role_are_added_up() -> None:
    two = [("VLLM::EngineCore", 1.0), ("VLLM::EngineCore", 2.0), ("x", 0.5)]
    assert by_role(two) == {"engine core": 3.0, "other": 0.5}


SAMPLES = [Sample(10.0, {"API": 1.0}), Sample(12.0, {"API": 2.0, "trainer": 4.0})]


def test_costs_between_two_samples_are_in_proportion() -> None:
    assert at(SAMPLES, 11.0) == {"API": 1.5, "trainer": 2.0}
    assert at(SAMPLES, 9.0) == {"API": 1.0}
    assert at(SAMPLES, 13.0) == {"API": 2.0, "trainer": 4.0}


def test_costs_are_per_rollout_and_the_dearest_first() -> None:
    found = per_rollout(SAMPLES, 10.0, 12.0, 10)
    assert list(found.items()) == [("trainer", 400.0), ("API", 100.0), ("all", 500.0)]


def test_the_steady_part_counts_batches_and_the_evals_between() -> None:
    steps = [
        MetricsRow(step=step, time=100.0 + step, metrics={"progress/rollouts": 64.0 * step})
        for step in (1, 2, 3, 4)
    ]
    evals = [
        EvalRecord.model_validate({"epoch": "e", "step": step, "rollouts": 32})
        for step in (0, 2, 4)
    ]
    assert delivered(steps, evals) == (102.0, 104.0, 2 * 64 + 32)
