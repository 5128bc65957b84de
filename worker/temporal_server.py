"""The stack's own Temporal server: the CLI's dev server on a SQLite file.

Invariant: each start makes SQLite count what the file holds, since the server never does. Without
these counts SQLite reads all executions of a namespace to find one of them by its id.
"""

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from ratchet.workflows.protocol.messages import SEARCH_ATTRIBUTES

TEMPORAL = Path(sys.executable).parent / "temporal"
RETENTION = "3650d"
"""How long ended runs are kept."""

# Cancellations reach activities at once only with both switches on.
DYNAMIC_CONFIG = (
    "system.enableCancelActivityWorkerCommand=true",
    "frontend.WorkerCommandsEnabled=true",
    # A server polls its one shard at most 20 times a second by default: 45 ms for every hop
    # between workflow and activity, which needs 5.
    "history.transferProcessorMaxPollRPS=1000",
    "history.timerProcessorMaxPollRPS=1000",
    "history.visibilityProcessorMaxPollRPS=1000",
)
SQLITE_PRAGMAS = ("journal_mode=WAL", "synchronous=FULL")
"""SQLite's default journal limits the dev server to about 50 activities a second. FULL writes each
transaction to disk before it is answered, as the store does with artifacts: a power cut reverts
neither.
"""
ENTRIES_COUNTED = 10_000
"""How much of each index is read: enough to tell a unique column from one with few values, in
0.2 s for 70,000 runs.
"""


def server_command(database: Path, port: int, ui_port: int | None = None) -> list[str]:
    """The command that serves `database`; without the Web UI if it has no port."""
    options = [
        ("--log-level", "error"),
        ("--db-filename", database),
        ("--port", port),
        ("--headless",) if ui_port is None else ("--ui-port", ui_port),
        *(("--sqlite-pragma", pragma) for pragma in SQLITE_PRAGMAS),
        *(("--dynamic-config-value", setting) for setting in DYNAMIC_CONFIG),
        *(("--search-attribute", f"{n}={kind}") for n, kind in SEARCH_ATTRIBUTES.items()),
    ]
    return [str(TEMPORAL), "server", "start-dev", *(str(w) for option in options for w in option)]


def analyze(database: Path) -> None:
    """Counts what `database` holds, for SQLite's query planner; nothing if there is none yet. No
    server may be running on it. Raises sqlite3.Error if it cannot be read. Source:
    https://sqlite.org/lang_analyze.html, "Approximate ANALYZE For Large Databases".
    """
    if database.exists():
        with closing(sqlite3.connect(database)) as connection:
            connection.execute(f"PRAGMA analysis_limit = {ENTRIES_COUNTED}")
            connection.execute("ANALYZE")
            connection.commit()


def keep_ended_runs(port: int) -> str | None:
    """Makes the server at `port` keep ended runs, which a dev server would forget after a day; says
    what went wrong, or None.
    """
    command = [str(TEMPORAL), "operator", "namespace", "update", "--namespace", "default"]
    command += ["--address", f"127.0.0.1:{port}", "--retention", RETENTION]
    command += ["--command-timeout", "60s"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stderr.strip() or "no reason given" if done.returncode else None
