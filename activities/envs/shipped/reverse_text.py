"""reverse-text: the user names a word, the reply should be that word reversed.

One turn. The reward is the similarity of reply and answer in [0, 1] (difflib's ratio); a reply
that never ends earns nothing.
"""

from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field

from ratchet.activities.envs.datasets import (
    reverse_text_prompt,
    reverse_text_reply,
    reverse_text_words,
)


class ReverseTextData(vf.TaskData):
    """One word."""

    word: str


class ReverseTextTask(vf.Task[ReverseTextData]):
    """Scores one reply."""

    @vf.reward(weight=1.0)
    async def similarity(self, trace: vf.Trace) -> float:
        """How alike reply and answer are, in [0, 1]; 0 for a reply that was cut off."""
        if trace.is_truncated:
            return 0.0
        answer = reverse_text_reply(self.data.word)
        return SequenceMatcher(None, trace.last_reply, answer).ratio()

    @vf.metric
    async def exact(self, trace: vf.Trace) -> float:
        """1 if the reply is the answer, else 0."""
        right = trace.last_reply == reverse_text_reply(self.data.word)
        return float(right and not trace.is_truncated)


class ReverseTextConfig(vf.TasksetConfig):
    """Which words, and how many."""

    split: Literal["train", "eval"] = "train"
    num_examples: int = Field(default=4096, ge=1)
    seed: int = 0
    min_len: int = Field(default=4, ge=1)
    max_len: int = Field(default=8, ge=1)


class ReverseTextTaskset(vf.Taskset[ReverseTextTask, ReverseTextConfig]):
    """Words of one split, in an order fixed by the seed."""

    def load(self) -> Iterator[ReverseTextTask]:
        """Yields one task a word."""
        config = self.config
        for word in reverse_text_words(
            config.split, config.num_examples, config.seed, config.min_len, config.max_len
        ):
            data = ReverseTextData(id=word, prompt=reverse_text_prompt(word), word=word)
            yield ReverseTextTask(data, config.task)


__all__ = ["ReverseTextTaskset"]
