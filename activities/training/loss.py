"""Loss components and their sum.

Per token, with t the trainer's and i the engine's log-probability, l = t - i, rho = exp(l),
delta = exp(t) - exp(i), A' = adv_tau * A, and w the component's weight (absent: 1):

    rl      w * (-keep * A' * rho + kl_tau * l^2)
    ref_kl  w * (-keep * stop_gradient(ref - t) * rho + 1e-3 * l^2)
    ce      -w * t

`keep` drops a token from the policy term where its probability has moved too far from the
engine's. Default (binary total variation, arXiv:2602.04879): delta > dppo_mask_high and A > 0, or
delta < -dppo_mask_low and A <= 0. IPO: |delta| > ipo_threshold, whatever the sign of A. ref_kl:
delta < -0.2. The squared term (arXiv:2602.02276) covers every member, dropped ones included. rho
is neither clamped nor detached.

Members: of rl, the tokens under the loss mask whose weight, if there are weights, is not 0; of ce
and ref_kl, the tokens whose weight is not 0, under the loss mask or not; without weights, none.

Invariant: terms are summed here over members and divided by the member count of the component in
the whole step, a count of tokens and not of weights, so that the gradient does not depend on how
a batch is cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ratchet.configs.trainer import CustomLossConfig, DefaultLossConfig, IpoLossConfig

if TYPE_CHECKING:
    from torch import Tensor

RATIO_CONFIGS = DefaultLossConfig | IpoLossConfig
REF_KL_MASK_LOW = 0.2
REF_KL_TAU = 1e-3


@dataclass(frozen=True)
class MemberCounts:
    """The number of member tokens of each component in a step."""

    rl: int = 0
    ce: int = 0
    ref_kl: int = 0


@dataclass(frozen=True)
class LossInputs:
    """The inputs of a micro-batch's loss; all tensors share one shape [*].

    trainer_logprobs (with gradient) and engine_logprobs in nats; loss_mask bool: sampled by the
    policy. An absent stream is None: then rl_weights are 1, and ce and ref_kl have no members.
    ref_logprobs are those of the reference model, in nats.
    """

    trainer_logprobs: Tensor
    engine_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    rl_weights: Tensor | None = None
    ce_weights: Tensor | None = None
    ref_kl_weights: Tensor | None = None
    ref_logprobs: Tensor | None = None


@dataclass(frozen=True)
class LossTerms:
    """Per-token terms, all of the inputs' shape and 0 for tokens that are no members.

    `loss` carries the gradient; the rest is detached. `masked_low` and `masked_high` mark tokens
    dropped from the policy term; `mismatch_kl` is rho - l - 1, an estimate of KL(engine, trainer).
    """

    loss: Tensor
    members: Tensor
    masked_low: Tensor
    masked_high: Tensor
    mismatch_kl: Tensor


@dataclass(frozen=True)
class StepLoss:
    """A micro-batch's share of the step's loss.

    `total` is a scalar with gradient; `parts` are the shares of the components that have members in
    the step; `rl` and `ref_kl` hold the terms of those components.
    """

    total: Tensor
    parts: dict[str, float]
    rl: LossTerms
    ref_kl: LossTerms | None = None


def members(loss_mask: Tensor, weights: Tensor | None = None) -> Tensor:
    """The members of the rl component: [*] bool."""
    return loss_mask if weights is None else loss_mask & (weights != 0)


def mismatch_kl(trainer_logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor) -> Tensor:
    """rho - l - 1 under `mask` and 0 elsewhere [*]; never negative, without gradient."""
    log_ratio = (trainer_logprobs.detach() - engine_logprobs).masked_fill(~mask, 0.0)
    return log_ratio.exp() - log_ratio - 1.0


def rl_terms(
    trainer_logprobs: Tensor,
    engine_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    config: RATIO_CONFIGS,
    weights: Tensor | None = None,
) -> LossTerms:
    """The rl loss of every token. All arguments share one shape [*]; log-probabilities in nats."""
    member = members(loss_mask, weights)
    # Padding may hold any value. Equal log-probabilities there keep exp() finite, so that no NaN
    # reaches the gradient through a multiplication by 0.
    log_ratio = (trainer_logprobs - engine_logprobs).masked_fill(~member, 0.0)
    ratio = log_ratio.exp()
    difference = trainer_logprobs.detach().exp() - engine_logprobs.exp()
    if config.type == "ipo":
        high = member & (difference > config.ipo_threshold)
        low = member & (difference < -config.ipo_threshold)
    else:
        rising = advantages > 0
        high = member & rising & (difference > config.dppo_mask_high)
        low = member & ~rising & (difference < -config.dppo_mask_low)
    keep = member & ~high & ~low
    policy = -config.adv_tau * advantages * ratio * keep
    loss = policy + config.kl_tau * log_ratio.square()
    if weights is not None:
        loss = loss * weights
    return LossTerms(
        loss=loss.masked_fill(~member, 0.0),
        members=member,
        masked_low=low,
        masked_high=high,
        mismatch_kl=mismatch_kl(trainer_logprobs, engine_logprobs, member),
    )


def ref_kl_terms(
    trainer_logprobs: Tensor, engine_logprobs: Tensor, ref_logprobs: Tensor, weights: Tensor
) -> LossTerms:
    """The loss that pulls the policy towards a reference, whose lead acts as the advantage."""
    member = weights != 0
    log_ratio = (trainer_logprobs - engine_logprobs).masked_fill(~member, 0.0)
    difference = trainer_logprobs.detach().exp() - engine_logprobs.exp()
    low = member & (difference < -REF_KL_MASK_LOW)
    lead = (ref_logprobs - trainer_logprobs.detach()).masked_fill(~member | low, 0.0)
    loss = -lead * log_ratio.exp() + REF_KL_TAU * log_ratio.square()
    return LossTerms(
        loss=(loss * weights).masked_fill(~member, 0.0),
        members=member,
        masked_low=low,
        masked_high=low & False,
        mismatch_kl=mismatch_kl(trainer_logprobs, engine_logprobs, member),
    )


def ce_terms(trainer_logprobs: Tensor, weights: Tensor) -> Tensor:
    """Weighted negative log-likelihood of the members [*], 0 elsewhere."""
    member = weights != 0
    return (-trainer_logprobs.masked_fill(~member, 0.0) * weights).masked_fill(~member, 0.0)


def custom_terms(
    inputs: LossInputs,
    function: Callable[..., Any],
    config: CustomLossConfig,
    spans: Sequence[tuple[int, int, int]],
) -> LossTerms:
    """The user's loss in place of rl's: `function` is called with the LossInputs of each sequence.

    `spans` are the sequences' places in the [B, T] inputs: (row, start, stop). The function returns
    the loss of every token [T], of which only members count, or a scalar, their sum. It applies
    `rl_weights` itself, and is not called for a sequence without members. `loss` of the result is
    the scalar sum. Raises ValueError for a result of another shape.
    """
    import torch

    member = members(inputs.loss_mask, inputs.rl_weights)
    # Filled, not multiplied by 0: that keeps the graph for any values, NaN included.
    anchor = inputs.trainer_logprobs.masked_fill(torch.ones_like(member), 0.0)
    loss = anchor.sum()
    for row, start, stop in spans:
        part = member[row, start:stop]
        if not part.any():
            continue
        input: dict[str, Any] = {
            name: None if tensor is None else tensor[row, start:stop]
            for name, tensor in vars(inputs).items()
        }
        result = function(LossInputs(**input), **config.kwargs)
        shape = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
        if shape not in ((), (stop - start,)):
            raise ValueError(
                f"{config.function} returned {shape} for a sequence of {stop - start} tokens; it "
                f"must return a tensor of shape ({stop - start},) or ()"
            )
        loss = loss + (result if shape == () else result.masked_fill(~part, 0.0).sum())
    return LossTerms(
        loss=loss,
        members=member,
        masked_low=member & False,
        masked_high=member & False,
        mismatch_kl=mismatch_kl(inputs.trainer_logprobs, inputs.engine_logprobs, member),
    )


def step_loss(terms: LossTerms, step_members: int) -> Tensor:
    """This micro-batch's share of a component's loss: a scalar, sum / max(members of the step, 1).

    It can be differentiated for a micro-batch without members, too.
    """
    return terms.loss.sum() / max(step_members, 1)


def total_loss(inputs: LossInputs, rl: LossTerms, counts: MemberCounts) -> StepLoss:
    """The sum of the components, each divided by its member count in the step.

    `rl` stays in the graph, so a micro-batch without members has a gradient of zeros.
    Raises ValueError for ref_kl members without reference log-probabilities.
    """
    total = step_loss(rl, counts.rl)
    parts = {"rl": total.item()} if counts.rl else {}
    terms = None
    t, i = inputs.trainer_logprobs, inputs.engine_logprobs
    if inputs.ce_weights is not None:
        ce = ce_terms(t, inputs.ce_weights).sum() / max(counts.ce, 1)
        total = total + ce
        parts |= {"ce": ce.item()} if counts.ce else {}
    if inputs.ref_kl_weights is not None:
        if inputs.ref_logprobs is None:
            raise ValueError("the batch has ref_kl_weights but no ref_logprobs")
        terms = ref_kl_terms(t, i, inputs.ref_logprobs, inputs.ref_kl_weights)
        ref_kl = step_loss(terms, counts.ref_kl)
        total = total + ref_kl
        parts |= {"ref_kl": ref_kl.item()} if counts.ref_kl else {}
    return StepLoss(total, parts, rl, terms)
