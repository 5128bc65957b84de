"""On-policy distillation: a frozen teacher scores what the policy sampled (arXiv:2306.13649)."""

from collections.abc import Sequence

from ratchet.activities.scoring.algorithms.base import Algorithm, Credit, Reference, RolloutView
from ratchet.activities.scoring.algorithms.streams import routed
from ratchet.activities.scoring.algorithms.teacher import Question, ref_logprobs
from ratchet.configs.algorithm import OpdConfig


class Opd(Algorithm):
    """All sampled tokens in ref_kl with weight 1; no advantages, rewards are only recorded."""

    name = "opd"

    def __init__(self, config: OpdConfig, reference: Reference, seq_len: int) -> None:
        """`seq_len`: longest training sample in tokens; the teacher scores no token beyond it."""
        self._config = config
        self._reference = reference
        self._seq_len = seq_len

    async def score_rollout(self, rollout: RolloutView) -> Credit:
        """Puts the tokens into ref_kl, so that filters see a rollout without advantages."""
        return routed("ref_kl", rollout)

    async def score_survivors(self, rollouts: Sequence[RolloutView]) -> list[Credit]:
        """The teacher's log-probabilities; rollouts that filters removed are never sent to it."""
        return await ref_logprobs(
            self._reference,
            [[Question(sample) for sample in rollout.samples] for rollout in rollouts],
            seq_len=self._seq_len,
            max_concurrent=self._config.teacher.max_concurrent,
        )
