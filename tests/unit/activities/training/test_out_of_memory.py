"""A trainer without memory is lost, with the keys that help; a workflow ends it the second time."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from temporalio.exceptions import ApplicationError

from ratchet.activities.contracts import names
from ratchet.activities.runtime import machine
from ratchet.activities.storage import keys
from ratchet.activities.storage.store import ArtifactStore
from ratchet.activities.training.activities import _trainer_errors
from ratchet.activities.training.client import OutOfMemory, TrainerFailed, TrainerGone
from ratchet.activities.training.memory import Shape, exhausted
from ratchet.activities.training.process import TrainerServer, memory_failure
from tests.unit.activities.training.test_check import config
from tests.unit.activities.training.test_memory import LARGE, SIZES


def cpu_error() -> Exception:
    """What torch raises on a CPU, where it has no type of its own."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    return caught.value


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("a batch too long"), False),
    ],
)
def test_no_memory_has_many_types(error: Exception, is_memory: bool) -> None:
    assert memory_failure(error) == is_memory
    assert memory_failure(cpu_error())


async def test_the_process_answers_that_it_has_no_memory() -> None:
    class Backend:
        step = None

        def save(self, step: int, out: Path) -> None:
            torch.empty(2**60, dtype=torch.uint8)

    server = TrainerServer(Backend())  # type: ignore[arg-type]
    answer = await server._answer({"id": 1, "op": "save", "args": {"step": 1, "out": "/x"}})
    assert answer["error"]["type"] == "OutOfMemory" and "save" in answer["error"]["message"]

    def fail(step: int, out: Path) -> None:
        raise MemoryError

    server.trainer.save = fail  # type: ignore[method-assign]
    answer = await server._answer({"id": 2, "op": "save", "args": {"step": 1, "out": "/x"}})
    assert answer["error"] == {**answer["error"], "type": "OutOfMemory"}
    assert answer["error"]["message"] == "save: MemoryError"


def test_what_helps_is_named_with_what_it_takes() -> None:
    said = exhausted(LARGE, config({}), "CUDA out of memory", room=2**35, gpu=True)
    assert "CUDA out of memory" in said and "32.0 GiB" in said
    for key in (
        "trainer.activation_checkpointing = true (",
        "trainer.micro_batch_tokens",
        "seq_len",
    ):
        assert key in said
    # What is set already is no remedy.
    least: dict[str, Any] = {"activation_checkpointing": True, "micro_batch_tokens": 256}
    said = exhausted(LARGE, config({}, **least), "x", room=2**35, gpu=True)
    assert "activation_checkpointing" not in said and "a shorter trainer.seq_len" in said
    unknown = exhausted(None, config({}), "x", room=2**35, gpu=False)
    assert "trainer.micro_batch_tokens (now" in unknown


@pytest.mark.parametrize("killed", [0, 1])
def test_a_trainer_without_memory_is_lost_with_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: int
) -> None:
    store = ArtifactStore(f"file://{tmp_path}/store")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text(json.dumps(SIZES))
    store.put_folder(keys.weights("r", 0), tmp_path / "weights", attempt="t")
    kills = [5, 5 + killed]
    monkeypatch.setattr(machine, "out_of_memory_kills", lambda: kills.pop(0))
    with pytest.raises(ApplicationError) as caught, _trainer_errors(store, "r", config({})):
        raise TrainerGone("closed its socket during 'step'")
    assert caught.value.type == names.TRAINER_LOST and caught.value.non_retryable
    assert caught.value.message.startswith(names.OUT_OF_MEMORY) == bool(killed)
    assert ("trainer.micro_batch_tokens" in caught.value.message) == bool(killed)
    kills = [5, 5]
    with pytest.raises(ApplicationError) as caught, _trainer_errors(store, "r", config({})):
        raise OutOfMemory("step: CUDA out of memory")
    assert caught.value.type == names.TRAINER_LOST and "CUDA" in caught.value.message
    assert caught.value.message.startswith(names.OUT_OF_MEMORY)
    kills = [5, 5]
    with pytest.raises(TrainerFailed), _trainer_errors(store, "r", config({})):
        raise TrainerFailed("RuntimeError", "something else")


def test_the_kernel_counts_what_it_kills(tmp_path: Path) -> None:
    processes, group = tmp_path / "cgroup", tmp_path / "root" / "ratchet.slice"
    processes.write_text("0::/ratchet.slice\n")
    assert machine.out_of_memory_kills(processes, tmp_path / "root") == 0
    group.mkdir(parents=True)
    (group / "memory.events").write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert machine.out_of_memory_kills(processes, tmp_path / "root") == 2
    assert machine.out_of_memory_kills(tmp_path / "none", tmp_path / "none") == 0


def test_a_known_shape_is_read() -> None:
    assert Shape.read(SIZES) is not None
