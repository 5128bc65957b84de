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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotext
from rich.console import Console

from ratchet.api.client import Ratchet, RatchetError, printing
from ratchet.api.client.watch import Watch
from ratchet.api.schemas.metrics import EvalRecord, MetricsRow
from ratchet.api.schemas.run import Run
from ratchet.configs.algorithm import source_of, teacher_of
from ratchet.configs.home import home_folder
from ratchet.configs.load import ConfigError, load
from ratchet.configs.reference import FrozenModelConfig
from ratchet.configs.run import RunConfig
from ratchet.worker import teacher
from ratchet.worker.stack import Stack, StackError, answers

REWARD = "reward/all/mean"
LAST_STEPS = 5


@dataclass(frozen=True)
class Outcome:
    """A run that ended: its last state, its steps and evals, and its seconds."""

    run: Run
    steps: Sequence[MetricsRow]
    evals: Sequence[EvalRecord]
    wall_s: float


def wants_teacher(config: RunConfig) -> bool:
    """Whether a run needs the teacher at its default address."""
    algos = [config.algorithm(env.name) for env in config.train.env]
    models = [model for algo in algos for model in (teacher_of(algo), source_of(algo))]
    return any(
        isinstance(model, FrozenModelConfig) and model.base_url == teacher.base_url()
        for model in models
    )


def rests(run: Run) -> bool:
    """Whether a run has paused itself, and does not go on by itself."""
    waits = run.waiting_for is not None and run.waiting_for.name == "resume"
    return run.status == "paused" and waits and bool(run.paused_because)


def perform(address: str, config: RunConfig, console: Console) -> Outcome:
    """One run at the API's address, watched until it ends, or rests. Raises RatchetError."""
    began = time.monotonic()
    with Ratchet(address) as client:
        run = client.runs.create(config)
        console.print(f"run         {address}{run.links.self}", highlight=False)
        watch = Watch(client, run, console, from_start=True, lines_of_json=False, until=rests)
        run = watch.follow()
        wall_s = time.monotonic() - began
        steps = client.runs.metrics(run.id, limit=10_000).data
        return Outcome(run, steps, client.runs.evals(run.id).data, wall_s)


def tell(outcome: Outcome, console: Console) -> int:
    """Draws train and eval reward over steps and tells the figures of a run, of which those that
    were never measured are null; returns the exit status.
    """
    run = outcome.run
    rewards = [step.metrics[REWARD] or 0.0 for step in outcome.steps]
    measured = [
        (record.step, (record.model_extra or {})["reward_mean"]) for record in outcome.evals
    ]
    steps = [step for step, reward in measured if reward is not None]
    scores = [reward for _, reward in measured if reward is not None]
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(72, 16)
    plotext.title("reward")
    plotext.xlabel("step")
    plotext.ylim(0, 1)
    if rewards:
        plotext.plot([step.step for step in outcome.steps], rewards, label="train")
    if scores:
        plotext.scatter(steps, scores, label="eval", marker="x")
    figure = plotext.build()
    print(figure if console.is_terminal else plotext.uncolorize(figure), file=sys.stderr)
    if rests(run):
        console.print(f"the run has paused itself: {run.paused_because}", markup=False)
        console.print(f"`make up` and POST {run.links.self}/resume once that is mended")
    elif run.status != "succeeded":
        console.print(f"the run ended as {run.status}: {run.error}", markup=False)
    tail = rewards[-LAST_STEPS:]
    summary: dict[str, Any] = {
        "run_id": run.id,
        "status": run.status,
        "steps": run.step,
        "train_reward_first": rewards[0] if rewards else None,
        "train_reward_last": sum(tail) / len(tail) if tail else None,
        "eval_reward_first": scores[0] if scores else None,
        "eval_reward_last": scores[-1] if scores else None,
        "policy_version": run.policy_version,
        "rollouts": sum(run.rollouts.values()),
        "wall_s": round(outcome.wall_s, 1),
    }
    print(json.dumps(summary), flush=True)
    return 0 if run.status == "succeeded" else 1


def demo(config_path: str, overrides: list[str], console: Console) -> int:
    """Carries out the demo on a stack that is up; returns the exit status."""
    config = load(config_path, overrides)
    stack = Stack(home_folder())
    started_here = not stack.running()
    with contextlib.ExitStack() as held:
        if wants_teacher(config) and not answers(teacher.PORT):
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
    console = printing.console(stderr=True)
    if not arguments or not Path(arguments[0]).suffix:
        console.print("usage: python -m ratchet.worker.demo CONFIG [key=value …]")
        return 2
    try:
        return demo(arguments[0], arguments[1:], console)
    except (ConfigError, StackError, RatchetError) as error:
        console.print(f"demo: {error}", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
