"""Filters of training rollouts: what they detect, and the verdict of a slot of them on a rollout.

Invariants: every filter of a slot is evaluated for every rollout, so that a hit that is only
counted never hides one that removes; the verdict does not depend on the order of the slot. The
limits themselves are no hit: all comparisons are strict. Rules about log-probabilities skip tokens
without one, such as those of a frozen model.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, compress
from typing import Any

from ratchet.configs.filters import (
    FilterConfig,
    GibberishConfig,
    RepetitionConfig,
    RewardFilterConfig,
    ZeroAdvantageConfig,
)


class SampledTokens:
    """What the policy sampled in one rollout: N tokens, over all its scored samples (of a group
    document) and turns in order. Filters look at some of it, so each list is made when it is read.
    """

    def __init__(self, samples: Sequence[Mapping[str, Any]]) -> None:
        self._samples = samples

    def _sampled(self, name: str) -> list[Any]:
        parts = (compress(sample[name], sample["loss_mask"]) for sample in self._samples)
        return list(chain.from_iterable(parts))

    @cached_property
    def token_ids(self) -> list[int]:
        """Ids [N]."""
        return self._sampled("token_ids")

    @cached_property
    def logprobs(self) -> list[float]:
        """The engine's [N], in nats."""
        return self._sampled("logprobs")

    @cached_property
    def measured(self) -> list[bool]:
        """Whether an engine of the policy reported that log-probability [N]."""
        return [by >= 0 for by in self._sampled("versions")]

    @property
    def advantages(self) -> list[float] | None:
        """Advantages [N]; None if the rollout has none."""
        return sampled_advantages(self._samples)


@dataclass(frozen=True)
class Verdict:
    """The types of the filters that hit a rollout, and whether one of them removes it."""

    hits: tuple[str, ...] = ()
    removed: bool = False


def sampled_advantages(samples: Sequence[Mapping[str, Any]]) -> list[float] | None:
    """The advantages [N] of SampledTokens alone."""
    advantages: list[float] = []
    for sample in samples:
        credit = sample.get("advantages")
        if credit is None:
            return None
        advantages += compress(credit, sample["loss_mask"])
    return advantages


def is_gibberish(tokens: SampledTokens, config: GibberishConfig, vocab_size: int) -> bool:
    """Whether a token has id > threshold and logprob < -ln(vocab_size) - offset.

    Source: arXiv:2510.02387, section 5.2.
    """
    least = -math.log(vocab_size) - config.logprob_offset
    # The extremes rule most rollouts out, at a tenth of the cost.
    if max(tokens.token_ids, default=-1) <= config.token_id_threshold:
        return False
    if min(tokens.logprobs) >= least:
        return False
    return any(
        reported and token > config.token_id_threshold and logprob < least
        for token, logprob, reported in zip(
            tokens.token_ids, tokens.logprobs, tokens.measured, strict=True
        )
    )


def is_repetition(tokens: SampledTokens, config: RepetitionConfig) -> bool:
    """Whether `window` tokens in a row have logprob > ln(prob_threshold).

    The sequence continues across turns. Source: arXiv:2506.13585, section 3.2.
    """
    least = math.log(config.prob_threshold)
    run = 0
    if len(tokens.logprobs) < config.window:
        return False
    for logprob in compress(tokens.logprobs, tokens.measured):
        run = run + 1 if logprob > least else 0
        if run == config.window:
            return True
    return False


def has_zero_advantage(tokens: SampledTokens) -> bool:
    """Whether there are advantages and all of them are 0."""
    advantages = tokens.advantages
    return advantages is not None and not any(advantages)


def is_out_of_bounds(reward: float, config: RewardFilterConfig) -> bool:
    """Whether the reward is below `min` or above `max`."""
    low = config.min is not None and reward < config.min
    return low or (config.max is not None and reward > config.max)


def _detects(
    config: FilterConfig, tokens: SampledTokens, vocab_size: int | None, reward: float
) -> bool:
    match config:
        case GibberishConfig():
            assert vocab_size is not None, "a slot with a gibberish filter needs the vocabulary"
            return is_gibberish(tokens, config, vocab_size)
        case RepetitionConfig():
            return is_repetition(tokens, config)
        case ZeroAdvantageConfig():
            return has_zero_advantage(tokens)
        case RewardFilterConfig():
            return is_out_of_bounds(reward, config)


def needs_vocabulary(slot: Sequence[FilterConfig]) -> bool:
    """Whether `judge` needs the vocabulary's size for this slot."""
    return any(isinstance(config, GibberishConfig) for config in slot)


def vocab_size_of(model: Mapping[str, Any]) -> int | None:
    """The vocabulary's size from a model's config.json (from its text part, if it has several)."""
    for section in (model, model.get("text_config") or {}):
        size = section.get("vocab_size")
        if isinstance(size, int) and size > 0:
            return size
    return None


def judge(
    slot: Sequence[FilterConfig],
    samples: Sequence[Mapping[str, Any]],
    vocab_size: int | None,
    reward: float = 0.0,
) -> Verdict:
    """The verdict of the filters of a slot on a rollout, given its scored samples and reward."""
    if not slot:
        return Verdict()
    tokens = SampledTokens(samples)
    result = [config for config in slot if _detects(config, tokens, vocab_size, reward)]
    return Verdict(
        hits=tuple(config.type for config in result),
        removed=any(config.enforce for config in result),
    )
