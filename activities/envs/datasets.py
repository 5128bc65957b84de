"""Synthetic data of the environments that ship, in plain Python.

Splits are disjoint by construction: an example belongs to the split that the hash of its text
falls in, whatever seed or count is asked for. The env server, the tests and the warm start all
draw from here.
"""

import hashlib
import random
import string
from typing import Literal

Split = Literal["train", "eval", "warm"]
Message = dict[str, str]


def split_of(text: str) -> Split:
    """The one split `text` belongs to: 1/8 eval, 1/8 warm, the rest train."""
    bucket = hashlib.sha256(text.encode()).digest()[0] % 8
    return "eval" if bucket == 0 else "warm" if bucket == 1 else "train"


def reverse_text_words(
    split: Split, count: int, seed: int, min_len: int = 4, max_len: int = 8
) -> list[str]:
    """`count` distinct lower-case words of `split`, in an order fixed by `seed`."""
    rng = random.Random(f"reverse-text/{split}/{seed}")
    words: dict[str, None] = {}
    while len(words) < count:
        length = rng.randint(min_len, max_len)
        word = "".join(rng.choice(string.ascii_lowercase) for _ in range(length))
        if split_of(word) == split:
            words[word] = None
    return list(words)


def reverse_text_prompt(word: str) -> str:
    """What the user says in reverse-text."""
    return f"reverse {word}"
