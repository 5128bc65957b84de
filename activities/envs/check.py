"""The preflight of environments: do they load, and how many examples do they have?

`EnvActivities.check_envs` is the worker's side. The environments are imported in separate
processes, one for each import path: `python -m ratchet.activities.envs.check` reads a list of
requests from stdin and writes a list of results to stdout.
"""

import asyncio
import itertools
import json
import platform
import signal
import sys
import time
import traceback
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from temporalio import activity

from ratchet.activities.contracts import names
from ratchet.activities.contracts.checks import (
    CheckInput,
    CheckProblem,
    CheckResult,
    load_limits,
    without_secrets,
)
from ratchet.activities.envs import load_times, loading
from ratchet.activities.envs.failures import MOST_FRAMES
from ratchet.activities.envs.probe import probe
from ratchet.activities.runtime import machine
from ratchet.activities.runtime.children import (
    as_parent,
    child_env,
    end_with_parent,
    module_command,
)
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.runtime.failing import final
from ratchet.activities.runtime.heartbeat import heartbeats
from ratchet.configs.env import ALL
from ratchet.configs.pointers import key_of
from ratchet.configs.run import RunConfig
from ratchet.configs.upgrades import read_config

ENDLESS_COUNT_S = 20.0
"""A taskset without an end is read for this long; the examples read by then are one epoch of it."""
ADDRESS_S = 5.0
LIBRARIES = ("__main__", "ratchet", "verifiers", "pydantic", "importlib")
"""Modules whose frames are not an environment's own."""
STUCK_S = 30.0
"""How much longer than its environments may take a process is waited for: code that does not return
to Python cannot be stopped singly.
"""
READ = 100
"""Examples of an environment that are read, beside being counted."""


class LoadsTooLong(BaseException):
    """An environment did not load within its limit. No `except Exception` of its own stops it."""


class EnvActivities:
    """Activities that check environments."""

    def __init__(self, ctx: WorkerContext) -> None:
        self.ctx = ctx

    @activity.defn(name=names.CHECK_ENVS)
    async def check_envs(self, input: CheckInput) -> CheckResult:
        """Loads every env of the config and counts its examples."""
        config = read_config(input.config)
        by_path: defaultdict[str | None, list[dict[str, Any]]] = defaultdict(list)
        problems = _conflicts(config)
        for request in _requests(config):
            # A restored run may continue with the tasks that it began with.
            request["reads"] = not input.restored
            by_path[request["path"]].append(request)
        limits = load_limits(config)
        calls = [
            self._check_path(path, requests, limits[path]) for path, requests in by_path.items()
        ]
        addresses = [_check_address(*result) for result in _addresses(config)]
        async with heartbeats():
            outcomes, answers = await asyncio.gather(
                asyncio.gather(*calls), asyncio.gather(*addresses)
            )
        examples: dict[str, int] = {}
        found: list[CheckProblem] = []
        for finding in itertools.chain.from_iterable(outcomes):
            found += [CheckProblem(**problem) for problem in finding["problems"]]
            if finding["examples"] is not None:
                examples[finding["name"]] = finding["examples"]
                kind, _, name = finding["name"].partition("/")
                env = config.env(name, kind)
                await asyncio.to_thread(
                    load_times.note_load, self.ctx.store, env, finding["seconds"]
                )
        problems += once(found) + [problem for problem in answers if problem is not None]
        problems.sort(key=lambda p: p.pointer)
        return CheckResult(without_secrets(problems), examples, cores=machine.cores())

    async def _check_path(
        self, path: str | None, requests: list[dict[str, Any]], limit_s: float
    ) -> list[dict[str, Any]]:
        scratch = self.ctx.scratch("env-check")
        process = await asyncio.create_subprocess_exec(
            *module_command("ratchet.activities.envs.check"),
            cwd=scratch,
            env=child_env(loading.process_env(path, scratch), as_parent()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(limit_s + STUCK_S):
                out, err = await process.communicate(json.dumps(requests).encode())
        except TimeoutError:
            ids = ", ".join(request["id"] for request in requests)
            message = (
                f"loading {ids} and counting the examples took longer than {limit_s:g} s; set "
                "start_timeout_s of the env higher, or let it load its data on first use"
            )
            raise final(names.BAD_INPUT, message) from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            raise RuntimeError(f"the env check ended with {process.returncode}: {err.decode()}")
        findings: list[dict[str, Any]] = json.loads(out.splitlines()[-1])
        return findings


def once(problems: list[CheckProblem]) -> list[CheckProblem]:
    """Each problem once, at its first place, train before eval, with its other places."""
    found: dict[str, list[CheckProblem]] = {}
    for problem in sorted(problems, key=lambda p: (not p.pointer.startswith("/train"), p.pointer)):
        found.setdefault(problem.message, []).append(problem)
    return [
        replace(first, message=f"{message} (also at {', '.join(other.key for other in others)})")
        if others
        else first
        for message, (first, *others) in found.items()
    ]


def _requests(config: RunConfig) -> list[dict[str, Any]]:
    """One plain request for each env section."""
    requests = []
    for kind, envs in (("train", config.train.env), ("eval", config.eval.env)):
        for index, env in enumerate(envs):
            whole = kind == "eval" and config.eval_num_examples(env.name) == ALL
            own = kind == "eval" and config.eval.env[index].num_examples is not None
            requests.append(
                {
                    "id": env.id,
                    "name": f"{kind}/{env.name}",
                    "kind": kind,
                    "args": env.args,
                    "path": env.path,
                    "pointer": f"/{kind}/env/{index}",
                    "limit_s": env.load_limit_s,
                    "whole": whole,
                    "count_pointer": f"/{kind}/env/{index}/num_examples"
                    if own or kind == "train"
                    else "/eval/num_examples",
                }
            )
    return requests


def _conflicts(config: RunConfig) -> list[CheckProblem]:
    """A server that someone else runs has one `args.task` for everything that it serves."""
    problems = []
    for index, env in enumerate(config.eval.env):
        twin = next((other for other in config.train.env if other.name == env.name), None)
        if twin is None or env.address is None:
            continue
        if twin.args.get("task") != env.args.get("task"):
            message = (
                f"args.task of env {env.name!r} differs between train and eval, which share the "
                f"server at {env.address}; set another `name` and `address` on one of them"
            )
            problems.append(CheckProblem(**_problem(f"/eval/env/{index}/args", message)))
    return problems


def _addresses(config: RunConfig) -> list[tuple[str, str]]:
    """Pointer and address of every server that someone else runs."""
    return [
        (f"/{kind}/env/{index}/address", env.address)
        for kind, envs in (("train", config.train.env), ("eval", config.eval.env))
        for index, env in enumerate(envs)
        if env.address
    ]


async def _check_address(pointer: str, address: str) -> CheckProblem | None:
    health = await probe(address, ADDRESS_S)
    if health == "up":
        return None
    why = "nothing listens there" if health == "refused" else "it does not answer health requests"
    message = (
        f"no env server at {address}: {why}; start it, or remove `address` to have one started"
    )
    return CheckProblem(**_problem(pointer, message))


# -- inside the subprocess ------------------------------------------------------------------


def _problem(pointer: str, message: str) -> dict[str, str]:
    return {"pointer": pointer, "key": key_of(pointer), "message": message}


def _summary(error: Exception) -> str:
    """A pydantic error as 'field: what is wrong; …', any other as its type and text."""
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return f"{type(error).__name__}: {error}"
    lines = []
    for item in error.errors(include_url=False):
        where = ".".join(str(part) for part in item["loc"])
        lines.append(f"{where}: {item['msg']}" if where else item["msg"])
    return "; ".join(lines)


def _place(error: BaseException) -> str:
    """' (at env.py:7 in load, env.py:3 in read)', the innermost frame last; '' if the environment's
    own code is in none.
    """
    if error.__cause__ is not None and (of_cause := _place(error.__cause__)):
        return of_cause
    frames = [
        f"{Path(frame.f_code.co_filename).name}:{line} in {frame.f_code.co_name}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals["__name__"].partition(".")[0] not in LIBRARIES
    ]
    return f" (at {', '.join(frames[-MOST_FRAMES:])})" if frames else ""


def _taken_names(task: type) -> list[str]:
    """The rewards and metrics of a task whose names verifiers' own `Task` has."""
    from verifiers.v1 import Task

    taken = {*dir(Task), "data", "config"}
    return sorted(
        name
        for own in task.__mro__
        for name, method in vars(own).items()
        if name in taken and (hasattr(method, "reward") or hasattr(method, "metric"))
    )


def inspect_env(request: dict[str, Any]) -> dict[str, Any]:
    """Loads one taskset; returns its problems, its number of examples (None if it does not load),
    and the seconds that it took.
    """
    from pydantic import ValidationError
    from verifiers.v1.utils.loaders import taskset_config_type

    pointer, env_id, began = request["pointer"], request["id"], time.monotonic()
    finding: dict[str, Any] = {"name": request["name"], "problems": [], "examples": None}
    module = loading.module_of(env_id)
    try:
        fields = sorted(set(taskset_config_type(env_id).model_fields) - {"id"})
    except ModuleNotFoundError as error:
        # verifiers wraps the import error; the inner one names what was not found.
        inner = error.__cause__ if isinstance(error.__cause__, ModuleNotFoundError) else error
        finding["problems"].append(_not_found(request, inner, module))
        return finding
    except Exception as error:
        # The environment is the user's code: its errors are for the user to read.
        message = f"environment {env_id!r} cannot be imported: {_summary(error)}{_place(error)}"
        finding["problems"].append(_problem(f"{pointer}/id", message))
        return finding
    secrets: list[str] = []
    try:
        args = loading.with_variables(request["args"], secrets)
        taskset = loading.load_taskset(env_id, args, request["kind"])
        loading.server_config(env_id, args, 1.0)
        finding["seconds"] = time.monotonic() - began
        count, first = _count(taskset)
    except Exception as error:
        reason, place = loading.without(secrets, _summary(error)), _place(error)
        if isinstance(error, ValidationError) and not place:
            message = f"args of {env_id!r}: {reason} (it takes: {', '.join(fields)})"
        else:
            message = f"environment {env_id!r} does not load with these args: {reason}{place}"
        finding["problems"].append(_problem(f"{pointer}/args", message))
        return finding
    finding["examples"] = count
    if count == 0:
        message = f"environment {env_id!r} has no examples with these args"
        finding["problems"].append(_problem(f"{pointer}/args", message))
    elif request["whole"] and not taskset.bounded:
        message = (
            f"env {request['name']!r} has no end, so its eval cannot use all examples; set "
            "num_examples to the number that it should use"
        )
        finding["problems"].append(_problem(request["count_pointer"], message))
    if request["reads"]:
        finding["problems"] += _wrong_tasks(env_id, pointer, first)
    return finding


def _wrong_tasks(env_id: str, pointer: str, first: list[Any]) -> list[dict[str, str]]:
    """What is wrong with the first tasks of an environment, or with their classes."""
    problems = []
    for kind in dict.fromkeys(map(type, first)):
        for name in _taken_names(kind):
            message = (
                f"environment {env_id!r}: {kind.__name__}.{name} takes the place of verifiers' own "
                f"Task.{name}; rename the reward or metric"
            )
            problems.append(_problem(f"{pointer}/id", message))
    # A taskset with a harness of its own may make its prompts there.
    empty = [index for index, task in enumerate(first) if _asks_nothing(task.data)]
    if empty and loading.chats(env_id):
        message = (
            f"example {empty[0]} of environment {env_id!r} has an empty prompt, as have "
            f"{len(empty)} of its first {len(first)}: the policy would be asked nothing; give "
            "every task a prompt, or a system prompt"
        )
        problems.append(_problem(f"{pointer}/args", message))
    return problems


def _asks_nothing(data: Any) -> bool:
    """Whether a task's prompt has neither text nor images. One that is None says that the
    environment's user speaks first.
    """
    if data.prompt is None or data.system_prompt or data.prompt_text.strip():
        return False
    return isinstance(data.prompt, str) or not any(
        isinstance(message.content, list) for message in data.prompt
    )


def _not_found(request: dict[str, Any], error: ModuleNotFoundError, module: str) -> dict[str, str]:
    """What an env lacks, and which command installs it."""
    pointer, env_id, path = request["pointer"], request["id"], request["path"]
    if path and not Path(path).is_dir():
        message = (
            f"there is no folder {path!r} on this worker's machine ({platform.node()}); put the "
            f"environment's module {module!r} there, on every machine with rollout or env workers"
        )
        return _problem(f"{pointer}/path", message)
    install = f"{sys.executable} -m pip install"
    if error.name not in (None, module):
        package = str(error.name).partition(".")[0]
        message = (
            f"environment {env_id!r} needs a package that is missing: {error}; run `{install} "
            f"{package}`, or install the package that provides it, on all rollout and env workers"
        )
        return _problem(f"{pointer}/id", message)
    where = f" in {path!r}" if path else ""
    remedy = "" if path else f"; run `{install} FOLDER` for one of your own, or set its `path`"
    message = (
        f"no environment {env_id!r}{where}: module {module!r} cannot be imported; "
        f"{loading.suggestion(env_id, path)}{remedy}"
    )
    return _problem(f"{pointer}/id", message)


def _count(taskset: Any) -> tuple[int, list[Any]]:
    """The number of examples of a taskset, and the first READ of them; if it has an end, only the
    parent limits the time.
    """
    endless = not taskset.bounded
    deadline = time.monotonic() + ENDLESS_COUNT_S
    first: list[Any] = []
    count = 0
    for task in itertools.islice(taskset, loading.INFINITE_EXAMPLES if endless else None):
        count += 1
        if len(first) < READ:
            first.append(task)
        if endless and time.monotonic() > deadline:
            break
    return count, first


def _stop_loading(number: int, frame: FrameType | None) -> None:
    raise LoadsTooLong


def inspect_within_limit(request: dict[str, Any]) -> dict[str, Any]:
    """What `inspect_env` finds, or that its environment takes too long. Needs the main thread."""
    signal.signal(signal.SIGALRM, _stop_loading)
    signal.setitimer(signal.ITIMER_REAL, request["limit_s"])
    try:
        return inspect_env(request)
    except LoadsTooLong as error:
        message = (
            f"loading environment {request['id']!r} and counting its examples took longer than "
            f"{request['limit_s']:g} s{_place(error)}; set its start_timeout_s higher, or let it "
            "load its data on first use"
        )
        problem = _problem(f"{request['pointer']}/start_timeout_s", message)
        return {"name": request["name"], "problems": [problem], "examples": None}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    """Writes results to the last line of stdout; output of environments comes before it."""
    end_with_parent()
    requests = json.load(sys.stdin)
    findings = [inspect_within_limit(request) for request in requests]
    print("\n" + json.dumps(findings))


if __name__ == "__main__":
    main()
