"""The default RL loss: a trust region on probability differences, plus a KL term.

Per sampled token, with t the trainer's and i the engine's log-probability, l = t - i,
rho = exp(l), delta = exp(t) - exp(i), and A' = adv_tau * A:

    loss = -keep * A' * rho + kl_tau * l^2

A token is dropped from the policy term (keep = 0) where delta > dppo_mask_high and A > 0, or
delta < -dppo_mask_low and A <= 0 (binary total variation, arXiv:2602.04879). The KL term
(arXiv:2602.02276) covers every member token, dropped ones included. rho is neither clamped nor
detached. Members are the tokens under the loss mask whose weight, if there are weights, is not 0.

Invariant: functions here return sums over members; who calls divides by the member count of the
whole step, so that the gradient does not depend on how a batch is cut into micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from configs.trainer import LossConfig

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LossTerms:
    """Per-token terms, all of the shape of the inputs and 0 outside of the members.

    `loss` carries the gradient; the rest is detached. `masked_low` and `masked_high` mark tokens
    dropped from the policy term; `mismatch_kl` is rho - l - 1, an estimate of KL(engine, trainer).
    """

    loss: Tensor
    members: Tensor
    masked_low: Tensor
    masked_high: Tensor
    mismatch_kl: Tensor


def members(loss_mask: Tensor, weights: Tensor | None = None) -> Tensor:
    """Tokens the loss is about: [*] bool."""
    return loss_mask if weights is None else loss_mask & (weights != 0)


def rl_terms(
    trainer_logprobs: Tensor,
    engine_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    config: LossConfig,
    weights: Tensor | None = None,
) -> LossTerms:
    """The loss of every token. All arguments share one shape [*]; log-probabilities in nats."""
    member = members(loss_mask, weights)
    # Padding may hold anything; equal log-probabilities there keep exp() finite, so that no
    # NaN reaches the gradient through a multiplication by 0.
    log_ratio = (trainer_logprobs - engine_logprobs).masked_fill(~member, 0.0)
    ratio = log_ratio.exp()
    difference = trainer_logprobs.detach().exp() - engine_logprobs.exp()
    rising = advantages > 0
    high = member & rising & (difference > config.dppo_mask_high)
    low = member & ~rising & (difference < -config.dppo_mask_low)
    keep = member & ~high & ~low
    policy = -config.adv_tau * advantages * ratio * keep
    loss = policy + config.kl_tau * log_ratio.square()
    if weights is not None:
        loss = loss * weights
    detached = log_ratio.detach()
    return LossTerms(
        loss=loss.masked_fill(~member, 0.0),
        members=member,
        masked_low=low,
        masked_high=high,
        mismatch_kl=(detached.exp() - detached - 1.0).masked_fill(~member, 0.0),
    )


def step_loss(terms: LossTerms, step_members: int) -> Tensor:
    """This micro-batch's share of the step's loss: scalar, sum / max(members of the step, 1).

    A micro-batch without members still gives a scalar that can be differentiated.
    """
    return terms.loss.sum() / max(step_members, 1)
