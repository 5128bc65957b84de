"""Which metrics are meant: headline ones, names, or patterns of names."""

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

HEADLINE = (
    "reward/all/mean",
    "loss",
    "entropy",
    "mismatch_kl",
    "grad_norm",
    "lr",
    "zero_advantage/all",
    "is_truncated/all/mean",
    "decode_len/all/mean",
    "errors/all/rate",
    "staleness/mean",
    "time/step",
)
"""The most important metrics, in this order."""
GLOB = "*?["
GUESSES = 3
MOST_CHARACTERS = 8000
"""Of the API's parameter `keys`."""


def headline(names: Collection[str]) -> list[str]:
    """The headline metrics among `names`."""
    return [name for name in HEADLINE if name in names]


def meant(patterns: Sequence[str], names: Collection[str]) -> list[str]:
    """The metrics among `names` that are named or match a pattern like 'time/*', each once.

    Raises ValueError for an unknown one, with the closest names.
    """
    found: dict[str, None] = {}
    for pattern in filter(None, (pattern.strip() for pattern in patterns)):
        matching = sorted(name for name in names if fnmatchcase(name, pattern))
        # A name may contain what a pattern would read as a set.
        matching = [pattern] if pattern in names else matching
        if not matching:
            raise ValueError(_unknown(pattern, names))
        found |= dict.fromkeys(matching)
    return [*found]


def short_enough(names: list[str]) -> list[str]:
    """`names`, if they fit into a request; raises ValueError otherwise."""
    if (length := len(",".join(names))) > MOST_CHARACTERS:
        raise ValueError(
            f"{len(names)} metrics are too many to name in one request ({length} characters of "
            f"{MOST_CHARACTERS}); choose fewer, or all with `--keys '*'`"
        )
    return names


def _unknown(pattern: str, names: Collection[str]) -> str:
    if any(sign in pattern for sign in GLOB):
        return f"no metric of this run matches {pattern!r}; `--keys '*'` shows all {len(names)}"
    close = get_close_matches(pattern, names, GUESSES, 0.5)
    close += sorted(name for name in names if pattern in name and name not in close)
    guesses = ", ".join(close[:GUESSES])
    text = f"this run does not measure {pattern!r}"
    return f"{text}; did you mean {guesses}?" if guesses else f"{text}; `--keys '*'` shows all"
