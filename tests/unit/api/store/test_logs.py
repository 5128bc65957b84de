"""Logs of processes: every line once and in order, whatever the pages, and never much at a time."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.api.store import logs
from ratchet.api.store.logs import PAGE_BYTES, START, LogPage, read_page

HEAD = "2026-01-02T03:04:05.678Z"


def everything(log: Path, after: str | None = START, limit: int = 3, lowest: int = 0) -> list[str]:
    """Messages of all pages that are there."""
    found = []
    while True:
        page = read_page(log, "env:a", after, limit, lowest)
        found += [line.message for line in page.lines]
        if not page.more:
            return found
        after = page.cursor


def test_lines_have_the_level_and_the_time_of_the_last_that_said_them(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text(
        f"--- env-a-1, epoch 1\n{HEAD} INFO my_env: loaded\n{HEAD} ERROR my_env.parts: broke\n"
        "Traceback (most recent call last):\nValueError: x\n"
        f"{HEAD} WARNING lib: api_key=sk-1234567890abc\nhalf a li"
    )
    page = read_page(log, "env:a", None, 100, 0)
    moment = datetime(2026, 1, 2, 3, 4, 5, 678000, UTC)
    assert [(line.created_at, line.level, line.source, line.message) for line in page.lines] == [
        (None, "info", "env:a", "--- env-a-1, epoch 1"),
        (moment, "info", "my_env", "loaded"),
        (moment, "error", "my_env.parts", "broke"),
        (moment, "error", "env:a", "Traceback (most recent call last):"),
        (moment, "error", "env:a", "ValueError: x"),
        (moment, "warning", "lib", "api_key=[hidden]"),
    ]
    assert everything(log, lowest=3) == [
        "broke",
        "Traceback (most recent call last):",
        "ValueError: x",
    ]
    with log.open("a") as file:
        file.write("ne\n")
    new = read_page(log, "env:a", page.cursor, 100, 0)
    assert [line.message for line in new.lines] == ["half a line"] and not new.more


def test_a_line_may_name_no_logger_and_a_time_of_this_machine(tmp_path: Path) -> None:
    """As the orchestrator writes them."""
    log = tmp_path / "orchestrator.log"
    log.write_text("2026-01-02 03:04:05,678 INFO step 3 | reward 0.5\n")
    (line,) = read_page(log, "orchestrator", None, 10, 0).lines
    assert (line.source, line.message) == ("orchestrator", "step 3 | reward 0.5")
    assert line.created_at == datetime(2026, 1, 2, 3, 4, 5, 678000).astimezone(UTC)


def test_a_traceback_that_a_page_ends_in_keeps_its_level(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text(f"{HEAD} ERROR e: broke\nTraceback\nValueError\n{HEAD} INFO e: on\n")
    assert everything(log, limit=1, lowest=3) == ["broke", "Traceback", "ValueError"]


def test_the_newest_lines_are_shown_first(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("".join(f"line {k}\n" for k in range(100_000)))
    page = read_page(log, "env:a", None, 2, 0)
    assert [line.message for line in page.lines] == ["line 99998", "line 99999"] and not page.more
    many = read_page(log, "env:a", None, 10**6, 0)
    assert 0 < len(many.lines) < 100_000 and many.lines[0].message.startswith("line ")


def test_a_page_reads_no_more_than_it_may(tmp_path: Path) -> None:
    """Neither of a line without an end nor of lines that it leaves out."""
    log = tmp_path / "a.log"
    log.write_text("x" * (2 * PAGE_BYTES) + "\nlast\n")
    pages: list[LogPage] = []
    after = START
    while not pages or pages[-1].more:
        pages.append(read_page(log, "env:a", after, 10, 0))
        after = pages[-1].cursor
    sizes = [len(line.message) for page in pages for line in page.lines]
    assert sizes == [logs.LINE_CHARACTERS, logs.LINE_CHARACTERS, 0, 4]
    log.write_text(f"{HEAD} INFO e: x\n" * 20_000)
    page = read_page(log, "env:a", START, 10, 3)
    assert page.lines == [] and page.more


def test_a_reader_goes_through_what_the_log_held_before(tmp_path: Path) -> None:
    log, past = tmp_path / "a.log", tmp_path / "a.log.1"
    log.write_text("one\ntwo\nthree\n")
    page = read_page(log, "env:a", START, 1, 0)
    past.write_bytes(log.read_bytes())
    log.write_text("four\n")
    assert everything(log, page.cursor) == ["two", "three", "four"]
    assert everything(log) == ["one", "two", "three", "four"]
    newest = read_page(log, "env:a", None, 10, 0)
    assert [line.message for line in newest.lines] == ["four"]


def test_a_log_that_became_shorter_is_read_from_its_beginning(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("one\ntwo\n")
    cursor = read_page(log, "env:a", None, 10, 0).cursor
    log.write_text("new\n")
    assert everything(log, cursor) == ["new"]


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n\r")), max_size=30),
    st.integers(1, 7),
)
def test_any_pages_give_every_line_once(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], limit: int
) -> None:
    log = tmp_path_factory.mktemp("logs") / "a.log"
    log.write_bytes("".join(f"> {line}\n" for line in lines).encode())
    assert len(everything(log, limit=limit)) == len(lines)


@pytest.mark.parametrize("cursor", ["x", "1.2", "1.2.9", "1.-2.0", "9" * 40])
def test_a_cursor_that_is_none_is_refused(tmp_path: Path, cursor: str) -> None:
    log = tmp_path / "a.log"
    log.write_text("one\n")
    with pytest.raises(ValueError, match="after: a cursor is the `next_after` of a page"):
        read_page(log, "env:a", cursor, 10, 0)


def test_no_log_is_no_page(tmp_path: Path) -> None:
    for after in (None, START, "0.0.1", "5.0.1"):
        with pytest.raises(FileNotFoundError):
            read_page(tmp_path / "a.log", "env:a", after, 10, 0)
