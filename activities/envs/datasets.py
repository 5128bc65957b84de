"""Synthetic data of the environments that ship, in plain Python.

Splits are disjoint by construction: an example belongs to the split that the hash of its text
falls in, whatever the seed or count. The env server, the tests and the warm start all use these
functions.

- reverse-text: one turn. The user says 'reverse <word>', the reply should be the word reversed.
- reverse-retry: the same words; after a wrong reply the user says how many letters are right and
  asks again.
- reverse-shown: reverse-text whose tasks carry the right reply as a demonstration. Half of the
  conversations show it, as a system message in front.
"""

import hashlib
import random
import string
from collections.abc import Callable
from typing import Literal

from ratchet.activities.contracts.names import WARM_START_ENVS

Split = Literal["train", "eval", "warm"]
Message = dict[str, str]


def split_of(text: str) -> Split:
    """The one split `text` belongs to: 1/8 eval, 1/8 warm, the rest train."""
    bucket = hashlib.sha256(text.encode()).digest()[0] % 8
    return "eval" if bucket == 0 else "warm" if bucket == 1 else "train"


def reverse_text_words(
    split: Split, count: int, seed: int, min_len: int = 4, max_len: int = 8
) -> list[str]:
    """`count` distinct lower-case words of `split`, in an order fixed by `seed`.

    A larger count extends the list. Raises ValueError if the lengths do not allow that many.
    """
    if not 1 <= min_len <= max_len:
        raise ValueError(f"need 1 <= min_len <= max_len, got {min_len} and {max_len}")
    rng = random.Random(f"reverse-text/{split}/{seed}")
    words: dict[str, None] = {}
    # The smallest split gets one draw in eight; far beyond that the words have run out.
    for _ in range(1000 + 100 * count):
        if len(words) >= count:
            break
        length = rng.randint(min_len, max_len)
        word = "".join(rng.choice(string.ascii_lowercase) for _ in range(length))
        if split_of(word) == split:
            words[word] = None
    if len(words) < count:
        raise ValueError(
            f"split {split!r} has too few words of {min_len} to {max_len} letters: "
            f"{count} were requested and {len(words)} found"
        )
    return list(words)


def reverse_text_prompt(word: str) -> str:
    """The user's message in reverse-text."""
    return f"reverse {word}"


def reverse_text_reply(word: str) -> str:
    """The right answer of the assistant."""
    return word[::-1]


def reverse_retry_hint(word: str, reply: str) -> str:
    """The user's message in reverse-retry after a wrong reply: how many letters are right."""
    right = sum(a == b for a, b in zip(reply, reverse_text_reply(word), strict=False))
    return f"{right}/{len(word)} {reverse_text_prompt(word)}"


def _slip(word: str, rng: random.Random) -> str:
    """`word` with one letter wrong."""
    place = rng.randrange(len(word))
    others = string.ascii_lowercase.replace(word[place], "")
    return word[:place] + rng.choice(others) + word[place + 1 :]


def _reverse_text_demonstration(word: str, rng: random.Random) -> list[Message]:
    return [
        {"role": "user", "content": reverse_text_prompt(word)},
        {"role": "assistant", "content": reverse_text_reply(word)},
    ]


def _reverse_retry_demonstration(word: str, rng: random.Random) -> list[Message]:
    # A third of the conversations slip first, so that the second turn is seen at all, and few
    # enough that the right letter stays the likeliest at every place of the first.
    if rng.random() >= 1 / 3:
        return _reverse_text_demonstration(word, rng)
    slip = _slip(reverse_text_reply(word), rng)
    return [
        {"role": "user", "content": reverse_text_prompt(word)},
        {"role": "assistant", "content": slip},
        {"role": "user", "content": reverse_retry_hint(word, slip)},
        {"role": "assistant", "content": reverse_text_reply(word)},
    ]


def _reverse_shown_demonstration(word: str, rng: random.Random) -> list[Message]:
    talk = _reverse_text_demonstration(word, rng)
    if rng.random() < 1 / 2:
        return talk
    return [{"role": "system", "content": reverse_text_reply(word)}, *talk]


_DEMONSTRATIONS: dict[str, Callable[[str, random.Random], list[Message]]] = {
    "reverse-text": _reverse_text_demonstration,
    "reverse-retry": _reverse_retry_demonstration,
    "reverse-shown": _reverse_shown_demonstration,
}

assert tuple(_DEMONSTRATIONS) == WARM_START_ENVS


def demonstrations(env: str, count: int, seed: int) -> list[list[Message]]:
    """`count` correct conversations of a shipped env, all from the warm split.

    The first call with a larger `count` gives the same conversations and more. Raises ValueError
    for an env that does not ship.
    """
    if env not in _DEMONSTRATIONS:
        known = ", ".join(repr(name) for name in WARM_START_ENVS)
        raise ValueError(f"env {env!r} has no demonstrations; envs that have: {known}")
    rng = random.Random(f"{env}/demonstrations/{seed}")
    make = _DEMONSTRATIONS[env]
    return [make(word, rng) for word in reverse_text_words("warm", count, seed)]
