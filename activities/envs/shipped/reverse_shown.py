"""reverse-shown: reverse-text whose tasks carry a demonstration, which is the right reply itself.

The policy does not see it: it is for algorithms that show it to a teacher (opsd).
"""

from collections.abc import Iterator

import verifiers.v1 as vf

from ratchet.activities.envs.datasets import (
    reverse_text_prompt,
    reverse_text_reply,
    reverse_text_words,
)
from ratchet.activities.envs.shipped.reverse_text import (
    ReverseTextConfig,
    ReverseTextData,
    ReverseTextTask,
)


class ReverseShownData(ReverseTextData):
    """One word, and how it is reversed."""

    demonstration: str


class ReverseShownTask(ReverseTextTask):
    """Scores one reply, as reverse-text does."""

    data: ReverseShownData


class ReverseShownTaskset(vf.Taskset[ReverseShownTask, ReverseTextConfig]):
    """Words of one split, in an order fixed by the seed."""

    def load(self) -> Iterator[ReverseShownTask]:
        """Yields one task a word."""
        config = self.config
        for word in reverse_text_words(
            config.split, config.num_examples, config.seed, config.min_len, config.max_len
        ):
            data = ReverseShownData(
                id=word,
                prompt=reverse_text_prompt(word),
                word=word,
                demonstration=reverse_text_reply(word),
            )
            yield ReverseShownTask(data, config.task)


__all__ = ["ReverseShownTaskset"]
