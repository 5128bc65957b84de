"""A rollout's error for people: its type, its message, and its place in the user's code.

An error is {'type', 'message'} and, where the env server sent a traceback, 'frames': the last three
of the user's own, innermost last, each {'file', 'line', 'function'}.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

MOST_FRAMES = 3
LONGEST = 300
LONGEST_PLACE = 60

_FRAME = re.compile(
    r'^[ |]*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+?) *$', re.M
)
_NOT_THEIRS = re.compile(
    r"^<|[/\\]site-packages[/\\]verifiers[/\\]|[/\\]lib[/\\]python3\.\d+[/\\](?!site-packages)"
)
"""Frames of verifiers and of Python itself; the server may run on another machine than this."""

TOO_LONG = ("context length", "maximum model length")
"""How the renderer and vLLM refuse a prompt that is longer than the engine's context."""

_CAUSED = "The above exception was the direct cause of the following exception:"
_ANOTHER = "During handling of the above exception, another exception occurred:"


def frames_of(traceback: str | None) -> list[dict[str, Any]]:
    """The user's own frames of a printed traceback; of all frames if none is theirs.

    For an error with a cause, those of the cause: the exception around it is not theirs.
    """
    parts = [
        part for caused in (traceback or "").split(_CAUSED) for part in caused.split(_ANOTHER)[::-1]
    ]
    found = [_all_frames(part) for part in parts]
    theirs = [[at for at in own if is_theirs(at)] for own in found]
    return next(filter(None, [*theirs, *found]), [])[-MOST_FRAMES:]


def is_theirs(frame: Mapping[str, Any]) -> bool:
    """Whether a frame belongs to the user's own code."""
    return not _NOT_THEIRS.search(frame["file"])


def _all_frames(text: str) -> list[dict[str, Any]]:
    return [
        {"file": at["file"], "line": int(at["line"]), "function": at["function"]}
        for at in _FRAME.finditer(text)
    ]


def with_limit(error: dict[str, Any], seq_len: int) -> dict[str, Any]:
    """An error of the policy's engine; one of a prompt that it cannot hold names the key first,
    since lists cut long messages.
    """
    said = error["message"].lower()
    if error["type"] != "ProviderError" or not any(mark in said for mark in TOO_LONG):
        return error
    remedy = f"the prompt and a reply do not fit into trainer.seq_len ({seq_len}); raise it"
    return {**error, "message": f"{remedy}, or shorten the prompt: {error['message']}"}


def out_of_time(kind: str, env: str, limit_s: float) -> str:
    """The message of a rollout that its time limit ended."""
    key = f"{kind}.env.{env}.timeout_s"
    return f"not finished after executing for {limit_s:g} s; {key} sets this limit"


def text_of(error: Mapping[str, Any]) -> str:
    """An error in one line, the innermost frame last: 'Type: message (at env.py:12 in score)'."""
    said = f"{error['type']}: {error['message']}".strip()
    places = [
        f"{frame['file'].replace(chr(92), '/').rpartition('/')[2]}:{frame['line']} in "
        f"{frame['function']}"[:LONGEST_PLACE]
        for frame in error.get("frames", ())
    ]
    where = f" (at {', '.join(places)})" if places else ""
    return said[: LONGEST - len(where)] + where


def by_type(errors: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """The number of errors of each type."""
    return dict(sorted(Counter(str(error["type"]) for error in errors).items()))


def commonest(errors: Iterable[Mapping[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """The most frequent error in one line, and its frames; '' if there is none."""
    texts = [(text_of(error), error) for error in errors]
    if not texts:
        return "", []
    text = Counter(text for text, _ in texts).most_common(1)[0][0]
    return text, list(dict(texts)[text].get("frames", ()))
