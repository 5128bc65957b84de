"""`python -m ratchet.worker.demo CONFIG [key=value …]`: the stack, a run over REST, its curves.

Progress and curves go to standard error, the summary is one JSON line on standard output. The
stack is stopped at the end if it was started here (RATCHET_DEMO_KEEP=1 leaves it up). A config that
names the teacher at its default address gets it for the time of the demo, if nothing answers
there. Exit status 0 only if the run succeeded.
"""

import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import plotext
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ratchet.activities.contracts.statuses import ENDED
from ratchet.configs.algorithm import source_of, teacher_of
from ratchet.configs.home import home_folder
from ratchet.configs.load import ConfigError, load
from ratchet.configs.reference import FrozenModelConfig
from ratchet.configs.run import RunConfig
from ratchet.worker import teacher
from ratchet.worker.stack import Stack, StackError

POLL_S = 1.0
QUIET_PRINT_S = 15.0
LAST_STEPS = 5


class Refused(Exception):
    """The API takes no such run; the message is its answer."""


@dataclass(frozen=True)
class Outcome:
    """A run that ended: its last state, its steps and evals, and its seconds."""

    run: dict[str, Any]
    steps: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    wall_s: float


def wants_teacher(config: RunConfig) -> bool:
    """Whether a run needs the teacher at its default address."""
    algos = [config.algorithm(env.name) for env in config.train.env]
    models = [model for algo in algos for model in (teacher_of(algo), source_of(algo))]
    return any(
        isinstance(model, FrozenModelConfig) and model.base_url == teacher.base_url()
        for model in models
    )


def watch(api: httpx.Client, run_id: str, console: Console) -> dict[str, Any]:
    """Shows a run until it ends, or until it rests and waits for `resume`; returns its state."""
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    printed, last = 0.0, ""
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=None, note="")
        while True:
            run: dict[str, Any] = api.get(f"/v1/runs/{run_id}").raise_for_status().json()
            note = describe(run)
            progress.update(
                task,
                description=run["status"],
                total=run["max_steps"],
                completed=run["step"],
                note=note,
            )
            line = f"{run['status']} step {run['step']}/{run['max_steps']} {note}"
            due = time.monotonic() - printed > QUIET_PRINT_S
            over = run["status"] in ENDED or rests(run)
            if not console.is_terminal and line != last and (due or over):
                console.print(line, highlight=False, soft_wrap=True)
                printed, last = time.monotonic(), line
            if over:
                return run
            time.sleep(POLL_S)


def rests(run: dict[str, Any]) -> bool:
    """Whether a run has paused itself, and does not go on by itself."""
    waiting = (run.get("waiting_for") or {}).get("name")
    return run["status"] == "paused" and waiting == "resume" and bool(run.get("paused_because"))


def describe(run: dict[str, Any]) -> str:
    """Reward, rollouts in flight and speed of a run, in one line; what it waits for at first."""
    progress = run.get("progress") or {}
    parts = []
    if run.get("reward") is not None:
        parts.append(f"reward {run['reward']:.3f}")
    for kind in ("train", "eval"):
        if count := progress.get(f"rollouts_inflight_{kind}"):
            parts.append(f"{count} {kind} rollouts in flight")
    if progress.get("tokens_per_s"):
        parts.append(f"{progress['tokens_per_s']:.0f} tokens/s")
    if run.get("paused_because"):
        parts.append(run["paused_because"])
    elif not parts and run.get("waiting_for"):
        parts.append(f"waiting for {run['waiting_for']['name']}")
    return " · ".join(parts)


def summary(
    run: dict[str, Any], steps: list[dict[str, Any]], evals: list[dict[str, Any]], wall_s: float
) -> dict[str, Any]:
    """The numbers of a run; rewards that were never measured are null."""
    rewards = [step["metrics"]["reward/all/mean"] for step in steps]
    tail = rewards[-LAST_STEPS:]
    scores = [record["reward_mean"] for record in evals]
    return {
        "run_id": run["id"],
        "status": run["status"],
        "steps": run["step"],
        "train_reward_first": rewards[0] if rewards else None,
        "train_reward_last": sum(tail) / len(tail) if tail else None,
        "eval_reward_first": scores[0] if scores else None,
        "eval_reward_last": scores[-1] if scores else None,
        "policy_version": run["policy_version"],
        "rollouts": sum((run.get("rollouts") or {}).values()),
        "wall_s": round(wall_s, 1),
    }


def curves(steps: list[dict[str, Any]], evals: list[dict[str, Any]], console: Console) -> None:
    """Draws train and eval reward over steps."""
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(72, 16)
    plotext.title("reward")
    plotext.xlabel("step")
    plotext.ylim(0, 1)
    if steps:
        rewards = [step["metrics"]["reward/all/mean"] for step in steps]
        plotext.plot([step["step"] for step in steps], rewards, label="train")
    if evals:
        scores = [record["reward_mean"] for record in evals]
        plotext.scatter([record["step"] for record in evals], scores, label="eval", marker="x")
    figure = plotext.build()
    print(figure if console.is_terminal else plotext.uncolorize(figure), file=sys.stderr)


def perform(address: str, config: RunConfig, console: Console) -> Outcome:
    """One run at the API's address, watched to its end. Raises Refused."""
    began = time.monotonic()
    with httpx.Client(base_url=address, timeout=60.0) as api:
        reply = api.post("/v1/runs", json=config.model_dump(mode="json"))
        if reply.status_code != 201:
            raise Refused(f"the run was refused ({reply.status_code}): {reply.text}")
        run_id = reply.json()["id"]
        console.print(f"run         {address}/v1/runs/{run_id}", highlight=False)
        run = watch(api, run_id, console)
        wall_s = time.monotonic() - began
        steps = api.get(f"/v1/runs/{run_id}/metrics", params={"limit": 10_000}).json()["data"]
        evals = api.get(f"/v1/runs/{run_id}/evals").json()["data"]
    return Outcome(run, steps, evals, wall_s)


def tell(outcome: Outcome, console: Console) -> int:
    """Tells the figures of a run; returns the exit status."""
    run = outcome.run
    curves(outcome.steps, outcome.evals, console)
    if rests(run):
        console.print(f"the run has paused itself: {run['paused_because']}", markup=False)
        console.print(f"`make up` and POST /v1/runs/{run['id']}/resume once that is mended")
    elif run["status"] != "succeeded":
        console.print(f"the run ended as {run['status']}: {run.get('error')}")
    print(json.dumps(summary(run, outcome.steps, outcome.evals, outcome.wall_s)), flush=True)
    return 0 if run["status"] == "succeeded" else 1


def demo(config_path: str, overrides: list[str], console: Console) -> int:
    """Carries out the demo on a stack that is up; returns the exit status."""
    config = load(config_path, overrides)
    stack = Stack(home_folder())
    started_here = not stack.running()
    with contextlib.ExitStack() as held:
        if wants_teacher(config) and not teacher.answers(teacher.PORT):
            held.enter_context(teacher.running(stack.home, lambda text: console.print(text)))
        try:
            where = stack.up()
            console.print(f"API         {where.api}/docs", highlight=False)
            console.print(f"Temporal    {where.temporal_ui or where.temporal}", highlight=False)
            console.print(f"state, logs {stack.home}", highlight=False)
            return tell(perform(where.api, config, console), console)
        finally:
            if started_here and os.environ.get("RATCHET_DEMO_KEEP") != "1":
                console.print("stopping the stack (`make up` brings it back with all its runs)")
                stack.down()


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit status."""
    console = Console(stderr=True)
    if not arguments or not Path(arguments[0]).suffix:
        console.print("usage: python -m ratchet.worker.demo CONFIG [key=value …]")
        return 2
    try:
        return demo(arguments[0], arguments[1:], console)
    except (ConfigError, StackError, Refused) as error:
        console.print(f"demo: {error}", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
