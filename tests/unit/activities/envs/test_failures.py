"""What a failing reward function says, from verifiers' record of it to the record of an eval."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from temporalio.testing import ActivityEnvironment
from verifiers.v1.errors import TaskError

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.rollouts import (
    EvalResult,
    FinalizeEvalInput,
    FinalizeGroupInput,
    GroupWork,
)
from ratchet.activities.envs.failures import by_type, commonest, frames_of, text_of
from ratchet.activities.envs.samples import Reading, failed, from_episode, to_document
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.storage import keys
from tests.groups import rollout_activities
from tests.unit.activities.envs.test_samples import _document, _episode, _node

ENV = """
import verifiers.v1 as vf

def deeper(reply):
    return reply[10]

def deep(reply):
    return deeper(reply)

class OwnTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def quality(self, trace: vf.Trace) -> float:
        return {returns}
"""


async def _scored(folder: Path, returns: str) -> dict[str, Any]:
    """The stored rollout whose reward function returns so."""
    path = folder / "own_env.py"
    path.write_text(ENV.format(returns=returns))
    spec = importlib.util.spec_from_file_location("own_env", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["own_env"] = module
    try:
        spec.loader.exec_module(module)
        wire = _episode([_node(None, [1]), _node(0, [2], 1)], rewards={})
        trace, task = wire.traces[0], module.OwnTask(vf.TaskData(prompt="p"))
        try:
            await task.score(trace)
        except TaskError as error:
            # This frame is no user's: a server has none of its kind.
            assert error.__traceback__ is not None
            trace.record_error(error.with_traceback(error.__traceback__.tb_next))
    finally:
        del sys.modules["own_env"]
    return to_document(from_episode(wire, Reading()))


async def test_a_reward_function_that_throws_is_found_by_its_lines(tmp_path: Path) -> None:
    error = (await _scored(tmp_path, "deep([])"))["error"]
    assert (
        error["type"] == "TaskError" and "IndexError: list index out of range" in error["message"]
    )
    assert [(Path(at["file"]).name, at["line"], at["function"]) for at in error["frames"]] == [
        ("own_env.py", 13, "quality"),
        ("own_env.py", 8, "deep"),
        ("own_env.py", 5, "deeper"),
    ]
    assert "without a value" not in error["message"], "its lines say it better"
    assert error["frames"][0]["file"] == str(tmp_path / "own_env.py")
    assert text_of(error).endswith("own_env.py:8 in deep, own_env.py:5 in deeper)")


@pytest.mark.parametrize(
    ("returns", "kind", "said"),
    [
        ("float('nan')", "BadReward", "reward 'quality' returned nan"),
        ("'high'", "TaskError", "'high' (without a value: quality)"),
    ],
)
async def test_a_reward_that_is_no_number_is_named(
    tmp_path: Path, returns: str, kind: str, said: str
) -> None:
    error = (await _scored(tmp_path, returns))["error"]
    assert error["type"] == kind and said in error["message"]
    assert "frames" not in error, "no line of verifiers helps"


async def test_the_stored_error_holds_no_secret(tmp_path: Path) -> None:
    error = (await _scored(tmp_path, "{}['password=hunter2']"))["error"]
    assert "KeyError: 'password=[hidden]'" in error["message"] and "hunter2" not in str(error)
    assert "hunter2" not in str(to_document(failed("EnvServer", "OPENAI_API_KEY=hunter2")))


def test_frames_of_verifiers_and_of_python_are_left_out() -> None:
    lines = [
        ("/usr/lib/python3.11/asyncio/runners.py", "run"),
        ("/venv/lib/python3.11/site-packages/verifiers/v1/task.py", "score"),
        ("/venv/lib/python3.11/site-packages/their_env/env.py", "score"),
        ("<frozen importlib._bootstrap>", "_load"),
    ]
    text = "".join(f'  File "{file}", line 3, in {name}\n    code\n' for file, name in lines)
    assert [frame["file"] for frame in frames_of(text)] == [lines[2][0]]
    only = "".join(f'  File "{file}", line 3, in {name}\n' for file, name in lines[:2])
    assert len(frames_of(only)) == 2, "where none is theirs, all may help"
    assert frames_of(None) == frames_of("") == []


def test_an_error_in_one_line() -> None:
    plain = {"type": "Timeout", "message": "x" * 900}
    assert text_of(plain) == f"Timeout: {'x' * 291}"
    at = {"file": "C:\\envs\\e.py", "line": 7, "function": "f"}
    long = text_of({**plain, "frames": [at]})
    assert long.endswith("xx (at e.py:7 in f)") and len(long) == 300
    errors = [plain, {"type": "A", "message": "a"}, {"type": "A", "message": "a"}]
    assert (by_type(errors), commonest(errors)) == ({"A": 2, "Timeout": 1}, ("A: a", []))
    assert (by_type([]), commonest([])) == ({}, ("", []))


# -- evals ----------------------------------------------------------------------------------


async def _eval(
    folder: Path, groups: list[list[dict[str, Any]]], missing: list[int] | None = None
) -> tuple[dict[str, Any], EvalResult]:
    """The record and the result of an eval of these groups; those `missing` come last."""
    ctx = WorkerContext(home=folder, store_url=str(folder / "store"), own_queue="q")
    rooms, run, size = rollout_activities(ctx), ActivityEnvironment().run, len(groups[0])
    config = {"max_steps": 1, "train": {"env": [{"id": "e"}]}, "eval": {"env": [{"id": "e"}]}}
    ctx.store.put_json(keys.config("r"), config)
    for example, rollouts in enumerate(groups):
        work = GroupWork(f"eval/0-0/e/{example}", "eval", "e", example, size)
        for index, rollout in enumerate(rollouts):
            ctx.store.put_json(keys.rollout("r", work.group, index), rollout)
        await run(rooms.finalize_group, FinalizeGroupInput("r", work, 0))
    examples = len(groups) + len(missing or [])
    asked = FinalizeEvalInput("r", "0-0/e", "e", 0, examples, size, missing or [])
    key, read, get = keys.eval_record("r", "0-0/e"), [], ctx.store.get

    def watched(ref: ArtifactRef, *, schema: int = 1) -> bytes:
        read.append(ref.key)
        return get(ref, schema=schema)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ctx.store, "get", watched)
        result: EvalResult = await run(rooms.finalize_eval, asked)
        assert key not in read and len(read) >= len(groups), "it has just been written"
        assert await run(rooms.finalize_eval, asked) == result and read.count(key) == 1
    ref = ctx.store.committed(key)
    assert ref is not None
    return ctx.store.get_json(ref), result


async def test_an_eval_of_which_everything_failed_has_no_reward(tmp_path: Path) -> None:
    broken = {**await _scored(tmp_path, "deep([])"), "temperature": 1.0}
    record, result = await _eval(tmp_path, [[broken] * 4] * 4)
    assert (record["rollouts"], record["errored"], record["cancelled"]) == (16, 16, 0)
    assert record["reward_mean"] is None and result.reward_mean is None, "0 would be a result"
    assert record["valid_rate"] == record["metrics"]["valid_rate"] == 0.0
    assert record["errors"] == {"TaskError": 16}
    assert "list index out of range" in record["error"] and "own_env.py:5" in record["error"]
    assert record["frames"] == broken["error"]["frames"] and len(record["frames"]) == 3
    assert (result.errored, result.error, result.alike) == (16, record["error"], True)


async def test_what_was_given_up_is_no_error_of_an_eval(tmp_path: Path) -> None:
    """Of 3 groups of 2: one good, one with an error and one that never finished, one missing."""
    boom = {**to_document(failed("Boom", "x")), "temperature": 1.0}
    lost = {**to_document(failed("Lost", "its engine is gone")), "temperature": 1.0}
    record, result = await _eval(tmp_path, [[_document(1.0), _document(0.0)], [boom, lost]], [2])
    assert (record["rollouts"], record["errored"], record["cancelled"]) == (6, 1, 3)
    assert (record["valid_rate"], record["reward_mean"]) == (2 / 6, 0.5)
    assert record["rewards"] == [[1.0, 0.0], [], []], "by example, of those that have one"
    assert record["metrics"]["errored_count"] == 1 and record["metrics"]["cancelled_count"] == 3
    assert (result.cancelled, result.alike) == (3, False)
