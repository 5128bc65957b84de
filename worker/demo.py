"""`python -m ratchet.worker.demo CONFIG [key=value …]`: the stack, a run over REST, its curves.

Progress and curves go to standard error, the summary is one JSON line on standard output. The
stack is stopped at the end if it was started here, unless `make up` keeps it since, or
RATCHET_DEMO_KEEP=1 leaves it up. Ctrl-C, SIGTERM and SIGHUP cancel the run first, otherwise the
next `make up` would continue it. If a config names the teacher at its default address and nothing
answers there, the demo serves the teacher while it runs. The exit status is 0 only if the run
succeeded.
"""

import contextlib
import json
import os
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import plotext
from rich.console import Console

from ratchet.activities.contracts.health import REWARD
from ratchet.activities.contracts.statuses import ENDED
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
from ratchet.worker.stack import (
    Ended,
    Stack,
    StackError,
    answers,
    end_in_order,
    supervisor_of,
)

AVERAGED_STEPS = 5
GIVEN_UP_WITHIN_S = 8.0


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


def is_stuck(run: Run) -> bool:
    """Whether a run has paused itself, and needs somebody to resume it."""
    waits = run.waiting_for is not None and run.waiting_for.name == "resume"
    return run.status == "paused" and waits and bool(run.paused_because)


def perform(address: str, config: RunConfig, console: Console) -> Outcome:
    """One run at the API's address, watched until it ends, or pauses itself. Raises RatchetError.

    An interrupt cancels the run, unless the stack is to be left up with it.
    """
    began = time.monotonic()
    with Ratchet(address) as client:
        run = requested(client, config, console)
        console.print(f"run         {address}{run.links.self}", highlight=False)
        console.print(f"its page    {address}{run.links.dashboard}", highlight=False)
        watch = Watch(
            client,
            run,
            console,
            from_start=True,
            lines_of_json=False,
            until=is_stuck,
            on_interrupt="stops watching, not the run" if kept_up() else "cancels the run",
        )
        try:
            run = watch.follow()
        except KeyboardInterrupt:
            if not kept_up():
                give_up(address, run.id, console)
            raise
        wall_s = time.monotonic() - began
        steps = client.runs.metrics(run.id, limit=10_000).data
        return Outcome(run, steps, client.runs.evals(run.id).data, wall_s)


def requested(client: Ratchet, config: RunConfig, console: Console) -> Run:
    """The run, once it was created. An interrupt before that cancels it, too."""
    key = secrets.token_hex(16)
    try:
        return client.runs.create(config, idempotency_key=key)
    except KeyboardInterrupt:
        if not kept_up():
            console.print("the request may have taken effect: looking for its run")
            # Under the same key it is the same run.
            run = client.runs.create(config, idempotency_key=key)
            give_up(client.address, run.id, console)
        raise


def kept_up() -> bool:
    """Whether the stack, and its runs, should outlive the demo."""
    return os.environ.get("RATCHET_DEMO_KEEP") == "1"


def give_up(address: str, run_id: str, console: Console) -> None:
    """Cancels a run and waits for its end, if the API gets there within GIVEN_UP_WITHIN_S."""
    console.print(f"cancelling {run_id}", highlight=False)
    deadline = time.monotonic() + GIVEN_UP_WITHIN_S
    try:
        with Ratchet(address, timeout_s=GIVEN_UP_WITHIN_S, max_retries=0) as client:
            run = client.runs.cancel(run_id, reason="the demo was interrupted")
            while run.status not in ENDED and time.monotonic() < deadline:
                time.sleep(0.2)
                run = client.runs.retrieve(run_id)
    except RatchetError as error:
        console.print(f"{run_id} could not be cancelled: {error}", markup=False)


def ends(rewards: Sequence[float]) -> tuple[int, float | None, float | None]:
    """How many steps at either end are averaged, and their means. A single step is noise, so that
    only a run of two steps or three compares one.
    """
    if not rewards:
        return 0, None, None
    span = min(AVERAGED_STEPS, max(len(rewards) // 2, 1))
    return span, fmean(rewards[:span]), fmean(rewards[-span:])


def report(outcome: Outcome, console: Console) -> int:
    """Draws train and eval reward over steps and prints the figures of a run, null for those that
    were never measured; returns the exit status.
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
    if is_stuck(run):
        console.print(f"the run has paused itself: {run.paused_because}", markup=False)
        console.print(f"fix that, then run `make up` and POST {run.links.self}/resume")
    elif run.status != "succeeded":
        console.print(f"the run ended as {run.status}: {run.error}", markup=False)
    span, first, last = ends(rewards)
    if span:
        steps_said = "step" if span == 1 else f"{span} steps"
        console.print(
            f"train reward: {printing.number(first)}, then {printing.number(last)}; means of the "
            f"first and of the last {steps_said}",
            highlight=False,
            soft_wrap=True,
        )
    summary: dict[str, Any] = {
        "run_id": run.id,
        "status": run.status,
        "steps": run.step,
        "train_reward_averaged_steps": span,
        "train_reward_first": first,
        "train_reward_last": last,
        "eval_reward_first": scores[0] if scores else None,
        "eval_reward_last": scores[-1] if scores else None,
        "policy_version": run.policy_version,
        "rollouts": sum(run.rollouts.values()),
        "wall_s": round(outcome.wall_s, 1),
    }
    print(json.dumps(summary), flush=True)
    return 0 if run.status == "succeeded" else 1


def demo(config_path: str, overrides: list[str], console: Console) -> int:
    """Runs the demo on a stack that is up; returns the exit status."""
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
            return report(perform(where.api, config, console), console)
        finally:
            if supervisor_of(stack.home) is not None:
                console.print("the stack stays up, since `make up` keeps it; `make down` stops it")
            elif started_here and not kept_up():
                console.print("stopping the stack (`make up` brings it back with all its runs)")
                stack.down()


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit status."""
    end_in_order()
    console = printing.console(stderr=True)
    if not arguments or not Path(arguments[0]).suffix:
        console.print("usage: python -m ratchet.worker.demo CONFIG [key=value …]")
        return 2
    try:
        return demo(arguments[0], arguments[1:], console)
    except (ConfigError, StackError, RatchetError) as error:
        console.print(f"demo: {error}", markup=False)
        return 1
    except Ended as error:
        console.print(f"stopped by {error}")
        return error.status
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
