"""On-policy self-distillation: the teacher is the policy, after seeing a demonstration.

The teacher sees the rollout with a demonstration of the task as a system message in front, and
scores the exact tokens that the policy sampled without it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ratchet.activities.scoring.algorithms.base import (
    Algorithm,
    Credit,
    CreditError,
    Reference,
    Render,
    RolloutView,
)
from ratchet.activities.scoring.algorithms.streams import routed
from ratchet.activities.scoring.algorithms.teacher import Question, ref_logprobs
from ratchet.configs.algorithm import OpsdConfig


class Opsd(Algorithm):
    """All sampled tokens in ref_kl with weight 1; no advantages, rewards are only recorded."""

    name = "opsd"

    def __init__(
        self, config: OpsdConfig, reference: Reference, render: Render, seq_len: int
    ) -> None:
        """`seq_len`: longest training sample in tokens; the teacher scores no token beyond it."""
        self._config = config
        self._reference = reference
        self._render = render
        self._seq_len = seq_len

    def demonstration(self, task: Mapping[str, Any]) -> str:
        """The demonstration in a task's data, from its `info` or else its top level.

        Raises CreditError if there is none.
        """
        key = self._config.demo_key
        info = task.get("info")
        result = info.get(key) if isinstance(info, Mapping) else None
        result = task.get(key) if result is None else result
        if not isinstance(result, str) or not result.strip():
            raise CreditError(
                f"algorithm 'opsd' needs a demonstration, and task {task.get('idx', '')} has no "
                f"text {key!r} in its info or at its top level; set algo.demo_key to where it is"
            )
        return result

    async def score_rollout(self, rollout: RolloutView) -> Credit:
        """Puts the tokens into ref_kl, so that filters see a rollout without advantages."""
        return routed("ref_kl", rollout)

    async def score_survivors(self, rollouts: Sequence[RolloutView]) -> list[Credit]:
        """The teacher's log-probabilities; rollouts that filters removed are never sent to it."""
        limit = self._config.max_concurrent
        if self._config.teacher != "policy":
            limit = min(limit, self._config.teacher.max_concurrent)
        return await ref_logprobs(
            self._reference,
            [self._questions(rollout) for rollout in rollouts],
            seq_len=self._seq_len,
            max_concurrent=limit,
        )

    def _questions(self, rollout: RolloutView) -> list[Question]:
        """Each sample with its first prompt rendered again, and everything after it unchanged."""
        demo = {"role": "system", "content": self.demonstration(rollout.task)}
        shown = [
            self._render([demo, *prompt["messages"]], prompt["tools"]) for prompt in rollout.prompts
        ]
        return [
            Question(sample, shown[sample["prompt"]], sample["prompt_tokens"])
            for sample in rollout.samples
        ]
