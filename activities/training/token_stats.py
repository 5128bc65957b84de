"""Statistics of a training step's tokens: distributions of entropy, mismatch and masking.

Keys are '<family>/<statistic>', and for families by env '<family>/<scope>/<statistic>' with scope
'all' or an env's name. Statistics are mean, median, std, min and max over tokens. A family without
tokens in the step has no keys. Nothing here has a gradient. All in nats.

- entropy: of sampled tokens, by scope.
- mismatch_kl: of those with an engine's log-probability, by scope.
- masked_mismatch_kl, unmasked_mismatch_kl: of the rl component's members, those dropped from its
  policy term and those kept.
- is_masked, is_masked_low, is_masked_high: shares of members that were dropped.
- masked_advantage_positive, masked_advantage_negative: shares of the dropped ones by sign.
- ref_kl: trainer minus reference log-probability of the ref_kl members.
- ref_kl/<family>: is_masked, is_masked_low, is_masked_high, masked_mismatch_kl,
  unmasked_mismatch_kl and mismatch_kl of the ref_kl component.
- nll: negative log-likelihood of the ce members.
- kl_ent_ratio/mean: mismatch over entropy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ratchet.activities.training.loss import members

if TYPE_CHECKING:
    from torch import Tensor

    from ratchet.activities.storage.batch import Sample
    from ratchet.activities.training.batching import MicroBatch
    from ratchet.activities.training.loss import LossInputs, LossTerms

STATISTICS = ("mean", "median", "std", "min", "max")


def statistics(values: np.ndarray) -> dict[str, float]:
    """The STATISTICS of values [n], n > 0; the deviation is that of the population."""
    result = (
        values.mean(),
        np.median(values),
        values.std(),
        values.min(),
        values.max(),
    )
    return dict(zip(STATISTICS, map(float, result), strict=True))


def env_masks(batch: MicroBatch, samples: Sequence[Sample]) -> dict[str, Tensor]:
    """The tokens [B, T] bool of a micro-batch that belong to each env, by name."""
    import torch

    masks: dict[str, Tensor] = {}
    for index, (row, start, stop) in zip(batch.indices, batch.spans(), strict=True):
        empty = torch.zeros_like(batch.loss_mask)
        masks.setdefault(samples[index].env, empty)[row, start:stop] = True
    return masks


def measured(inputs: LossInputs) -> Tensor:
    """Sampled tokens that are members of rl or ref_kl, [*] bool: those with an engine's
    log-probability. A token of ce alone, such as a frozen model's, may have none.
    """
    result = members(inputs.loss_mask, inputs.rl_weights)
    if inputs.ref_kl_weights is None:
        return result
    return result | (inputs.loss_mask & (inputs.ref_kl_weights != 0))


class TokenStats:
    """Collects the tokens of one step, micro-batch by micro-batch."""

    def __init__(self) -> None:
        self._values: dict[str, list[np.ndarray]] = {}

    def _keep(self, family: str, values: Tensor, where: Tensor) -> None:
        kept = values[where].detach().to("cpu").double().numpy()
        if kept.size:
            self._values.setdefault(family, []).append(kept)

    def add(
        self,
        inputs: LossInputs,
        rl: LossTerms,
        entropy: Tensor,
        mismatch: Tensor,
        envs: dict[str, Tensor],
        ref_kl: LossTerms | None = None,
    ) -> None:
        """Adds a micro-batch with the terms of its components. All tensors are [B, T]; `envs` marks
        the tokens of each env.
        """
        sampled, reported = inputs.loss_mask, measured(inputs)
        for scope, own in {"all": sampled, **envs}.items():
            self._keep(f"entropy/{scope}", entropy, sampled & own)
            self._keep(f"mismatch_kl/{scope}", mismatch, reported & own)
        dropped = self._keep_trust_region("", rl)
        self._keep("masked_advantage_positive", (inputs.advantages > 0).double(), dropped)
        self._keep("masked_advantage_negative", (inputs.advantages < 0).double(), dropped)
        t = inputs.trainer_logprobs
        if inputs.ref_kl_weights is not None and inputs.ref_logprobs is not None:
            self._keep("ref_kl", t - inputs.ref_logprobs, inputs.ref_kl_weights != 0)
        if ref_kl is not None:
            self._keep_trust_region("ref_kl/", ref_kl)
            self._keep("ref_kl/mismatch_kl", ref_kl.mismatch_kl, ref_kl.members)
        if inputs.ce_weights is not None:
            self._keep("nll", -t, inputs.ce_weights != 0)

    def add_all(self, other: TokenStats) -> None:
        """Adds everything that `other` has collected of the same step."""
        for family, parts in other._values.items():
            self._values.setdefault(family, []).extend(parts)

    def _keep_trust_region(self, prefix: str, terms: LossTerms) -> Tensor:
        """Adds what a component's trust region drops; returns the dropped tokens [B, T] bool."""
        dropped = terms.masked_low | terms.masked_high
        self._keep(f"{prefix}masked_mismatch_kl", terms.mismatch_kl, dropped)
        self._keep(f"{prefix}unmasked_mismatch_kl", terms.mismatch_kl, terms.members & ~dropped)
        for name, mask in (
            ("is_masked", dropped),
            ("is_masked_low", terms.masked_low),
            ("is_masked_high", terms.masked_high),
        ):
            self._keep(f"{prefix}{name}", mask.double(), terms.members)
        return dropped

    def metrics(self) -> dict[str, float]:
        """All keys of the step."""
        result: dict[str, float] = {}
        for family, parts in self._values.items():
            for statistic, value in statistics(np.concatenate(parts)).items():
                result[f"{family}/{statistic}"] = value
        entropy = result.get("entropy/all/mean", 0.0)
        if entropy > 0 and "mismatch_kl/all/mean" in result:
            result["kl_ent_ratio/mean"] = result["mismatch_kl/all/mean"] / entropy
        return result
