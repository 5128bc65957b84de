"""Queries a reference model for the log-probabilities of tokens that the policy sampled."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ratchet.activities.scoring.algorithms.base import Credit, Reference


@dataclass(frozen=True)
class Question:
    """A sample, and the token ids `instead` that the reference sees of its first `skip` tokens."""

    sample: Mapping[str, Any]
    instead: Sequence[int] = ()
    skip: int = 0


async def _answer(reference: Reference, question: Question, seq_len: int) -> list[float]:
    """Log-probabilities (nats) of a sample's tokens [T]; 0.0 where the policy did not sample.

    Tokens from `seq_len` on, which the trainer cuts off, are not scored and get 0.0.
    """
    ids, mask = question.sample["token_ids"], question.sample["loss_mask"]
    asked = [place for place, on in enumerate(mask[:seq_len]) if on]
    answer = [0.0] * len(ids)
    if not asked:
        return answer
    assert asked[0] >= question.skip, "what is replaced must not be sampled"
    seen = [*question.instead, *ids[question.skip : asked[-1] + 1]]
    found = await reference.logprobs(seen)
    assert len(found) == len(seen), "a reference must score every token"
    shift = len(question.instead) - question.skip
    for place in asked:
        answer[place] = found[place + shift]
    return answer


async def ref_logprobs(
    reference: Reference,
    questions: Sequence[Sequence[Question]],
    *,
    seq_len: int,
    max_concurrent: int,
) -> list[Credit]:
    """Credit [n] with the reference's log-probabilities for the samples of n rollouts.

    At most `max_concurrent` samples are scored at once; after one has failed, no more are sent.
    """
    gate = asyncio.Semaphore(max_concurrent)

    async def one(question: Question) -> list[float]:
        async with gate:
            return await _answer(reference, question, seq_len)

    asked = [[asyncio.ensure_future(one(question)) for question in own] for own in questions]
    waiting = [answer for own in asked for answer in own]
    try:
        await asyncio.gather(*waiting)
    finally:
        for answer in waiting:
            answer.cancel()
    return [Credit(ref_logprobs=[answer.result() for answer in own]) for own in asked]
