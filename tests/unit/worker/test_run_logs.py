"""The orchestrator's log of a run: when its pipeline is logged, what it says, how large it gets."""

import logging
import stat
from pathlib import Path
from typing import Any

import pytest

from ratchet.activities.contracts.names import LOG_LINE, LOG_VIEW
from ratchet.worker import run_logs
from ratchet.worker.run_logs import GONE_S, RunLogs, log_file, pipeline_line

LAG = {"p99": 0.003, "max": 0.012}


def view(**changes: Any) -> dict[str, Any]:
    """What a run says of itself."""
    return {
        "status": "running",
        "step": 11,
        "max_steps": 100,
        "policy_version": 11,
        "collected": 45,
        "wanted": 128,
        "unit": "rollouts",
        "shipped_batches": 1,
        "evals": {"10-1/b": {"groups": 12, "of": 32}},
        "waiting_for": "rollouts for batch 12",
        "interval": 10.0,
        **changes,
    }


def generation(closed: bool = False, **changes: Any) -> dict[str, Any]:
    """What a generation says."""
    known = {"inflight": {"train/a": 60, "eval/b": 4}, "permits": 128, "off_policy_max": 2}
    return {**known, "buffered": 13, "closed": closed, **changes}


def record(workflow_id: str, at: float, **said: Any) -> logging.LogRecord:
    """A log record of a workflow, as the SDK makes it."""
    about = {"created": at, "levelname": "INFO", "msg": "as the console has it"}
    return logging.makeLogRecord(
        {**about, "temporal_workflow": {"workflow_id": workflow_id}, **said}
    )


def lines(home: Path, run: str = "r") -> list[str]:
    """The log without its times."""
    file = log_file(home, run)
    text = file.read_text().splitlines() if file.exists() else []
    return [line.split(" ", 2)[2] for line in text]


def test_a_line_says_how_the_pipeline_stands() -> None:
    assert pipeline_line(view(), [generation(), generation(inflight={"train/a": 1})], LAG) == (
        "pipeline: step 11/100 | policy v11 | batch 45/128 rollouts, 1 shipped | 26 rollouts in "
        "unfinished groups | in flight 65/128 (eval/b 4, train/a 61) | off-policy at most 2 | "
        "evals 10-1/b 12/32 | lag p99 3 ms, max 12 ms | waits for rollouts for batch 12"
    )
    short = view(evals={}, waiting_for=None, status="paused", unit="tokens")
    assert pipeline_line(short, [], None) == (
        "pipeline: step 11/100 | policy v11 | batch 45/128 tokens, 1 shipped | paused"
    )


def test_the_pipeline_is_reported_once_an_interval_and_lines_at_once(tmp_path: Path) -> None:
    logs = RunLogs(tmp_path)
    assert not logs.filter(record("r", 100.0, **{LOG_VIEW: view()})), "no console shows views"
    logs.filter(record("r/dispatch/3", 100.0, **{LOG_VIEW: generation()}))
    assert logs.filter(record("r", 101.0, **{LOG_LINE: "step 11 |\nreward 0.5"}))
    logs.write(101.0)
    assert len(lines(tmp_path)) == 2
    assert lines(tmp_path)[0] == "INFO step 11 | reward 0.5", "one line each"
    assert lines(tmp_path)[1].startswith("INFO pipeline: step 11/100 |")
    assert "in flight 64/128" in lines(tmp_path)[1]
    logs.filter(record("r", 110.0, **{LOG_VIEW: view(collected=50)}))
    logs.write(110.9)
    assert len(lines(tmp_path)) == 2, "the next is not due"
    logs.filter(record("r/dispatch/3", 111.0, **{LOG_VIEW: generation(closed=True)}))
    logs.write(111.0)
    assert len(lines(tmp_path)) == 3 and "batch 50/128" in lines(tmp_path)[2]
    assert "in flight" not in lines(tmp_path)[2], "the generation is gone"
    assert stat.S_IMODE(log_file(tmp_path, "r").parent.stat().st_mode) == 0o700


def test_a_run_that_ended_or_went_gets_no_more_lines(tmp_path: Path) -> None:
    logs = RunLogs(tmp_path)
    for run in ("ended", "gone"):
        logs.filter(record(run, 100.0, **{LOG_VIEW: view()}))
    logs.write(100.0)
    logs.filter(record("ended", 101.0, **{LOG_VIEW: view(status="succeeded")}))
    logs.write(101.0)
    assert lines(tmp_path, "ended")[-1].endswith("| succeeded | waits for rollouts for batch 12")
    logs.write(100.0 + GONE_S)
    logs.write(101.0 + GONE_S)
    logs.write(200.0 + GONE_S)
    assert len(lines(tmp_path, "ended")) == 2 and len(lines(tmp_path, "gone")) == 2


def test_other_records_pass(tmp_path: Path) -> None:
    logs = RunLogs(tmp_path)
    assert logs.filter(record("r", 100.0)) and logs.filter(logging.makeLogRecord({"msg": "x"}))
    logs.write(100.0)
    assert not (tmp_path / "logs").exists()


def test_a_line_holds_no_secret(tmp_path: Path) -> None:
    logs = RunLogs(tmp_path)
    logs.filter(record("r", 100.0, **{LOG_LINE: "server down: password=hunter2"}))
    logs.write(101.0)
    assert lines(tmp_path) == ["INFO server down: password=[hidden]"]


def test_a_log_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_logs, "MOST_BYTES", 2000)
    logs = RunLogs(tmp_path)
    for number in range(500):
        logs.filter(record("r", 100.0 + number, **{LOG_LINE: f"line {number}"}))
    logs.write(601.0)
    files = sorted(log_file(tmp_path, "r").parent.iterdir())
    assert len(files) == run_logs.KEPT + 1 and all(f.stat().st_size <= 2000 for f in files)
    assert lines(tmp_path)[-1] == "INFO line 499"
