"""What the preflight says about environments that cannot work."""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment
from verifiers.v1 import TaskData

from ratchet.activities.contracts.checks import (
    CheckInput,
    CheckProblem,
    CheckResult,
    load_limits,
)
from ratchet.activities.envs import check
from ratchet.activities.envs.check import EnvActivities, once
from ratchet.activities.runtime import machine
from ratchet.activities.runtime.context import WorkerContext
from ratchet.configs.load import validate

OWN_ENV = """
import verifiers.v1 as vf

class OwnTask(vf.Task[vf.TaskData]):
    pass

class OwnTaskset(vf.Taskset[OwnTask, vf.TasksetConfig]):
    INFINITE = {infinite}
    def load(self):
        print("loading")
        n = 0
        while {infinite} or n < 3:
            yield OwnTask(vf.TaskData(prompt=str(n)), self.config.task)
            n += 1

__all__ = ["OwnTaskset"]
"""


LINES = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    word: str

class Taken(vf.Task[Data]):
    @vf.reward()
    async def score(self, trace) -> float:
        return 1.0

    @vf.metric()
    async def data(self, trace) -> float:
        return 1.0

    @vf.reward()
    async def spelled(self, trace) -> float:
        return 1.0

    async def validate(self, runtime):
        return True

class Config(vf.TasksetConfig):
    way: str = "good"

def read(path):
    return open(path)

class Lines(vf.Taskset[Taken, Config]):
    def load(self):
        if self.config.way == "file":
            read("/nowhere/words.txt")
        if self.config.way == "data":
            yield Taken(Data(prompt="a"), self.config.task)
        yield Taken(Data(prompt="a", word="b"), self.config.task)

__all__ = ["Lines"]
"""


async def _check(tmp_path: Path, *, restored: bool = False, **sections: Any) -> CheckResult:
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path / "store"), own_queue="q")
    given = CheckInput({"max_steps": 1, **sections}, restored)
    result: CheckResult = await ActivityEnvironment().run(EnvActivities(ctx).check_envs, given)
    return result


@pytest.fixture(scope="module")
def own_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a user's environments: finite, endless, and broken."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_env.py").write_text(OWN_ENV.format(infinite=False))
    (folder / "endless_env.py").write_text(OWN_ENV.format(infinite=True))
    empty = OWN_ENV.format(infinite=False).replace("prompt=str(n)", "prompt=' ' if n else 'one'")
    (folder / "empty_env.py").write_text(empty)
    (folder / "broken_env.py").write_text("import a_package_nobody_has\n")
    (folder / "untidy_env.py").write_text("1 / 0\n")
    (folder / "talking_env.py").write_text("raise ValueError('OPENAI_API_KEY=hunter2 is refused')")
    return str(folder)


async def test_good_config(tmp_path: Path, own_path: str) -> None:
    """Shipped and own environments, finite or not, are counted."""
    result = await _check(
        tmp_path,
        train={
            "env": [
                {"id": "reverse-retry", "args": {"num_examples": 12}, "path": own_path},
                {"id": "own-env", "path": own_path},
                {"id": "endless-env", "path": own_path},
            ]
        },
        eval={"env": [{"id": "reverse-text", "num_examples": 20, "path": own_path}]},
    )
    assert result.problems == []
    assert result.examples == {
        "train/reverse-retry": 12,
        "train/own-env": 3,
        "train/endless-env": 10_000,
        "eval/reverse-text": 4096,
    }
    assert result.cores == machine.cores() > 0


def test_a_task_asks_nothing_if_it_has_neither_text_nor_images() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    empty: list[dict[str, Any]] = [
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [{"role": "user", "content": ""}, {"role": "user", "content": " "}]},
    ]
    full: list[dict[str, Any]] = [
        {"prompt": "a"},
        {"prompt": [{"role": "user", "content": [image]}]},
        {"prompt": "", "system_prompt": "write a poem"},
        {},
    ]
    for data in empty + full:
        assert check._asks_nothing(TaskData.model_validate(data)) == (data in empty), data


async def test_a_restored_run_keeps_its_empty_prompts(tmp_path: Path, own_path: str) -> None:
    train = {"env": [{"id": "empty-env", "path": own_path}]}
    assert (await _check(tmp_path, train=train)).problems
    assert not (await _check(tmp_path, restored=True, train=train)).problems


@dataclass
class Numbers:
    """A taskset of so many tasks."""

    count: int
    bounded: bool

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


def test_a_taskset_with_an_end_is_counted_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "ENDLESS_COUNT_S", -1.0)
    assert check._count(Numbers(250_000, bounded=True))[0] == 250_000
    assert check._count(Numbers(250_000, bounded=False))[0] == 1, "one without is given its time"


async def test_every_problem_at_once(tmp_path: Path, own_path: str) -> None:
    """Each problem points at its key and says how to fix it. Sections of one env that differ have
    a server each, unless someone else runs the one that both name.
    """
    there = {"address": "tcp://127.0.0.1:9"}
    result = await _check(
        tmp_path,
        train={
            "env": [
                {"id": "revers-text"},
                {"id": "reverse-retry", "args": {"max_trns": 3}},
                {"id": "ownenv", "path": own_path},
                {"id": "broken-env", "path": own_path},
                {"id": "untidy-env", "path": own_path},
                {"id": "reverse-text", "name": "far", "address": "tcp://127.0.0.1:9"},
                {"id": "reverse-text", "name": "twin", "args": {"task": {"rewards": {}}}},
                {"id": "reverse-text", "name": "one", "args": {"task": {"rewards": {}}}, **there},
                {"id": "talking-env", "path": own_path},
                {"id": "empty-env", "path": own_path},
            ]
        },
        eval={
            "num_examples": 5,
            "env": [
                {"id": "own-env", "path": own_path, "num_examples": 4},
                {"id": "own-env", "name": "b", "path": own_path},
                {"id": "reverse-text", "name": "one", **there},
                {"id": "endless-env", "path": own_path, "num_examples": -1},
                {"id": "own-env", "name": "whole", "path": own_path, "num_examples": -1},
                {"id": "reverse-text", "name": "twin", "path": own_path},
            ],
        },
    )
    found = {problem.pointer: problem.message for problem in result.problems}
    assert set(found) == {
        "/train/env/0/id",
        "/train/env/1/args",
        "/train/env/2/id",
        "/train/env/3/id",
        "/train/env/4/id",
        "/train/env/5/address",
        "/train/env/7/address",
        "/train/env/8/id",
        "/train/env/9/args",
        "/eval/env/2/address",
        "/eval/env/2/args",
        "/eval/env/3/num_examples",
    }
    assert "did you mean 'reverse-text'?" in found["/train/env/0/id"]
    assert "max_trns" in found["/train/env/1/args"] and "max_turns" in found["/train/env/1/args"]
    assert "did you mean 'own-env'?" in found["/train/env/2/id"]
    assert "a_package_nobody_has" in found["/train/env/3/id"]
    assert "ZeroDivisionError" in found["/train/env/4/id"]
    assert "nothing listens there" in found["/train/env/5/address"]
    assert "share the server at tcp://127.0.0.1:9" in found["/eval/env/2/args"]
    assert "OPENAI_API_KEY=[hidden] is refused" in found["/train/env/8/id"]
    assert (
        "example 1 of environment 'empty-env' has an empty prompt, as have 2 of its first 3"
        in found["/train/env/9/args"]
    )
    assert "has no end" in found["/eval/env/3/num_examples"]
    assert result.examples["eval/own-env"] == result.examples["eval/b"] == 3, "fewer will do"
    keys = {problem.pointer: problem.key for problem in result.problems}
    assert keys["/train/env/1/args"] == "train.env.1.args"


async def test_an_environment_that_loads_too_long_is_named_with_the_key(tmp_path: Path) -> None:
    """The others are checked, too, however long it would take."""
    (tmp_path / "hanging_env.py").write_text("import time\n\ntime.sleep(3600)\n")
    path = str(tmp_path)
    hangs = {"id": "hanging-env", "path": path, "start_timeout_s": 20}
    envs = [hangs, {"id": "no-such-env", "path": path}]
    result = await _check(tmp_path, train={"env": envs})
    found = {problem.pointer: problem.message for problem in result.problems}
    assert re.fullmatch(
        r"loading environment 'hanging-env' and counting its examples took longer than 20 s "
        r"\(at hanging_env\.py:\d+ in <module>\); set its start_timeout_s higher, or .*",
        found["/train/env/0/start_timeout_s"],
    )
    assert "module 'no_such_env' cannot be imported" in found["/train/env/1/id"]


def test_environments_of_one_path_are_waited_for_together() -> None:
    envs = [
        {"id": "a", "path": "/p", "start_timeout_s": 3600},
        {"id": "b", "path": "/p"},
        {"id": "c"},
    ]
    config = validate({"max_steps": 1, "train": {"env": envs}})
    assert load_limits(config) == {"/p": 3600 + 600, None: 600}


@pytest.mark.nightly
async def test_what_is_not_there_says_what_to_run_and_says_it_once(
    tmp_path: Path, own_path: str
) -> None:
    nowhere = {"id": "own-env", "path": str(tmp_path / "nowhere")}
    broken = {"id": "broken-env", "path": own_path}
    none: dict[str, Any] = {"id": "some-env-of-mine"}
    envs = [nowhere, broken, none]
    result = await _check(tmp_path, train={"env": envs}, eval={"env": envs, "num_examples": 3})
    found = {problem.pointer: problem.message for problem in result.problems}
    assert sorted(found) == ["/train/env/0/path", "/train/env/1/id", "/train/env/2/id"]
    folder, package, module = (found[pointer] for pointer in sorted(found))
    assert "there is no folder" in folder and "'own_env'" in folder
    assert f"run `{sys.executable} -m pip install a_package_nobody_has`" in package
    assert f"run `{sys.executable} -m pip install FOLDER`" in module and "`path`" in module
    assert all("(also at eval.env." in message for message in found.values())


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("file", "'/nowhere/words.txt' (at lines_env.py:32 in load, lines_env.py:27 in read)"),
        ("data", "word: Field required (at lines_env.py:34 in load)"),
    ],
)
async def test_what_an_env_throws_is_found_by_its_lines(
    tmp_path: Path, way: str, said: str
) -> None:
    (tmp_path / "lines_env.py").write_text(LINES)
    (tmp_path / "deep_env.py").write_text("def f():\n    1 / 0\nf()\n")
    env = {"id": "lines-env", "path": str(tmp_path), "args": {"way": way}}
    deep = {"id": "deep-env", "path": str(tmp_path)}
    problems = (await _check(tmp_path, train={"env": [env, deep]})).problems
    assert [problem.pointer for problem in problems] == ["/train/env/0/args", "/train/env/1/id"]
    loads, imports = (problem.message for problem in problems)
    assert loads.startswith("environment 'lines-env' does not load") and loads.endswith(said)
    assert imports.endswith("division by zero (at deep_env.py:3 in <module>, deep_env.py:2 in f)")


async def test_a_reward_that_takes_the_place_of_a_method_of_verifiers_is_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "lines_env.py").write_text(LINES)
    env = {"id": "lines-env", "path": str(tmp_path)}
    result = await _check(tmp_path, train={"env": [env]})
    assert result.examples == {"train/lines-env": 1}
    assert [(problem.pointer, problem.message) for problem in result.problems] == [
        (
            "/train/env/0/id",
            f"environment 'lines-env': Taken.{name} takes the place of verifiers' own Task.{name}; "
            "rename the reward or metric",
        )
        for name in ("data", "score")
    ]


def test_a_problem_of_one_place_is_as_it_was() -> None:
    problems = [
        CheckProblem("/eval/env/0/id", "eval.env.0.id", "no such env"),
        CheckProblem("/train/env/1/args", "train.env.1.args", "bad args"),
        CheckProblem("/train/env/0/id", "train.env.0.id", "no such env"),
    ]
    assert once(problems) == [
        CheckProblem("/train/env/0/id", "train.env.0.id", "no such env (also at eval.env.0.id)"),
        CheckProblem("/train/env/1/args", "train.env.1.args", "bad args"),
    ]
