"""`make examples`: every example config through the real stack, each held to a bar of its own.

One stack, and one teacher for those that name it, carry the runs out one after the other. ONLY
names some of them. Progress goes to stderr; the last line of stdout is one JSON object: per config
train and eval rewards (first, last), the metric that shows it at work (name, first, last), seconds
and ok. Exits with 1 if one misses its bar.

The first and last value of a metric of steps are means over the SPAN first and last steps; evals
are means over envs.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from ratchet.api.client import RatchetError
from ratchet.api.schemas.metrics import EvalRecord
from ratchet.configs.home import home_folder
from ratchet.configs.load import load
from ratchet.worker import teacher
from ratchet.worker.demo import Outcome, perform, wants_teacher
from ratchet.worker.stack import Stack, StackError, answers
from tests import ROOT
from tests.dtypes import quick_dtypes

SPAN = 3
REWARD = "reward/all/mean"


@dataclass(frozen=True)
class Bar:
    """What a run must reach besides its end.

    `metric` must rise by `rise`, or fall to `share` of where it began. The eval reward must rise by
    `eval_rise` and reach `eval_least`. `there` are metrics that one step must have, all above 0.
    """

    metric: str = REWARD
    rise: float | None = None
    share: float | None = None
    eval_rise: float = 0.0
    eval_least: float = 0.0
    there: tuple[str, ...] = ()

    def met(self, metric: tuple[float, float], evals: tuple[float, float]) -> bool:
        """Whether the first and last values are good enough."""
        good = evals[1] - evals[0] >= self.eval_rise and evals[1] >= self.eval_least
        if self.rise is not None:
            good = good and metric[1] - metric[0] >= self.rise
        if self.share is not None:
            good = good and metric[1] <= self.share * metric[0]
        return good


BARS = {
    "reverse_text": Bar(rise=0.3, eval_rise=0.2),
    "lora_reverse_text": Bar(rise=0.3, eval_rise=0.2, eval_least=0.8),
    "max_rl": Bar(rise=0.3, eval_rise=0.2),
    "multi_env": Bar(rise=0.1, eval_rise=0.1),
    "reverse_retry": Bar(rise=0.1, eval_rise=0.1),
    "rae": Bar(rise=0.2, eval_rise=0.15),
    "hierarchical_grpo": Bar(rise=0.2, eval_rise=0.15),
    "opd": Bar("loss_ref_kl", share=0.5, eval_rise=0.2, eval_least=0.5),
    "sft": Bar("nll_ce", share=0.5, eval_rise=0.2, eval_least=0.5),
    "rejection_sampling": Bar("nll_ce", share=0.5, eval_rise=0.2, eval_least=0.5),
    "opsd": Bar("loss_ref_kl", share=0.6, eval_rise=0.2, eval_least=0.5),
    "echo": Bar("nll_ce", share=0.6, eval_rise=0.05, there=("tokens_rl", "tokens_ce")),
    # Groups that are all right or all wrong do not count in train rewards, which hardly rise.
    "smollm2_chain_sum": Bar(eval_rise=0.3, eval_least=0.6),
    "mixed": Bar("loss_ref_kl", share=0.5, eval_rise=0.1, there=("tokens_rl", "tokens_ref_kl")),
}
"""By the name of the config's file."""


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return fmean(values[:SPAN]), fmean(values[-SPAN:])


def _evals(records: Sequence[EvalRecord]) -> tuple[float, float]:
    """Mean eval reward over envs, at the first and at the last step that has any."""
    found, scores = [], [(r.step or 0, (r.model_extra or {})["reward_mean"]) for r in records]
    for step in (min(scores)[0], max(scores)[0]):
        found.append(fmean(score for at, score in scores if at == step))
    return found[0], found[1]


def judge(outcome: Outcome, bar: Bar) -> dict[str, Any]:
    """The figures of a run and whether they are good enough."""
    run = outcome.run
    if run.status != "succeeded":
        return {"ok": False, "error": f"{run.status}: {run.error}"}
    steps = [step.metrics.items() for step in outcome.steps]
    metrics = [{name: value for name, value in step if value is not None} for step in steps]
    train = _ends([step[REWARD] for step in metrics])
    # A batch may be without a component, if all of its groups are of another algorithm.
    moved = _ends([step[bar.metric] for step in metrics if bar.metric in step])
    evals = _evals(outcome.evals)
    there = any(all(step.get(name, 0.0) > 0.0 for name in bar.there) for step in metrics)
    return {
        "train_reward": [round(value, 3) for value in train],
        "eval_reward": [round(value, 3) for value in evals],
        "metric": [bar.metric, *(round(value, 4) for value in moved)],
        "seconds": round(outcome.wall_s, 1),
        "ok": there and bar.met(moved, evals),
    }


def bench(names: Sequence[str], say: Callable[[str], None], console: Console) -> dict[str, Any]:
    """Carries the examples out; raises StackError if stack or teacher do not start."""
    stack = Stack(home_folder())
    started_here = not stack.running()
    dtypes = quick_dtypes()
    say(f"dtypes: {' '.join(dtypes) or 'as each config says'}")
    configs = {name: load(ROOT / "configs" / "examples" / f"{name}.toml", dtypes) for name in names}
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as held:
        wanted = any(wants_teacher(config) for config in configs.values())
        if wanted and not answers(teacher.PORT):
            held.enter_context(teacher.running(stack.home, say))
        try:
            where = stack.up()
            for name, config in configs.items():
                say(f"{name}:")
                try:
                    found[name] = judge(perform(where.api, config, console), BARS[name])
                except RatchetError as error:
                    found[name] = {"ok": False, "error": str(error)}
                say(f"{name}: {json.dumps(found[name])}")
        finally:
            if started_here:
                stack.down()
    return found


def main(arguments: Sequence[str]) -> int:
    """Entry point; returns the exit status."""
    console = Console(stderr=True)
    files = {path.stem for path in Path(ROOT, "configs", "examples").glob("*.toml")}
    assert files == set(BARS), f"examples without a bar, or bars without one: {files ^ set(BARS)}"
    unknown = [name for name in arguments if name not in BARS]
    if unknown:
        known = ", ".join(sorted(BARS))
        print(f"examples: no config {unknown[0]!r}; there are {known}", file=sys.stderr)
        return 2
    try:
        found = bench(
            arguments or list(BARS),
            lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True),
            console,
        )
    except StackError as error:
        print(f"examples: {error}", file=sys.stderr)
        return 1
    good = all(figures["ok"] for figures in found.values())
    print(json.dumps({**found, "ok": good}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
