"""Mirrors, as processes, against an API of uvicorn's and a target that keeps lines in a file."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvicorn
from fastapi import FastAPI, HTTPException

from ratchet.api.client import Ratchet
from ratchet.api.schemas.common import ListOf
from ratchet.api.schemas.metrics import EvalRecord, GaugeSample, LagSample, MetricsRow
from ratchet.api.schemas.rollouts import ROLLOUT_EXAMPLE, RolloutFull, RolloutItem
from ratchet.api.schemas.run import RUN_EXAMPLE, Run
from ratchet.worker.mirrors.__main__ import _command, parser
from ratchet.worker.mirrors.forward import BATCH, GAUGES_BATCH, SAMPLES, Forwarder
from ratchet.worker.mirrors.records import PROMPT_CHARS, eval_record
from ratchet.worker.mirrors.state import LATE_S, Record, Sample, Sent, States
from tests import ROOT

WITHIN_S = 40.0


class Journal:
    """A target: a line of JSON a record. `dead` in its folder breaks it, in mid-batch where it
    holds a number: so many records are taken before. `full` holds the number of lines after which
    it takes no more while the file is there.
    """

    every_s = 0.05

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def begin(self, run_id: str, series: str, count: int, mark: Any) -> int:
        self._dies(0)
        return max(count, len(lines(self.folder, series)))

    def send(self, series: str, first: int, records: Sequence[Record]) -> Any:
        for done, record in enumerate(records):
            self._dies(done)
            self._waits(series)
            with (self.folder / f"{series}.jsonl").open("a") as out:
                said = [first + done, record.step, record.eval, record.values]
                out.write(json.dumps(said) + "\n")
        return {"lines": first + len(records)}

    def end(self, series: str) -> None:
        pass

    def _waits(self, series: str) -> None:
        while (most := number(self.folder / "full")) is not None:
            if len(lines(self.folder, series)) < most:
                return
            time.sleep(0.02)

    def _dies(self, done: int) -> None:
        alive_for = number(self.folder / "dead")
        if alive_for is not None and done >= alive_for:
            raise ConnectionError("the target is down")


def number(file: Path) -> int | None:
    """What a file says; None if there is none."""
    with contextlib.suppress(FileNotFoundError):
        return int(file.read_text())
    return None


def lines(folder: Path, series: str) -> list[Any]:
    """What a Journal took: [number, step, eval's id, values] a record."""
    file = folder / f"{series}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


class Keeper(Journal):
    """A Journal that keeps the records it took, and counts those."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.kept: dict[str, list[Record]] = {}

    def send(self, series: str, first: int, records: Sequence[Record]) -> Any:
        for done, record in enumerate(records):
            self._dies(done)
            kept = self.kept.setdefault(series, [])
            assert len(kept) == first + done
            kept.append(record)

    def begin(self, run_id: str, series: str, count: int, mark: Any) -> int:
        self._dies(0)
        return max(count, len(self.kept.get(series, [])))


class FakeApi:
    """Runs, rows, evals, rollouts of evals and gauges as Ratchet's API tells them."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.rows: dict[str, list[MetricsRow]] = {}
        self.found: dict[str, list[EvalRecord]] = {}
        self.sampled: dict[str, list[GaugeSample | LagSample]] = {}
        self.rolled: list[RolloutFull] = []
        self.refused: dict[str, int] = {}
        self.address = ""
        self.app = FastAPI()
        self.app.get("/v1/runs")(self.list_runs)
        self.app.get("/v1/runs/{run_id}")(self.retrieve)
        self.app.get("/v1/runs/{run_id}/metrics")(self.metrics)
        self.app.get("/v1/runs/{run_id}/evals")(self.evals)
        self.app.get("/v1/runs/{run_id}/gauges")(self.gauges)
        self.app.get("/v1/runs/{run_id}/rollouts")(self.rollouts)
        self.app.get("/v1/runs/{run_id}/rollouts/{rid}")(self.rollout)

    def list_runs(self) -> ListOf[Run]:
        return ListOf[Run](data=[*self.runs.values()], has_more=False)

    def retrieve(self, run_id: str) -> Run:
        if run_id not in self.runs:
            raise HTTPException(404)
        return self.runs[run_id]

    def metrics(self, run_id: str, after_step: int = -1, limit: int = 1000) -> ListOf[MetricsRow]:
        rows = [row for row in self.rows[run_id] if row.step > after_step]
        return ListOf[MetricsRow](data=rows[:limit], has_more=len(rows) > limit)

    def evals(self, run_id: str) -> ListOf[EvalRecord]:
        return ListOf[EvalRecord](data=self.found[run_id], has_more=False)

    def gauges(
        self, run_id: str, after: float, limit: int, role: str
    ) -> ListOf[GaugeSample | LagSample]:
        assert role == "all"
        later = [sample for sample in self.sampled[run_id] if sample.time > after]
        later.sort(key=lambda sample: sample.time)
        return ListOf(data=later[:limit], has_more=len(later) > limit)

    def rollouts(
        self, run_id: str, step: int, env: str, kind: str, after: int = 0
    ) -> dict[str, Any]:
        """Three a page."""
        items = [each for each in self.rolled if (each.step, each.env) == (step, env)]
        page = [RolloutItem.model_validate(each.model_dump()) for each in items[after : after + 3]]
        more = len(items) > after + 3
        return {"data": page, "has_more": more, "next_after": str(after + 3)}

    def rollout(self, run_id: str, rid: str) -> RolloutFull:
        if rid in self.refused:
            raise HTTPException(self.refused[rid])
        return next(each for each in self.rolled if each.id == rid)

    def begin(self, run_id: str) -> None:
        self.runs[run_id] = Run.model_validate({**RUN_EXAMPLE, "id": run_id})
        self.rows[run_id], self.found[run_id], self.sampled[run_id] = [], [], []

    def steps(self, run_id: str, first: int, last: int, at: float = 1e9) -> None:
        """Steps `first`..`last` are trained, `at` seconds plus the step's number."""
        self.rows[run_id] += [
            MetricsRow(step=step, time=at + step, metrics={"loss": at + step, "unmeasured": None})
            for step in range(first, last + 1)
        ]

    def eval(self, run_id: str, step: int) -> None:
        result = {"epoch": f"{step}-1/rev", "env": "rev", "step": step, "reward_mean": step / 10}
        self.found[run_id].append(EvalRecord.model_validate(result))

    def roll(self, epoch: str, step: int, example: int, index: int, *said: str) -> None:
        """A rollout of an eval: what the user, the model, the user … said."""
        group = f"eval/{epoch}/{example}"
        roles = ["user", "assistant"] * len(said)
        result = {
            "id": f"{group.replace('/', ':')}:{index}",
            "group": group,
            "index": index,
            "kind": "eval",
            "env": "rev",
            "example": example,
            "step": step,
            "reward": index / 2,
            "messages": [
                {"role": role, "content": text} for role, text in zip(roles, said, strict=False)
            ],
        }
        self.rolled.append(RolloutFull.model_validate({**ROLLOUT_EXAMPLE, **result}))

    def gauge(self, run_id: str, source: str, *times: float) -> None:
        for at in times:
            result = {"time": at, "source": source, "worker_inflight": int(at)}
            self.sampled[run_id].append(GaugeSample.model_validate(result))

    def resume(self, run_id: str, attempt: int, step: int) -> None:
        """Another attempt goes on after `step`; what came after is not of the run any more."""
        self.rows[run_id] = [row for row in self.rows[run_id] if row.step <= step]
        self.runs[run_id] = self.runs[run_id].model_copy(
            update={"attempt": attempt, "status": "running", "finished_at": None}
        )

    def end(self, run_id: str) -> None:
        result = {"status": "succeeded", "finished_at": datetime(2026, 1, 1, tzinfo=UTC)}
        self.runs[run_id] = self.runs[run_id].model_copy(update=result)


@pytest.fixture
def api() -> Iterator[FakeApi]:
    fake = FakeApi()
    server = uvicorn.Server(uvicorn.Config(fake.app, port=0, log_level="error"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    until(lambda: server.started)
    fake.address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    yield fake
    server.should_exit = True
    thread.join()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.02)


@contextmanager
def mirroring(api: FakeApi, tmp_path: Path, *targets: str) -> Iterator[subprocess.Popen[bytes]]:
    """A mirror process with its children; they are killed at the end, if not before."""
    command = [
        sys.executable,
        "-m",
        "ratchet.worker.mirrors",
        "--api",
        api.address,
        "--every",
        "0.05",
    ]
    command += ["--state", str(tmp_path / "state")]
    for target in targets:
        command += ["--to", target]
    with (tmp_path / "log").open("ab") as log:
        process = subprocess.Popen(command, cwd=ROOT, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def journal(folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    return f"tests.unit.worker.mirrors.test_forward:Journal={folder}"


def forwarder(client: Ratchet, folder: Path, *runs: str) -> Forwarder:
    folder.mkdir(exist_ok=True)
    return Forwarder(client, Journal(str(folder)), States(folder / "state"), runs or ("all",))


def steps_of(folder: Path, series: str) -> list[int]:
    return [step for _, step, epoch, _ in lines(folder, series) if not epoch]


def numbered(folder: Path, series: str) -> bool:
    found = lines(folder, series)
    return [number for number, *_ in found] == [*range(len(found))]


def test_a_kill_between_two_steps_loses_and_doubles_nothing(api: FakeApi, tmp_path: Path) -> None:
    out = tmp_path / "out"
    api.begin("a")
    api.steps("a", 0, 29)
    api.eval("a", 10)
    target = journal(out)
    (out / "full").write_text("4")
    with mirroring(api, tmp_path, target) as first:
        until(lambda: len(lines(out, "a")) == 4)
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    # What came meanwhile belongs before what was under way, which keeps its numbers all the same.
    api.eval("a", 2)
    (out / "full").write_text("7")
    with mirroring(api, tmp_path, target) as second:
        until(lambda: len(lines(out, "a")) == 7)
        child = psutil.Process(second.pid).children()[0]
        child.kill()
        (out / "full").unlink()
        until(lambda: len(lines(out, "a")) >= 32)
        api.steps("a", 30, 31)
        until(lambda: len(lines(out, "a")) >= 34)
        # A record that is sent twice is sent before the next one.
        api.steps("a", 32, 32)
        until(lambda: 32 in steps_of(out, "a"))
    assert numbered(out, "a")
    assert steps_of(out, "a") == [*range(33)]
    assert [epoch for _, _, epoch, _ in lines(out, "a") if epoch] == ["10-1/rev", "2-1/rev"]
    assert lines(out, "a")[0] == [0, 0, "", {"loss": 1e9}]


def test_a_dead_target_is_tried_again_and_touches_no_other(api: FakeApi, tmp_path: Path) -> None:
    well, ill = tmp_path / "well", tmp_path / "ill"
    targets = (journal(well), journal(ill))
    api.begin("a")
    api.steps("a", 0, 9)
    (ill / "dead").write_text("4")
    with mirroring(api, tmp_path, *targets) as process:
        until(lambda: len(lines(well, "a")) == 10 and len(lines(ill, "a")) == 4)
        until(lambda: "the target is down" in (tmp_path / "log").read_text())
        api.steps("a", 10, 12)
        until(lambda: steps_of(well, "a") == [*range(13)])
        (ill / "dead").unlink()
        until(lambda: len(lines(ill, "a")) >= 13)
        children = psutil.Process(process.pid).children()
        process.terminate()
        assert process.wait(WITHIN_S) == 0
        assert not [child for child in children if child.is_running()]
    assert numbered(ill, "a") and steps_of(ill, "a") == [*range(13)]


def test_children_end_with_their_starter(api: FakeApi, tmp_path: Path) -> None:
    out = tmp_path / "out"
    api.begin("a")
    api.steps("a", 0, 0)
    with mirroring(api, tmp_path, journal(out)) as process:
        until(lambda: len(lines(out, "a")) == 1)
        (child,) = psutil.Process(process.pid).children()
        process.kill()
        process.wait()
        child.wait(WITHIN_S)


def test_attempts_and_forks_keep_their_steps(api: FakeApi, tmp_path: Path) -> None:
    api.begin("a")
    api.begin("f")
    api.steps("f", 0, 3)
    with Ratchet(api.address) as client:
        mirror = forwarder(client, tmp_path)
        api.steps("a", 0, 12)
        api.eval("a", 10)
        api.end("a")
        assert mirror.look()
        # From the last step: nothing is taken anew, the series goes on.
        api.resume("a", 2, 12)
        api.steps("a", 13, 15, at=2e9)
        assert mirror.look()
        assert steps_of(tmp_path, "a") == [*range(16)]
        # Attempt 3 from before what was sent; attempt 4 from after, before anyone looked.
        api.resume("a", 3, 11)
        api.steps("a", 12, 17, at=3e9)
        api.resume("a", 4, 17)
        api.steps("a", 18, 18, at=4e9)
        api.end("a")
        assert mirror.look()
        assert forwarder(client, tmp_path).look()
    assert steps_of(tmp_path, "a") == [*range(16)] and numbered(tmp_path, "a")
    assert steps_of(tmp_path, "a+4") == [*range(19)] and numbered(tmp_path, "a+4")
    losses = {
        step: values["loss"] for _, step, epoch, values in lines(tmp_path, "a+4") if not epoch
    }
    assert losses == {row.step: row.metrics["loss"] for row in api.rows["a"]}
    assert steps_of(tmp_path, "f") == [*range(4)]


def test_a_long_run_goes_in_batches_in_order(api: FakeApi, tmp_path: Path) -> None:
    api.begin("a")
    api.begin("b")
    api.steps("a", 0, 2 * BATCH + 5)
    for step in (BATCH, BATCH + 1, 3 * BATCH):
        api.eval("a", step)
    with Ratchet(api.address) as client:
        assert forwarder(client, tmp_path, "a").look()
    found = lines(tmp_path, "a")
    assert numbered(tmp_path, "a") and len(found) == 2 * BATCH + 9
    assert [step for _, step, _, _ in found] == sorted(step for _, step, _, _ in found)
    assert not lines(tmp_path, "b")


def test_a_run_that_the_target_refuses_holds_up_no_other(api: FakeApi, tmp_path: Path) -> None:
    class Picky(Journal):
        def send(self, series: str, first: int, records: Sequence[Record]) -> Any:
            if series == "bad":
                raise RuntimeError("no such run any more")
            return super().send(series, first, records)

    for run_id in ("bad", "good"):
        api.begin(run_id)
        api.steps(run_id, 0, 1)
    with Ratchet(api.address) as client:
        mirror = Forwarder(client, Picky(str(tmp_path)), States(tmp_path / "s"), ("all",))
        assert [mirror.look(), mirror.look()] == [False, False]
    assert steps_of(tmp_path, "good") == [0, 1]


def test_an_api_that_is_away_or_knows_no_run_is_no_failure_of_the_target(
    api: FakeApi, tmp_path: Path
) -> None:
    api.begin("a")
    api.steps("a", 0, 0)
    with Ratchet(api.address, max_retries=0) as client:
        assert forwarder(client, tmp_path, "unknown", "a").look()
    assert steps_of(tmp_path, "a") == [0]
    with Ratchet("http://127.0.0.1:9", max_retries=0) as client:
        assert forwarder(client, tmp_path).look()


def killed_in_mid_batch(client: Ratchet, target: Keeper, tmp_path: Path, done: int) -> Forwarder:
    """A look that ends after `done` records of a batch; returns what a new process goes on with."""
    (tmp_path / "dead").write_text(str(done))
    assert not Forwarder(client, target, States(tmp_path / "state"), ("all",)).look()
    (tmp_path / "dead").unlink()
    return Forwarder(client, target, States(tmp_path / "state"), ("all",))


def test_gauges_are_a_series_on_the_clock_and_none_is_lost_or_doubled(
    api: FakeApi, tmp_path: Path
) -> None:
    api.begin("a")
    api.gauge("a", "rollout-1", *(1e9 + 10 * n for n in range(20)))
    lag = {"mean": 0.1, "max": 0.5, "p99": 0.4}
    result = {"time": 1e9 + 0.5, "source": "trainer-2", "role": "trainer", "event_loop_lag": lag}
    api.sampled["a"].append(LagSample.model_validate(result))
    target = Keeper(tmp_path)
    with Ratchet(api.address) as client:
        mirror = killed_in_mid_batch(client, target, tmp_path, 7)
        assert len(target.kept["a.gauges"]) == 7
        # What came meanwhile and earlier belongs before what was under way, and is sent after it.
        api.gauge("a", "rollout-3", 1e9 + 5, 1e9 + 15, 1e9 + 300)
        assert mirror.look() and mirror.look()
        api.resume("a", 2, 0)
        api.gauge("a", "rollout-1", 1e9 + 290)
        assert mirror.look()
    kept = target.kept["a.gauges"]
    sent = [(record.source, record.time) for record in kept]
    assert len(sent) == 25
    assert sorted(sent) == sorted((each.source, each.time) for each in api.sampled["a"])
    assert kept[0].step == 10**9 and kept[0].values["gauges/rollout-1/worker_inflight"] == 1e9
    assert not [name for name in kept[0].values if name.endswith(("/time", "/heard"))]
    lags = {name: value for name, value in kept[1].values.items() if "event_loop_lag" in name}
    assert lags == {f"gauges/trainer-2/event_loop_lag/{name}": lag[name] for name in lag}
    assert "a" not in target.kept and set(target.kept) == {"a.gauges"}


def test_a_long_run_s_gauges_go_in_batches_and_their_times_are_forgotten(
    api: FakeApi, tmp_path: Path
) -> None:
    api.begin("a")
    api.gauge("a", "rollout-1", *(1e9 + n for n in range(2 * GAUGES_BATCH)))
    api.gauge("a", "rollout-2", 1e9)
    api.gauge("a", "rollout-3", 1e9 + 2 * GAUGES_BATCH - LATE_S / 2)
    api.end("a")
    target = Keeper(tmp_path)
    with Ratchet(api.address) as client:
        states = States(tmp_path / "state")
        assert Forwarder(client, target, states, ("all",)).look()
    assert len({(each.source, each.time) for each in target.kept["a.gauges"]}) == 2002
    assert len(target.kept["a.gauges"]) == 2002
    sent = states.load("a.gauges")
    assert set(sent.gauges) == {"rollout-1", "rollout-3"} and sent.settled
    assert sent.step == -1


def test_gauges_of_a_run_that_has_just_ended_are_waited_for(api: FakeApi, tmp_path: Path) -> None:
    api.begin("a")
    api.end("a")
    api.runs["a"] = api.runs["a"].model_copy(update={"finished_at": datetime.now(UTC)})
    target = Keeper(tmp_path)
    with Ratchet(api.address) as client:
        mirror = Forwarder(client, target, States(tmp_path / "state"), ("all",))
        assert mirror.look()
        api.gauge("a", "rollout-1", 1e9)
        assert mirror.look()
    assert len(target.kept["a.gauges"]) == 1


def test_an_eval_brings_a_table_of_samples_that_a_kill_does_not_change(
    api: FakeApi, tmp_path: Path
) -> None:
    api.begin("a")
    api.steps("a", 10, 10)
    api.eval("a", 10)
    for example in range(5):
        for index in range(2):
            api.roll("10-1/rev", 10, example, index, f"p{example}", f"r{index}", "more", "last")
        api.roll("10-2/rev", 10, example, 0, "another eval's", "another")
    api.rolled[0].messages[0]["content"] = [{"type": "text", "text": "p" * 2 * PROMPT_CHARS}]
    target = Keeper(tmp_path)
    with Ratchet(api.address) as client:
        mirror = killed_in_mid_batch(client, target, tmp_path, 1)
        rolled, api.rolled = api.rolled, []
        assert mirror.look()
        _, record = target.kept["a"]
        assert record.table == "eval/rev/samples"
        assert [each.example for each in record.samples] == [0, 0, 1, 1, 2, 2, 3, 4]
        first, second = record.samples[0], record.samples[2]
        assert first.prompt == "p" * (PROMPT_CHARS - 1) + "…"
        assert second == Sample(1, "p1", "r0\n\nmore\n\nlast", 0.0)
        assert record.rows[3] == [10, 1, "p1", "r1\n\nmore\n\nlast", 0.5]
        # Fewer than there are examples: one of each; none at all: no request.
        api.rolled = rolled
        for most, examples in ((3, [0, 1, 2]), (0, [])):
            target = Keeper(tmp_path)
            states = States(tmp_path / f"state{most}")
            assert Forwarder(client, target, states, ("a",), samples=most).look()
            assert [each.example for each in target.kept["a"][1].samples] == examples


def test_a_rollout_that_cannot_be_read_is_left_out_and_one_that_may_be_later_is_waited_for(
    api: FakeApi, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    api.begin("a")
    api.steps("a", 10, 10)
    api.eval("a", 10)
    for example in range(3):
        api.roll("10-1/rev", 10, example, 0, "p", "r")
    api.refused = {"eval:10-1:rev:0:0": 500, "eval:10-1:rev:2:0": 503}
    target = Keeper(tmp_path)
    with Ratchet(api.address, max_retries=0) as client:
        mirror = Forwarder(client, target, States(tmp_path / "state"), ("all",))
        assert not mirror.look() and not target.kept
        del api.refused["eval:10-1:rev:2:0"]
        assert mirror.look()
    assert [each.example for each in target.kept["a"][1].samples] == [1, 2]
    assert "no samples of eval:10-1:rev:0:0" in caplog.text


def test_an_eval_s_numbers_are_named_by_env() -> None:
    result = {"epoch": "3-1/e", "env": "e", "step": 3, "reward_mean": 0.5, "time": 7.0}
    record = eval_record(EvalRecord.model_validate({**result, "metrics": {"x": 1}, "ok": True}))
    assert record == Record(3, 7.0, {"eval/e/reward_mean": 0.5, "eval/e/metrics/x": 1.0}, "3-1/e")


def test_state_survives_whole(tmp_path: Path) -> None:
    pending = (Record(1, 2.0, {"a": 1.0}), Record(1, None, {"b": 2.0}, eval="1-1/e"))
    sent = Sent("a+2", count=3, step=0, time=1.0, evals=("0-1/e",), mark=[1], pending=pending)
    States(tmp_path).save("a", sent)
    assert States(tmp_path).load("a") == sent
    after = sent.committed({"m": 1})
    assert (after.count, after.step, after.time, after.pending) == (5, 1, 2.0, ())
    assert after.evals == ("0-1/e", "1-1/e")


def test_state_of_an_earlier_build_goes_on(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(
        '{"name": "a", "count": 3, "step": 1, "time": 2.0, "evals": ["0-1/e"], "mark": [1], '
        '"pending": [{"step": 2, "time": 3.0, "values": {"a": 1.0}, "eval": "2-1/e"}], '
        '"settled": ""}'
    )
    sent = States(tmp_path).load("a")
    pending = (Record(2, 3.0, {"a": 1.0}, eval="2-1/e"),)
    assert sent == Sent("a", 3, 1, 2.0, ("0-1/e",), [1], pending)


def test_the_number_of_samples_is_the_command_s() -> None:
    made = parser()
    assert made.parse_args(["--to", "wandb"]).samples == SAMPLES == 8
    input = made.parse_args(["--to", "wandb", "--samples", "0"])
    command = _command(input, "wandb")
    assert command[command.index("--samples") + 1] == "0"


def test_a_number_of_samples_below_0_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--to", "wandb", "--samples=-1"])
    assert "'-1' is not a count" in capsys.readouterr().err
