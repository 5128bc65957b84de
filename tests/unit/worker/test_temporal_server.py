"""The stack's own Temporal server: what it is told, and what its database knows of itself."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from ratchet.worker.stack import Stack
from ratchet.worker.temporal_server import analyze, server_command

RUNS = 2000
IDS = ", ".join(f"'run-{i:04d}'" for i in range(100))
PAGE = (
    "SELECT * FROM visibility WHERE namespace = 'default' AND division IS NULL "
    f"AND id IN ({IDS}) ORDER BY closed DESC"
)
"""What Temporal asks SQLite for the rows of a page of the list."""


def database(home: Path) -> Path:
    """A database with the two indexes between which SQLite has to choose."""
    file = home / "temporal.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript(
            "PRAGMA journal_mode=WAL;"
            "CREATE TABLE visibility (namespace, id, division, closed);"
            "CREATE INDEX by_division ON visibility (namespace, division, closed DESC);"
            "CREATE INDEX by_id ON visibility (namespace, id, closed DESC);"
        )
        rows = [("default", f"run-{i:04d}", None, i) for i in range(RUNS)]
        connection.executemany("INSERT INTO visibility VALUES (?, ?, ?, ?)", rows)
        connection.commit()
    return file


def plan(file: Path) -> str:
    """How SQLite reads a page."""
    with closing(sqlite3.connect(file)) as connection:
        return "\n".join(row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {PAGE}"))


def test_temporal_answers_only_what_is_on_the_disk(tmp_path: Path) -> None:
    command = server_command(tmp_path / "temporal.db", 1, 2)
    pragmas = {command[k + 1] for k, word in enumerate(command) if word == "--sqlite-pragma"}
    assert pragmas == {"journal_mode=WAL", "synchronous=FULL"}


@pytest.mark.parametrize("ui_port", [None, 8233])
def test_the_web_ui_is_served_if_it_has_a_port(tmp_path: Path, ui_port: int | None) -> None:
    command = server_command(tmp_path / "temporal.db", 7233, ui_port)
    assert ("--headless" in command) == (ui_port is None)
    assert ("--ui-port" in command) == (ui_port is not None)


def test_an_analyzed_database_finds_the_runs_of_a_page_by_their_ids(tmp_path: Path) -> None:
    file = database(tmp_path)
    assert "by_division" in plan(file)
    analyze(file)
    assert "by_id" in plan(file)


def test_a_first_start_has_no_database_to_analyze(tmp_path: Path) -> None:
    analyze(tmp_path / "temporal.db")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [None, b"not a database" * 1000])
def test_temporal_is_started_with_its_database_analyzed_or_a_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    content: bytes | None,
) -> None:
    class Spawned(Exception):
        pass

    def spawn(*_: object) -> None:
        raise Spawned

    monkeypatch.setattr(Stack, "_spawn", spawn)
    if content is None:
        file = database(tmp_path)
    else:
        file = tmp_path / "temporal.db"
        file.write_bytes(content)
    with pytest.raises(Spawned):
        Stack(tmp_path)._start("temporal", ["temporal"], {})
    if content is None:
        assert "by_id" in plan(file)
        assert not caplog.records
    else:
        assert "temporal.db was not analyzed" in caplog.text
