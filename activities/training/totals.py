"""Sums over the micro-batches of a step, on one rank and then over all ranks.

Sums are added in the order of micro-batches, then of ranks, so that a step always gives the same
numbers.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ratchet.activities.training.batching import MicroBatch
from ratchet.activities.training.loss import LossInputs, MemberCounts, StepLoss, mismatch_kl
from ratchet.activities.training.ranks import Ranks
from ratchet.activities.training.token_stats import TokenStats, env_masks, measured

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from torch import Tensor

    from ratchet.activities.storage.batch import Sample

SHARES = ("is_masked", "is_masked_low", "is_masked_high")


@dataclass
class Totals:
    """Sums over tokens and micro-batches. `parts` are the loss components that have members;
    `scores` holds, by a sample's place in the batch, the log-probabilities float32 [S] of its
    tokens after the cut.
    """

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    parts: dict[str, float] = field(default_factory=dict)
    scores: dict[int, np.ndarray] = field(default_factory=dict)
    stats: TokenStats = field(default_factory=TokenStats)

    def add(
        self,
        batch: MicroBatch,
        samples: Sequence[Sample],
        inputs: LossInputs,
        entropy: Tensor,
        share: StepLoss,
    ) -> None:
        """Adds a micro-batch with its share of the loss. All tensors are [B, T]."""
        logprobs, mask = inputs.trainer_logprobs.detach(), inputs.loss_mask
        known = logprobs.cpu().numpy()
        for index, (row, start, stop) in zip(batch.indices, batch.spans(), strict=True):
            self.scores[index] = known[row, start:stop]
        reported = measured(inputs)
        mismatch = mismatch_kl(logprobs, inputs.engine_logprobs, reported)
        self.stats.add(inputs, share.rl, entropy, mismatch, env_masks(batch, samples), share.ref_kl)
        for name, value in share.parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + value
        low, high = share.rl.masked_low.sum().item(), share.rl.masked_high.sum().item()
        computed, squares = batch.work()
        here = {
            "loss": share.total.item(),
            "micro_batches": float(bool(batch.indices)),
            "tokens": int(mask.sum().item()),
            "computed": computed,
            "squares": squares,
            "reported": int(reported.sum().item()),
            "entropy": (entropy * mask).sum().item(),
            "mismatch_kl": mismatch.sum().item(),
            "is_masked_low": low,
            "is_masked_high": high,
            "is_masked": low + high,
        }
        if inputs.ce_weights is not None:
            here["nll_ce"] = -(logprobs * (inputs.ce_weights != 0)).sum().item()
        for name, value in here.items():
            self.sums[name] += value

    def joined(self, ranks: Ranks) -> Totals:
        """The totals of all ranks; scores and distributions on the first rank only."""
        result = Totals()
        for sums, parts in ranks.all((self.sums, self.parts)):
            for name, value in sums.items():
                result.sums[name] += value
            for name, share in parts.items():
                result.parts[name] = result.parts.get(name, 0.0) + share
        for scores, stats in ranks.at_first((self.scores, self.stats)):
            result.scores |= scores
            result.stats.add_all(stats)
        return result

    def metrics(self, counts: MemberCounts) -> dict[str, float]:
        """Losses, and means over tokens; `counts` are the members of the whole step.

        Entropy is the mean over sampled tokens, mismatch over those with an engine's
        log-probability (0 without any), masked shares over the members of the rl component. nll_ce
        is the mean negative log-likelihood (nats) of the members of ce, without their weights.
        Distributions over tokens are those of TokenStats.
        """
        over = {"entropy": self.sums["tokens"], "mismatch_kl": self.sums["reported"]}
        means = {
            name: self.sums[name] / max(over.get(name, counts.rl), 1)
            for name in ("entropy", "mismatch_kl", *SHARES)
        }
        plain = {name: float(self.sums[name]) for name in ("loss", "micro_batches", "tokens")}
        metrics = plain | means
        if set(self.parts) - {"rl"}:
            for name, value in self.parts.items():
                metrics[f"loss_{name}"] = value
                metrics[f"tokens_{name}"] = float(getattr(counts, name))
        if counts.ce:
            metrics["nll_ce"] = self.sums["nll_ce"] / counts.ce
        return self.stats.metrics() | metrics
