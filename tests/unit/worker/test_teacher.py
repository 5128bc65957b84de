"""When the demo starts a teacher, and what the teacher refuses."""

import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ratchet.activities.training.policy import Recipe, digest
from ratchet.configs.load import load, validate
from ratchet.worker import teacher
from ratchet.worker.demo import wants_teacher
from ratchet.worker.stack import StackError

OTHER = {"name": "big", "base_url": "http://elsewhere:8070"}
OURS = {"name": teacher.NAME, "base_url": f"http://127.0.0.1:{teacher.PORT}"}


@pytest.mark.parametrize(
    ("algo", "wanted"),
    [
        ({"type": "grpo"}, False),
        ({"type": "opsd"}, False),
        ({"type": "opd", "teacher": OTHER}, False),
        ({"type": "opd", "teacher": OURS}, True),
        ({"type": "opsd", "teacher": OURS}, True),
        ({"type": "sft", "source": OURS}, True),
    ],
)
def test_who_wants_the_teacher(algo: dict[str, Any], wanted: bool) -> None:
    """Run-wide, or of one env."""
    for train in ({"env": [{"id": "a"}]}, {"env": [{"id": "a"}, {"id": "b", "algo": algo}]}):
        whole = {"algo": algo} if len(train["env"]) == 1 else {}
        assert wants_teacher(validate({"max_steps": 1, "train": train, **whole})) == wanted


@pytest.mark.parametrize("name", ["opd", "sft", "rejection_sampling", "mixed"])
def test_examples_name_the_teacher_as_it_is_served(name: str) -> None:
    config = load(f"configs/examples/{name}.toml", [])
    assert wants_teacher(config) and config.context <= teacher.CONTEXT


def test_it_differs_from_the_policy_in_the_noisy_phase_alone() -> None:
    ours, policy = asdict(teacher.RECIPE), asdict(Recipe())
    assert {name for name in ours if ours[name] != policy[name]} == {"noisy_steps"}


def test_a_taken_port_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refusal = pytest.raises(StackError, match=f"port {port} is taken.*PORT=")
        with refusal, teacher.running(tmp_path, lambda text: None, port):
            pass
    assert list(tmp_path.iterdir()) == []


def test_it_is_bound_to_no_core_and_has_no_control_endpoints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(12)))
    env = teacher.server_env("", cpu=True)
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind" and env["OMP_NUM_THREADS"] == "4"
    assert "VLLM_SERVER_DEV_MODE" not in env and "VLLM_API_KEY" not in env
    argv = teacher.server_argv(Path("/weights"), "teacher", 8070, context=512, cpu=True)
    assert "--enable-scale-out" not in argv
    assert argv[argv.index("--host") + 1] == "127.0.0.1"
    assert teacher.server_env("sk-1", cpu=False)["VLLM_API_KEY"] == "sk-1"


def test_weights_that_are_there_are_not_made_again(tmp_path: Path) -> None:
    said: list[str] = []
    key = digest(teacher.RECIPE, teacher.ENV, teacher.SEED)
    folder = tmp_path / "teacher" / f"weights-{key[:16]}"
    folder.mkdir(parents=True)
    assert teacher.weights(tmp_path, said.append) == folder and said == []
    assert list(tmp_path.rglob("*")) == [folder.parent, folder]
