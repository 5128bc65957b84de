"""reasoning-gym-tasks: verifiable tasks of the reasoning-gym package, any of them by name.

One turn, after the solved examples (shots) that the config shows. The reward is the package's own
score of the answer in [0, 1]; a reply that never ends earns nothing. An example belongs to the
split that the hash of its question falls in, so that eval questions are never trained on.
"""

import functools
import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import verifiers.v1 as vf
from pydantic import Field

from ratchet.activities.envs.datasets import split_of
from ratchet.activities.envs.shipped import ratchet_compat

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
TRIES_PER_EXAMPLE = 100
"""Most entries examined for each example."""


@functools.lru_cache(maxsize=8)
def entries_of(dataset: str, arguments: str, seed: int, size: int) -> Any:
    """The package's dataset; `arguments` is JSON. Raises ValueError if the package refuses it."""
    try:
        package = ratchet_compat.reasoning_gym()
    except ModuleNotFoundError as error:
        raise ValueError(
            "environment 'reasoning-gym-tasks' needs the extra 'reasoning-gym' "
            f"(pip install 'ratchet-rl[reasoning-gym]'): {error}"
        ) from error
    given = json.loads(arguments)
    try:
        return package.create_dataset(dataset, size=size, seed=seed, **given)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"reasoning-gym cannot make {dataset!r} from {given}: {error}") from error


class ReasoningGymData(vf.TaskData):
    """Entry `index` of a dataset, which the other fields identify."""

    dataset: str
    arguments: str
    seed: int
    size: int
    index: int
    answer: Literal["reply", "last-number"]


class ReasoningGymTask(vf.Task[ReasoningGymData]):
    """Scores one reply."""

    def grade(self, trace: vf.Trace) -> float:
        """The package's score of the answer, in [0, 1]; 0 for a reply that was cut off."""
        if trace.is_truncated:
            return 0.0
        data, reply = self.data, trace.last_reply.strip()
        if data.answer == "last-number":
            numbers = NUMBER.findall(reply)
            reply = numbers[-1] if numbers else ""
        entries = entries_of(data.dataset, data.arguments, data.seed, data.size)
        return float(entries.score_answer(reply, entries[data.index]))

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        """The package's score."""
        return self.grade(trace)

    @vf.metric
    async def exact(self, trace: vf.Trace) -> float:
        """1 for the full score, else 0."""
        return float(self.grade(trace) == 1.0)


class ReasoningGymConfig(vf.TasksetConfig):
    """Which task, with which arguments, and which part of a reply is the answer."""

    split: Literal["train", "eval"] = "train"
    num_examples: int = Field(default=4096, ge=1)
    seed: int = 0
    dataset: str = Field(default="chain_sum", min_length=1)
    arguments: dict[str, Any] = Field(default_factory=dict)
    suffix: str = ""
    answer: Literal["reply", "last-number"] = "reply"
    shots: list[tuple[str, str]] = Field(default_factory=list)


class ReasoningGymTaskset(vf.Taskset[ReasoningGymTask, ReasoningGymConfig]):
    """Entries of one split, in the package's order; a task with few questions repeats them. Those
    whose questions are shown as shots are left out.
    """

    def load(self) -> Iterator[ReasoningGymTask]:
        """Yields one task per entry; raises ValueError if the task has too few of them or a shot
        is an eval question.
        """
        config = self.config
        size = config.num_examples * TRIES_PER_EXAMPLE
        arguments = json.dumps(config.arguments, sort_keys=True)
        entries = entries_of(config.dataset, arguments, config.seed, size)
        shown = {question for question, _ in config.shots}
        if held_out := sorted(question for question in shown if split_of(question) == "eval"):
            raise ValueError(f"shots: {held_out[0]!r} is an eval question; show another")
        solved: vf.Messages = []
        for question, reply in config.shots:
            solved.append(vf.UserMessage(content=question + config.suffix))
            solved.append(vf.AssistantMessage(content=reply))
        found = 0
        for index in range(size):
            question = entries[index]["question"]
            if question in shown or (split_of(question) == "eval") != (config.split == "eval"):
                continue
            asked = question + config.suffix
            data = ReasoningGymData(
                id=f"{config.seed}/{index}",
                prompt=[*solved, vf.UserMessage(content=asked)] if solved else asked,
                dataset=config.dataset,
                arguments=arguments,
                seed=config.seed,
                size=size,
                index=index,
                answer=config.answer,
            )
            yield ReasoningGymTask(data, config.task)
            found += 1
            if found == config.num_examples:
                return
        raise ValueError(
            f"reasoning-gym's {config.dataset!r} has only {found} entries for split "
            f"{config.split!r}; lower num_examples ({config.num_examples})"
        )


__all__ = ["ReasoningGymTaskset"]
