"""reverse-retry: reverse-text with a second chance, so that a conversation has several turns.

After a wrong reply the user says how many letters are right and asks again; a right reply ends
the conversation. The reward is the mean similarity over all `max_turns` turns, where turns that
became unnecessary count as right: in [0, 1], best for being right at once.
"""

from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field

from ratchet.activities.envs.datasets import (
    reverse_retry_hint,
    reverse_text_prompt,
    reverse_text_reply,
    reverse_text_words,
)


class ReverseRetryData(vf.TaskData):
    """One word, and how often the policy may try."""

    word: str
    max_turns: int


class ReverseRetryTask(vf.Task[ReverseRetryData]):
    """Scores all replies of a conversation."""

    @vf.reward(weight=1.0)
    async def mean_similarity(self, trace: vf.Trace) -> float:
        """Mean over turns of reply-answer similarity, in [0, 1]; a cut-off reply counts 0."""
        answer = reverse_text_reply(self.data.word)
        replies = [(message.content or "").strip() for message in trace.assistant_messages]
        scores = [SequenceMatcher(None, reply, answer).ratio() for reply in replies]
        if scores and trace.is_truncated:
            scores[-1] = 0.0
        solved = bool(scores) and scores[-1] == 1.0
        spared = self.data.max_turns - len(scores) if solved else 0
        return float(sum(scores) + spared) / float(self.data.max_turns)

    @vf.metric
    async def solved(self, trace: vf.Trace) -> float:
        """1 if the last reply is the answer, else 0."""
        right = trace.last_reply == reverse_text_reply(self.data.word)
        return float(right and not trace.is_truncated)


class ReverseRetryConfig(vf.TasksetConfig):
    """Which words, how many, and how many tries."""

    split: Literal["train", "eval"] = "train"
    num_examples: int = Field(default=4096, ge=1)
    seed: int = 0
    min_len: int = Field(default=4, ge=1)
    max_len: int = Field(default=8, ge=1)
    max_turns: int = Field(default=2, ge=1, le=8)


class ReverseRetryTaskset(vf.Taskset[ReverseRetryTask, ReverseRetryConfig]):
    """Words of one split, in an order fixed by the seed."""

    def load(self) -> Iterator[ReverseRetryTask]:
        """Yields one task a word."""
        config = self.config
        for word in reverse_text_words(
            config.split, config.num_examples, config.seed, config.min_len, config.max_len
        ):
            data = ReverseRetryData(
                id=word, prompt=reverse_text_prompt(word), word=word, max_turns=config.max_turns
            )
            yield ReverseRetryTask(data, config.task)


class ReverseRetryEnv(vf.SingleAgentEnv):
    """Plays the user."""

    async def run(self, task: ReverseRetryTask, agents: vf.Agents) -> None:
        """Takes the opening reply, then hints until the reply is right or the tries are up."""
        word = task.data.word
        async with agents.agent.interaction(task) as talk:
            segment = await talk.turn()
            for _ in range(task.data.max_turns - 1):
                reply = segment.last_reply
                if segment.terminated or talk.trace.is_truncated:
                    break
                if reply == reverse_text_reply(word):
                    break
                segment = await talk.turn(reverse_retry_hint(word, reply))


__all__ = ["ReverseRetryEnv", "ReverseRetryTaskset"]
