"""Tasks that cannot be read: whose fault it is, and what a workflow hears."""

from pathlib import Path
from typing import Any, cast

import pytest
from temporalio.exceptions import ApplicationError

from ratchet.activities.contracts import names
from ratchet.activities.contracts.rollouts import Kind
from ratchet.activities.rollouts import tasks
from ratchet.activities.rollouts.tasks import TaskLibrary
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.storage import keys
from ratchet.activities.storage.store import StoreUnavailable
from ratchet.configs.load import validate
from tests.unit.activities.envs.test_check import OWN_ENV

FAILS = """
from pathlib import Path

def refuse():
    if Path(__file__).with_name("repaired").exists():
        return
    {failure}
"""
FULL = 'raise OSError(28, "No space left on device")'
WRAPPED = """
    try:
        raise ConnectionError("hub unreachable")
    except ConnectionError as error:
        raise RuntimeError("An error occurred while generating the data set") from error
"""
BROKEN = 'raise KeyError("answer")'
HANGS = "import time; time.sleep(600)"


def library(tmp_path: Path, failure: str) -> TaskLibrary:
    """Of a run whose env fails in its second task."""
    env = OWN_ENV.format(infinite=False).replace('print("loading")', "pass")
    env = env.replace("            n += 1", "            n += 1\n            refuse()")
    (tmp_path / "own_env.py").write_text(env + FAILS.format(failure=failure))
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path / "store"), own_queue="q")
    own: dict[str, Any] = {"id": "own-env", "path": str(tmp_path)}
    config = validate({"max_steps": 1, "train": {"env": [own]}})
    ctx.store.put_json(keys.config("r"), config.model_dump(mode="json"))
    return TaskLibrary(ctx)


@pytest.mark.timeout(240)
@pytest.mark.nightly
async def test_what_can_be_put_right_is_waited_for(tmp_path: Path) -> None:
    found = library(tmp_path, FULL)
    said = r"'own-env' does not load: OSError: .*No space.*; free some space"
    with pytest.raises(StoreUnavailable, match=said):
        await found.task("r", "train", "own-env", 0)
    assert list((tmp_path / "scratch" / "tasks-r").glob("*.jsonl*")) == [], "nothing is left"
    (tmp_path / "repaired").touch()
    assert (await found.task("r", "train", "own-env", 0))["prompt"] == "0"


@pytest.mark.timeout(120)
async def test_tasks_are_read_by_index_to_the_last(tmp_path: Path) -> None:
    found = library(tmp_path, BROKEN)
    (tmp_path / "repaired").touch()
    prompts = [(await found.task("r", "train", "own-env", index))["prompt"] for index in (2, 0, 1)]
    assert prompts == ["2", "0", "1"]
    with pytest.raises(ApplicationError, match="has 3 examples, and example 3 was requested"):
        await found.task("r", "train", "own-env", 3)
    assert list((tmp_path / "scratch" / "tasks-r").iterdir()) == []


@pytest.mark.timeout(120)
@pytest.mark.nightly
async def test_tasks_that_were_loaded_need_their_environment_no_more(tmp_path: Path) -> None:
    found = library(tmp_path, BROKEN)
    (tmp_path / "repaired").touch()
    await found.load("r")
    (tmp_path / "own_env.py").unlink()
    assert (await found.task("r", "train", "own-env", 2))["prompt"] == "2"


@pytest.mark.timeout(120)
async def test_envs_of_a_path_share_a_process_and_fail_alone(tmp_path: Path) -> None:
    env = OWN_ENV.format(infinite=False).replace('print("loading")', "note()")
    note = "\nimport os\ndef note():\n    open('loads', 'a').write(f'{os.getpid()}\\n')\n"
    (tmp_path / "own_env.py").write_text(env + note)
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path / "store"), own_queue="q")
    own: dict[str, Any] = {"id": "own-env", "path": str(tmp_path)}
    broken = {"id": "no-env", "path": str(tmp_path)}
    train = {"env": [own, {**own, "name": "again", "ratio": 1}, broken]}
    config = validate({"max_steps": 1, "train": train, "eval": {"env": [own]}})
    ctx.store.put_json(keys.config("r"), config.model_dump(mode="json"))
    found = TaskLibrary(ctx)
    asked = (("train", "own-env"), ("eval", "own-env"), ("train", "again"))
    for kind, name in asked:
        assert (await found.task("r", cast(Kind, kind), name, 0))["prompt"] == "0"
    loads = tmp_path / "scratch" / "tasks-r" / "loads"
    processes = loads.read_text().split()
    assert len(processes) == 3 and len(set(processes)) == 1
    with pytest.raises(ApplicationError, match="'no-env' does not load"):
        await found.task("r", "train", "no-env", 0)


@pytest.mark.timeout(120)
@pytest.mark.nightly
async def test_the_cause_behind_an_error_decides(tmp_path: Path) -> None:
    said = r"RuntimeError: An error .*\(ConnectionError: hub .*; check the mount or the"
    with pytest.raises(StoreUnavailable, match=said):
        await library(tmp_path, WRAPPED).task("r", "train", "own-env", 0)


@pytest.mark.timeout(120)
@pytest.mark.nightly
async def test_a_broken_env_is_the_users(tmp_path: Path) -> None:
    with pytest.raises(ApplicationError, match=r"does not load: KeyError: 'answer'$") as caught:
        await library(tmp_path, BROKEN).task("r", "train", "own-env", 0)
    assert caught.value.type == names.BAD_INPUT and caught.value.non_retryable


async def test_a_hub_that_hangs_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "load_limits", lambda config: {str(tmp_path): 0.5})
    with pytest.raises(StoreUnavailable, match="not loaded after"):
        await library(tmp_path, HANGS).task("r", "train", "own-env", 0)
