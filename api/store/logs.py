"""Logs that processes of a run write on this machine, a page at a time.

A cursor is '<age>.<offset>.<level>': when the log was last rotated (0: never), the byte at which
the next line begins, and the level of the previous line, which lines without a level of their own
(such as those of a traceback) inherit. Invariant: a request reads at most PAGE_BYTES.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

from ratchet.activities.contracts.logs import PAST
from ratchet.activities.contracts.redact import redacted
from ratchet.api.schemas.events import Level, LogLine

LEVELS: tuple[Level, ...] = get_args(Level)
PAGE_BYTES = 256 * 1024
LINE_CHARACTERS = 4000
START = "start"

_CURSOR = re.compile(r"(\d{1,20})\.(\d{1,15})\.(\d)")
_LINE = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?Z?)\s+"
    r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+"
    r"(?:(?P<source>[^\s:]{1,120}): )?(?P<message>.*)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class LogPage:
    """Lines in order; `cursor` is where the next page begins, `more` whether it has any lines."""

    lines: list[LogLine]
    cursor: str
    more: bool


def _age(log: Path) -> int:
    past = log.with_name(f"{log.name}{PAST}")
    return past.stat().st_mtime_ns if past.exists() else 0


def _begin(log: Path, after: str | None) -> tuple[Path, int, int]:
    """The file, the byte and the level to continue with; raises ValueError for a bad cursor."""
    past = log.with_name(f"{log.name}{PAST}")
    if after == START:
        return (past if past.exists() else log), 0, 1
    if after is None:
        return log, max(0, log.stat().st_size - PAGE_BYTES), 1
    match = _CURSOR.fullmatch(after)
    if match is None or int(match[3]) >= len(LEVELS):
        raise ValueError(
            f"after: a cursor is the `next_after` of a page, or {START!r}; without one a page has "
            "the newest lines"
        )
    age, offset, level = map(int, match.groups())
    if age != _age(log):
        # The log was rotated since: the rest of the previous file comes first.
        return past, offset, level
    return log, offset, level


def _moment(text: str) -> datetime | None:
    """A time as logs write it, in UTC; None for text that is no time."""
    try:
        # Without a zone it is the time of this machine, which wrote it.
        return datetime.fromisoformat(text.replace(",", ".")).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def _whole_lines(data: bytes, cut: bool) -> Iterator[tuple[int, bytes]]:
    """Each complete line of `data`, with its end; with `cut` the first one is incomplete and left
    out. A line that fills a page is returned as it is.
    """
    start = data.find(b"\n") + 1 if cut else 0
    if start == 0 and len(data) == PAGE_BYTES and b"\n" not in data:
        yield len(data), data
    while (end := data.find(b"\n", start)) >= 0:
        yield end + 1, data[start:end]
        start = end + 1


def read_page(log: Path, source: str, after: str | None, limit: int, lowest: int) -> LogPage:
    """At most `limit` lines of level LEVELS[lowest] or worse, those after a cursor or the newest;
    only complete lines count. Blocks.

    Raises FileNotFoundError if there is no such log, ValueError for an invalid cursor.
    """
    path, offset, level = _begin(log, after)
    age = _age(log) if path == log else 0
    with path.open("rb") as file:
        size = file.seek(0, 2)
        # A log that became shorter was rotated.
        offset = offset if offset <= size else 0
        file.seek(offset)
        data = file.read(PAGE_BYTES)
    lines: list[LogLine] = []
    moment: datetime | None = None
    passed = 0
    for end, raw in _whole_lines(data, cut=after is None and offset > 0):
        if after is not None and len(lines) == limit:
            break
        text = redacted(raw.decode(errors="replace")[: 2 * LINE_CHARACTERS], LINE_CHARACTERS)
        match = _LINE.fullmatch(text)
        stamp = _moment(match["time"]) if match else None
        if match is not None and stamp is not None:
            level = LEVELS.index(match["level"].lower().replace("critical", "error"))
            moment = stamp
        else:
            match = None
        passed = end
        if level >= lowest:
            lines.append(
                LogLine(
                    id=f"{age}.{offset + end}.{level}",
                    created_at=moment,
                    level=LEVELS[level],
                    source=(match and match["source"]) or source,
                    message=match["message"] if match else text,
                )
            )
    more = offset + len(data) < size or b"\n" in data[passed:]
    if path != log and not more:
        return LogPage(lines, f"{_age(log)}.0.{level}", more=True)
    return LogPage(lines[-limit:], f"{age}.{offset + passed}.{level}", more)
