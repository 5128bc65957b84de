"""The `ratchet` command: what it prints, its exit status, and, as a process, Ctrl-C."""

import asyncio
import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from ratchet.activities.storage import keys
from ratchet.api.client import options, printing
from ratchet.api.client.assignments import nested, pairs
from ratchet.api.client.cli import app
from ratchet.api.client.watch import Connection, View
from ratchet.api.schemas.events import Event
from ratchet.api.schemas.machines import Engine, WorkerItem
from ratchet.api.schemas.run import RUN_EXAMPLE, Run
from tests import ROOT
from tests.unit.api.client.support import breaking, make_steps, serving
from tests.unit.api.conftest import WITHIN_S, Served, config, eventually, put_checkpoint
from tests.unit.api.routes.test_rollouts import batch, group
from tests.unit.api.store.test_curves import damage

COMMAND = [sys.executable, "-m", "ratchet.api.client"]
on_server = pytest.mark.asyncio(loop_scope="session")


@dataclass
class Done:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


def environment(address: str) -> dict[str, str]:
    given_here = {k: v for k, v in os.environ.items() if not k.startswith("RATCHET_")}
    return {**given_here, "RATCHET_API": address, "COLUMNS": "100", "TERM": "xterm"}


async def begun(
    address: str, *arguments: str, out: int = subprocess.PIPE, stdin: int = subprocess.DEVNULL
) -> Any:
    return await asyncio.create_subprocess_exec(
        *COMMAND,
        *arguments,
        cwd=ROOT,
        env=environment(address),
        stdin=stdin,
        stdout=out,
        stderr=subprocess.PIPE,
    )


async def ended(process: Any) -> Done:
    out, err = await asyncio.wait_for(process.communicate(), WITHIN_S)
    return Done(process.returncode, (out or b"").decode(), err.decode())


async def ratchet(address: str, *arguments: str) -> Done:
    """The command in this process, which saves the start of another."""
    env = {"RATCHET_API": address}
    result = await asyncio.to_thread(CliRunner().invoke, app, [*arguments], env=env)
    assert isinstance(result.exception, SystemExit | None), result.exception
    return Done(result.exit_code, result.stdout, result.stderr)


@asynccontextmanager
async def config_file(tmp_path: Path, name: str, **changes: Any) -> AsyncIterator[str]:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config(name, **changes)))
    yield str(path)


# -- pure -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (4.25, "4.25 s"),
        (59.6, "1 min 0 s"),
        (299.7, "5 min 0 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 0 min"),
        (11400.0, "3 h 10 min"),
    ],
)
def test_a_time_span_never_has_60_seconds(seconds: float, text: str) -> None:
    assert printing.lasting(seconds) == text


def test_assignments_are_sections() -> None:
    given_ = ["train.env.reverse-text.ratio=2", 'train.env."a.b".ratio=0.5', "name=it's", "x=null"]
    assert nested([*given_, "train.batch_size=64", "y=[1, 2]", 'z="1"', "w=true"]) == {
        "train": {"env": {"reverse-text": {"ratio": 2}, "a.b": {"ratio": 0.5}}, "batch_size": 64},
        "name": "it's",
        "x": None,
        "y": [1, 2],
        "z": "1",
        "w": True,
    }
    assert pairs(["a=b=c", "d="]) == {"a": "b=c", "d": ""}


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (["a"], "form key=value"),
        (["=1"], "form key=value"),
        (["a..b=1"], "is not a key"),
        (["a=1", "a.b=2"], "a already has a value"),
        (["a.b=2", "a=1"], "is set twice"),
        (["a=1", "a=1"], "is set twice"),
    ],
)
def test_what_is_no_assignment_is_said(wrong: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        nested(wrong)


def test_a_sparkline_goes_from_the_lowest_to_the_highest() -> None:
    assert printing.sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert printing.sparkline([0.1, 0.3, 0.9, 0.7], 2) == "▁█"
    assert printing.sparkline([0.5, 0.5], 9) == "▁▁"
    assert printing.sparkline([], 9) == ""


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.integers(1, 50))
def test_a_sparkline_fits_and_has_both_ends(values: list[float], width: int) -> None:
    line = printing.sparkline(values, width)
    assert len(line) == min(width, len(values))
    assert printing.BARS[0] in line


def test_nothing_that_is_printed_steers_a_terminal() -> None:
    assert printing.clean("a\x1b[2J\x07\tb\n\x9bc") == "a\ufffd[2J\ufffd\tb\n\ufffdc"


def test_a_watched_run_is_drawn_in_a_few_lines() -> None:
    view = View(Run.model_validate(RUN_EXAMPLE), "http://h", {9: 0.1, 10: 0.2, 11: 0.3})
    for step, reward in ((12, 0.4), (13, 0.5), (12, 0.3)):
        data = {"step": step, "reward": reward}
        view.take(
            Event(
                id=str(step),
                type="run.step",
                created_at="2026-01-01T12:00:00Z",  # type: ignore[arg-type]
                level="info",
                source="run",
                message=f"step {step} is done [bold]\x1b[31m",
                data=data,
            )
        )
    # The run went back to step 11 and did step 12 again.
    assert view.rewards == {9: 0.1, 10: 0.2, 11: 0.3, 12: 0.3}
    out = printing.console()
    with out.capture() as capture:
        out.print(view.picture(80))
    text = capture.get()
    for part in ("reverse-1a2b3c  running", "12/40", "▁▅██ 0.3", "reverse-text 0.61 at step 10"):
        assert part in text
    assert "64 train, 0 eval rollouts" in text and "[bold]\ufffd[31m" in text
    assert "Ctrl-C stops watching, not the run" in text
    view.on_interrupt = "cancels the run"
    with out.capture() as capture:
        out.print(view.picture(80))
    assert "Ctrl-C cancels the run" in capture.get()
    view.trouble = "refused"
    with out.capture() as capture:
        out.print(view.picture(80))
    assert "connection lost (refused); trying again" in capture.get()


def test_a_lost_connection_is_reported_once_and_so_is_its_return(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter((100.0, 134.2))
    monkeypatch.setattr("ratchet.api.client.watch.time.monotonic", lambda: next(clock))
    connection = Connection()
    for why in ("", "refused", "refused", "reset", "", ""):
        connection.hear(why)
    said = capsys.readouterr().err.splitlines()
    assert said == ["connection lost (refused); trying again", "back after 34 s"]


# -- commands -------------------------------------------------------------------------------------


@on_server
async def test_a_run_from_create_to_stop(served: Served, tmp_path: Path) -> None:
    async with serving(served) as address, config_file(tmp_path, "cli") as path:
        plan = await ratchet(address, "runs", "create", path, "max_steps=8", "--dry-run")
        assert plan.status == 0 and "128 at least" in plan.out
        assert "workers have checked what it names" in plan.err
        assert plan.err.startswith(
            "workers check the config, which takes some 10 to 20 s, longer on a busy machine …\n"
        )
        made = await ratchet(
            address, "runs", "create", path, "max_steps=8", "metadata.owner=cli", "--json"
        )
        assert made.status == 0 and made.json["max_steps"] == 8
        assert made.err == "", "with --json it is for problem documents"
        run_id = made.json["id"]
        await served.until(run_id, step=3)
        put_checkpoint(served.store, run_id, 2, tmp_path)
        for step in (1, 2, 3):
            value = {"step": step, "time": 0.0, "metrics": {"reward/all/mean": step / 10}}
            served.store.put_json(keys.step_record(run_id, step), value)
        group(served, run_id, "train/1", "easy", [0.5, 1.0])

        # What an API knows of a run may be a quarter of a second old.
        while "3/8" not in (shown := await ratchet(address, "runs", "show", run_id)).out:
            assert shown.status == 0
        assert "reverse-text 0.2 at step 0" in shown.out
        assert shown.out.startswith("health") and "attention: no worker polls for" in shown.out
        judged = await ratchet(address, "runs", "health", run_id, "--json")
        assert judged.json["verdict"] == "attention" and judged.json["findings"][0]["advice"]
        listed = await eventually(
            lambda: ratchet(address, "runs", "list", "--metadata", "owner=cli", "--json"),
            lambda done: bool(done.json["data"]),
        )
        assert [run["id"] for run in listed.json["data"]] == [run_id]
        table = ("runs", "list", "--status", "running", "--limit", "100")
        await eventually(lambda: ratchet(address, *table), lambda done: run_id in done.out)
        metrics = await ratchet(address, "runs", "metrics", run_id)
        assert "reward/all/mean" in metrics.out and "▁▅█" in metrics.out
        wrong = await ratchet(address, "runs", "metrics", run_id, "--keys", "rewards/all/mean")
        assert wrong.status == 1 and "did you mean reward/all/mean?" in wrong.err
        every = await ratchet(address, "runs", "metrics", run_id, "--keys", "rew*", "--json")
        assert every.json["data"][0]["metrics"] == {"reward/all/mean": 0.1}
        as_csv = await ratchet(address, "runs", "metrics", run_id, "--csv")
        assert len(as_csv.out.splitlines()) == 4
        other = await ratchet(address, "runs", "rollouts", run_id, "--env", "reverse-txt")
        assert other.status == 1 and "has no env 'reverse-txt'; its envs: reverse-text" in other.err
        rollouts = await ratchet(address, "runs", "rollouts", run_id)
        assert "train:1:0" in rollouts.out and "train:1:1" in rollouts.out
        read = await ratchet(address, "runs", "rollouts", run_id, "train:1:1")
        assert "assistant" in read.out and "exact 1" in read.out
        saved = await ratchet(address, "runs", "checkpoints", run_id)
        assert "sound" in saved.out
        whole = await ratchet(address, "runs", "config", run_id)
        assert whole.json["max_steps"] == 8

        changed = await ratchet(
            address, "runs", "set", run_id, "dispatch.max_inflight_rollouts=128", "metadata.a=b"
        )
        assert changed.status == 0 and "max_inflight_rollouts" in changed.out
        asked = await ratchet(address, "runs", "eval", run_id, "guess-hard")
        assert "an eval was requested" in asked.out
        assert (await ratchet(address, "runs", "checkpoint", run_id)).status == 0
        paused = await ratchet(address, "runs", "pause", run_id, "--mode", "cancel")
        assert f"{run_id} is pausing" in paused.out
        assert (await ratchet(address, "runs", "resume", run_id)).status == 0
        forked = await ratchet(address, "runs", "fork", run_id, "max_steps=9", "--json")
        assert forked.json["max_steps"] == 9 and forked.json["id"] != run_id
        gone = await ratchet(address, "runs", "cancel", forked.json["id"])
        assert gone.status == 0
        stopped = await ratchet(address, "runs", "stop", run_id, "--reason", "seen enough")
        assert f"{run_id} is stopping" in stopped.out
        await served.until(run_id, status="succeeded")
        result = await ratchet(address, "runs", "events", run_id)
        assert "stop was requested: seen enough" in result.out
        followed = await ratchet(address, "runs", "events", run_id, "--follow", "--json")
        assert followed.status == 0 and len(followed.lines) == len(result.out.splitlines())
        verbs = [e["data"]["asked"] for e in followed.lines if e["type"] == "run.asked"]
        assert verbs == ["trigger_eval", "checkpoint", "pause", "resume", "stop"]


@on_server
async def test_a_dry_run_that_no_worker_checked_is_no_success(
    served: Served, tmp_path: Path
) -> None:
    async with serving(served) as address, config_file(tmp_path, "broken-preflight") as path:
        plan = await ratchet(address, "runs", "create", path, "--dry-run")
        assert plan.status == 3 and "80 at least" in plan.out
        assert "the config is valid; not checked: environments, model" in plan.err


@on_server
async def test_what_a_run_left_is_listed(served: Served) -> None:
    run_id = (await served.start("listed"))["id"]
    await served.until(run_id, step=3)
    for step in (1, 2):
        result = {"env": "e", "step": step, "reward_mean": step / 4, "rollouts": 8, "errored": 1}
        value = {**result, "versions": [step, step + 1]}
        served.store.put_json(keys.eval_record(run_id, f"{step}-1/e"), value)
        group(served, run_id, f"train/{step}", "e", [0.5])
        batch(served, run_id, step, f"train/{step}")
    damage(served.store, keys.eval_record(run_id, "2-1/e"), "content")
    damage(served.store, keys.batch(run_id, 2), "marker")
    damage(served.store, keys.group(run_id, "train/1"), "content")
    async with serving(served) as address:

        async def runs(*arguments: str) -> Done:
            done = await ratchet(address, "runs", *arguments)
            assert done.status == 0, done.err
            return done

        sound, bad = (await runs("evals", run_id)).out.splitlines()[1:]
        assert sound.split() == ["1", "e", "0.25", "8", "1", "1-2", "sound"]
        assert bad.split()[:3] == ["2", "e", "-"] and "damaged: " in bad
        listed = (await runs("evals", run_id, "--json")).json["data"]
        assert [item["problem"] is None for item in listed] == [True, False]
        first, second = (await runs("batches", run_id)).out.splitlines()[1:]
        assert "batches/step-00000001.parquet" in first and "damaged: " in second
        cut = await runs("batches", run_id, "--limit", "1")
        assert len(cut.out.splitlines()) == 2 and "--all shows them" in cut.err
        assert len((await runs("batches", run_id, "--limit", "1", "--all")).out.splitlines()) == 3
        left = await runs("rollouts", run_id)
        assert "left out, because damaged: train/1" in left.err
        assert (await runs("rollouts", run_id, "--json")).json["damaged"] == ["train/1"]
        none = await ratchet(address, "runs", "rollouts", run_id, "--step", "900")
        assert none.status == 1 and "no batch of step 900 has been written" in none.err

        log = (await runs("logs", run_id)).out.splitlines()
        result = (await runs("events", run_id)).out.splitlines()
        assert len(log) == len(result) and " info    run: " in log[0]
        assert (await runs("logs", run_id, "--level", "error")).out.strip() == ""
        newest = await runs("events", run_id, "--order", "desc", "--types", "run.step,server")
        assert newest.out.splitlines() == [line for line in result if " step 3 is done" in line]
        for wrong in (["--order", "desc"], ["--types", "run"]):
            done = await ratchet(address, "runs", "events", run_id, "--follow", *wrong)
            assert done.status == 2 and "--follow shows every event" in done.err
        for wrong in (["logs", run_id, "--level", "bad"], ["batches", run_id, "--limit", "0"]):
            assert (await ratchet(address, "runs", *wrong)).status == 2
        for verb in ("evals", "batches", "logs"):
            missing = await ratchet(address, "runs", verb, "nope")
            assert missing.status == 1 and "`ratchet runs list`" in missing.err
        lost = await ratchet(address, "runs", "logs", run_id, "--after", "nope")
        assert lost.status == 1 and "leave out --after to start with the first" in lost.err


@on_server
async def test_engines_and_workers_are_listed(served: Served) -> None:
    async with serving(served) as address:
        workers = await ratchet(address, "workers")
        assert workers.status == 0 and "orchestrator" in workers.out
        as_json = await ratchet(address, "workers", "--json")
        assert {item["role"] for item in as_json.json["data"]} >= {"orchestrator"}
        engines = await ratchet(address, "engines", "--json")
        assert engines.status == 0 and engines.json["has_more"] is False
    for verb in ("engines", "workers"):
        away = await ratchet("http://127.0.0.1:1", verb)
        assert away.status == 3 and "`make up`" in away.err


@on_server
async def test_a_search_goes_on_where_a_page_found_nothing_in_its_time(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ratchet.api.store.rollouts.SCAN_S", -1.0)
    run_id = (await served.start("searched"))["id"]
    for number in range(6):
        group(served, run_id, f"train/{number}", "e", [None if number == 2 else 0.5])
    async with serving(served) as address:
        search = ("runs", "rollouts", run_id, "--errored")
        found = await ratchet(address, *search)
        assert "train:2:0" in found.out and "there are more" in found.err
        assert [
            item["id"] for item in (await ratchet(address, *search, "--json")).json["data"]
        ] == ["train:2:0"]
        monkeypatch.setattr("ratchet.api.client.options.EMPTY_PAGES", 1)
        late = await ratchet(address, *search)
        assert late.status == 0 and "train:2:0" not in late.out
        assert "none found yet; --after train:4:0 searches on" in late.err


def test_engines_and_workers_are_a_line_each() -> None:
    engine = Engine(
        id="r/host/engine/0",
        run_id="r",
        index=0,
        state="restarting",
        attempt=3,
        since=None,
        worker="71@host-a",
        policy_version=None,
        last_failure="exit status 1\n\x1b[2J",
    )
    gauges: list[dict[str, Any]] = [{"worker_inflight": 3}, {"worker_inflight": 4}, {}]
    worker = WorkerItem(id="71@host-a", role="rollout", queue="q", last_seen=None, gauges=gauges)
    out = printing.console()
    with out.capture() as capture:
        out.print(printing.engines_table([engine]))
        out.print(printing.workers_table([worker, worker.model_copy(update={"gauges": []})]))
    _, one, _, busy, quiet = (line.split() for line in capture.get().splitlines())
    assert one[:6] == [engine.id, "restarting", "3", "-", "-", "71@host-a"]
    assert one[6:] == ["exit", "status", "1", "\ufffd[2J"]
    assert busy == ["71@host-a", "rollout", "q", "-", "7"] and quiet[-1] == "-"


@on_server
async def test_refusals_are_readable_and_have_their_status(served: Served, tmp_path: Path) -> None:
    async with serving(served) as address:
        async with config_file(tmp_path, "cli", max_steps=-1) as path:
            wrong = await ratchet(address, "runs", "create", path, "train.batchsize=3")
        assert wrong.status == 1
        assert f"The run config {path} cannot be used" in wrong.err
        assert "/max_steps: Input should be" in wrong.err
        assert "/train/batchsize: unknown key; did you mean 'batch_size'?" in wrong.err
        async with config_file(tmp_path, "bad-env") as path:
            checked = await ratchet(address, "runs", "create", path, "--json")
        assert checked.status == 1 and checked.out == ""
        problem = json.loads(checked.err)
        assert problem["errors"][0]["pointer"] == "/train/env/0/id"
        missing = await ratchet(address, "runs", "stop", "nope")
        assert missing.status == 1 and "`ratchet runs list`" in missing.err
        for usage in (
            ["runs", "create", str(tmp_path / "none.toml")],
            ["runs", "set", "x", "a"],
            ["runs", "list", "--status", "happy"],
            ["runs", "nothing"],
        ):
            done = await ratchet(address, *usage)
            assert done.status == 2 and "Error" in done.err
    for arguments in (["runs", "list"], ["runs", "watch", "x"], ["runs", "list", "--json"]):
        away = await ratchet("http://127.0.0.1:1", *arguments)
        assert away.status == 3 and "127.0.0.1:1" in away.err and "refused" in away.err
    assert json.loads(away.err)["type"].endswith("unreachable")


@on_server
async def test_following_a_run_to_its_end_prints_how_it_was(served: Served, tmp_path: Path) -> None:
    async with serving(served) as address:
        async with config_file(tmp_path, "ends") as path:
            good = await ratchet(address, "runs", "create", path, "--follow")
        assert good.status == 0 and "succeeded at step 5" in good.out.splitlines()[-1]
        async with config_file(tmp_path, "fails") as path:
            bad = await ratchet(address, "runs", "create", path, "--follow", "--json")
        assert bad.status == 1
        assert [line["object"] for line in bad.lines][:2] == ["run", "event"]
        assert bad.lines[-1]["status"] == "failed" and bad.lines[-2]["type"] == "run.ended"
        again = await ratchet(address, "runs", "watch", bad.lines[0]["id"])
        assert again.status == 1
        assert "GateFailed in inference: 0.3 != 0.1" in again.out.splitlines()[-1]


async def lines_until(process: Any, part: str) -> list[str]:
    found: list[str] = []
    while part not in (found or [""])[-1]:
        line = await asyncio.wait_for(process.stdout.readline(), WITHIN_S)
        assert line, found
        found.append(line.decode())
    return found


@on_server
async def test_ctrl_c_stops_watching_and_not_the_run(served: Served) -> None:
    run_id = (await served.start("goes"))["id"]
    await served.until(run_id, step=3)
    async with serving(served) as address:
        process = await begun(address, "runs", "watch", run_id, "--from-start")
        await lines_until(process, "step 3 is done")
        await make_steps(served, run_id, 4)
        await lines_until(process, "step 4 is done")
        process.send_signal(signal.SIGINT)
        done = await ended(process)
        assert done.status == 130
        assert f"stopped watching; run {run_id} continues" in done.err and "Trace" not in done.err
        run = (await served.http.get(f"/v1/runs/{run_id}")).json()
        assert run["status"] == "running"
        # Nor was it asked anything.
        result = (await served.http.get(f"/v1/runs/{run_id}/events")).json()["data"]
        assert "run.asked" not in {event["type"] for event in result}


@on_server
async def test_a_terminal_sees_the_run_move_over_a_broken_stream(served: Served) -> None:
    run_id = (await served.start("moves"))["id"]
    await served.until(run_id, step=3)
    seen = b""
    async with serving(served) as address, breaking(address) as way:
        master, slave = pty.openpty()

        def read() -> None:
            nonlocal seen
            seen += os.read(master, 65536)

        async def sees(part: str, since: int = 0) -> None:
            async def look() -> str:
                return seen[since:].decode(errors="replace")

            await eventually(look, lambda text: part in text)

        loop = asyncio.get_running_loop()
        loop.add_reader(master, read)
        process = await begun(way.address, "runs", "watch", run_id, out=slave)
        await sees("3/5")
        await sees("waits for")
        # Whatever connection is opened next breaks before it said anything.
        way.cuts += [0, 0]
        await make_steps(served, run_id, 4)
        await sees("step 4 is done with reward 0.040")
        await sees("4/5")
        mark = len(seen)
        process.send_signal(signal.SIGINT)
        done = await ended(process)
        assert done.status == 130 and "continues" in done.err
        # The cursor, hidden while drawing, is given back.
        await sees("\x1b[?25h", mark)
        process = await begun(way.address, "runs", "watch", run_id, out=slave)
        mark = len(seen)
        await sees("Ctrl-C stops watching, not the run", mark)
        await served.http.post(f"/v1/runs/{run_id}/stop")
        done = await ended(process)
        assert done.status == 0
        await sees(f"{run_id} succeeded at step 4", mark)
        loop.remove_reader(master)
        os.close(slave)
        os.close(master)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_long_check_says_that_it_is_under_way(
    monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=terminal, width=100)
    monkeypatch.setattr(printing, "console", lambda *, stderr: console)
    with options.progress(options.CHECKING, as_json_=True):
        assert written.getvalue() == ""
    with options.progress(options.CHECKING, as_json_=False):
        hides_the_cursor = "\x1b[?25l" in written.getvalue()
    assert hides_the_cursor is terminal, "a spinner does"
    assert "workers check the config" in written.getvalue()


@pytest.mark.parametrize("field", ["paused_because", "pause_reason", "error"])
def test_a_list_has_the_reason_of_each_run_whole(
    field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = " ".join(f"word{k}" for k in range(60))
    error = {"code": "GateFailed", "message": reason}
    run = Run.model_validate({**RUN_EXAMPLE, field: error if field == "error" else reason})
    printing.console().print(printing.runs_table([run]))
    shown = capsys.readouterr().out
    assert all(word in shown.split() for word in reason.split())


def test_what_the_check_found_stands_in_words() -> None:
    error = {"code": "bad_input", "role": "preflight", "message": "train.env.0.id: none"}
    run = Run.model_validate({**RUN_EXAMPLE, "error": error})
    assert printing.error_line(run) == "the check before the start found: train.env.0.id: none"


def test_of_many_warnings_the_newest_are_shown() -> None:
    many = [f"batch {n} is empty" for n in range(5)]
    run = Run.model_validate({**RUN_EXAMPLE, "warnings": many})
    out = io.StringIO()
    Console(width=120, file=out).print(printing.run_table(run, "http://h"))
    shown = " ".join(out.getvalue().split())
    assert "batch 2 is empty; batch 3 is empty; batch 4 is empty (and 2 earlier" in shown
    assert "batch 1 is" not in shown
    done = Run.model_validate({**RUN_EXAMPLE, "warnings": many, "status": "succeeded"})
    Console(width=120, file=(out := io.StringIO())).print(printing.run_table(done, "http://h"))
    assert "warned" not in out.getvalue(), "they are events only"
