"""Metrics as columns: ranges, lineage, gaps, and thinning that keeps extremes."""

import csv
import io
import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.storage import curves as chunked
from ratchet.activities.storage import keys
from ratchet.activities.storage.store import ArtifactStore
from ratchet.api.store.curves import Curves, Span, Table, extremes
from ratchet.api.store.records import Records
from tests.unit.api.conftest import Served
from tests.unit.api.routes.test_create import problem


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(f"file://{tmp_path}")


def record(store: ArtifactStore, attempt: str, step: int, at: float = 1.0, **metrics: Any) -> None:
    value = {"step": step, "time": at, "metrics": metrics or {"loss": float(step)}}
    store.put_json(keys.step_record(attempt, step), value)


def lineage(store: ArtifactStore, attempt: str, source: str, step: int) -> None:
    store.put_json(keys.config(attempt), {})
    kind = "resume" if "+" in attempt else "fork"
    store.put_json(keys.lineage(attempt), {"source": source, "step": step, "kind": kind})


FLOATS = st.floats(allow_nan=True, allow_infinity=True, width=32)


@given(st.lists(FLOATS, max_size=300), st.integers(4, 60))
def test_thinning_keeps_ends_and_extremes_and_no_more_than_asked(
    values: list[float], points: int
) -> None:
    kept = extremes(range(len(values)), values, points)
    finite = [i for i, value in enumerate(values) if math.isfinite(value)]
    assert kept == sorted(set(kept)) and set(kept) <= set(finite)
    assert len(kept) <= points
    if len(finite) <= points:
        assert kept == finite
    if finite:
        assert kept[0] == finite[0] and kept[-1] == finite[-1]
        assert min(values[i] for i in kept) == min(values[i] for i in finite)
        assert max(values[i] for i in kept) == max(values[i] for i in finite)


def test_a_spike_of_one_step_in_ten_thousand_is_kept() -> None:
    steps = list(range(10_000))
    calm = [0.5] * 10_000
    spiky = [*calm]
    spiky[6789] = 99.0
    thin = Table(steps, [float(s) for s in steps], {"calm": calm, "spiky": spiky}).thinned(100)
    rows = {row["step"]: row["metrics"] for row in thin.rows()}
    assert rows[6789] == {"spiky": 99.0}
    assert sum("calm" in metrics for metrics in rows.values()) <= 100


def test_a_run_of_several_attempts_and_forks_has_every_step_once(store: ArtifactStore) -> None:
    store.put_json(keys.config("x"), {})
    for step in range(1, 8):
        record(store, "x", step, loss=float(step))
    lineage(store, "x+2", "x", 5)
    for step in (6, 7, 8):
        record(store, "x+2", step, loss=step + 0.5)
    lineage(store, "y", "x+2", 7)
    record(store, "y", 8, loss=80.0)
    records = Records(store)
    for run, wanted in [
        ("x", [1.0, 2.0, 3.0, 4.0, 5.0, 6.5, 7.5, 8.5]),
        ("y", [1.0, 2.0, 3.0, 4.0, 5.0, 6.5, 7.5, 80.0]),
    ]:
        table = records.curves.table(records.spans(run))
        assert table.steps == list(range(1, 9))
        assert [*table.columns["loss"]] == wanted
    cut = records.curves.table(records.spans("x"), after=4, until=7, names=["loss", "none"])
    assert cut.steps == [5, 6, 7]
    assert all(math.isnan(value) for value in cut.columns["none"])
    assert records.curves.table(records.spans("x"), after=4, limit=2).steps == [5, 6]


def test_an_attempt_that_was_never_restored_hides_nothing(store: ArtifactStore) -> None:
    store.put_json(keys.config("x"), {})
    record(store, "x", 1)
    store.put_json(keys.config("x+2"), {})
    assert Records(store).attempts("x") == ["x"]
    lineage(store, "x+3", "x", 1)
    assert Records(store).attempts("x") == ["x", "x+3"]


def test_a_step_waits_for_the_one_before_it(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ratchet.api.store.curves.FRESH_S", 0.0)
    curves, spans = Curves(store), [Span("x", -1, None)]
    now = time.time()
    for step in (1, 3):
        record(store, "x", step, at=now)
    assert curves.table(spans).steps == [1]
    record(store, "x", 2, at=now, loss=2.0, late=1.0)
    table = curves.table(spans)
    assert table.steps == [1, 2, 3]
    assert [row["metrics"] for row in table.rows()][1:] == [
        {"loss": 2.0, "late": 1.0},
        {"loss": 3.0},
    ]
    # One that is missing for good does not hide the rest.
    record(store, "x", 9, at=now - 600)
    monkeypatch.setattr("ratchet.api.store.curves.LISTED_S", 0.0)
    assert curves.table(spans).steps == [1, 2, 3, 9]


class Counting(ArtifactStore):
    """Counts what is read."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.read: list[str] = []

    def get(self, ref: ArtifactRef, *, schema: int = 1) -> bytes:
        self.read.append(ref.key)
        return super().get(ref, schema=schema)


def long_run(store: ArtifactStore, steps: int) -> None:
    store.put_json(keys.config("x"), {})
    for step in range(1, steps + 1):
        late = {"late": -float(step)} if step > 150 else {}
        record(store, "x", step, loss=float(step), **late)
        chunked.pack(store, "x", step)


def test_a_long_run_is_read_by_chunks_and_then_step_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ratchet.api.store.curves.FRESH_S", 0.0)
    store = Counting(str(tmp_path))
    long_run(store, 230)
    store.read.clear()
    curves, spans = Curves(store), [Span("x", -1, None)]
    table = curves.table(spans)
    assert len(store.read) == 2 + 30
    assert table.steps == list(range(1, 231)) and table.times == [1.0] * 230
    assert [*table.columns["loss"]] == [float(step) for step in range(1, 231)]
    assert [v for v in table.columns["late"] if v == v] == [-float(s) for s in range(151, 231)]
    cut = curves.table([Span("x", 149, 152)])
    assert [*cut.columns["loss"]] == [150.0, 151.0, 152.0]
    record(store, "x", 231)
    store.read.clear()
    assert curves.table(spans).steps[-1] == 231
    assert store.read == [keys.step_record("x", 231)]


@pytest.mark.parametrize("damage", ["content", "marker", "missing"])
def test_a_damaged_chunk_costs_time_and_nothing_else(store: ArtifactStore, damage: str) -> None:
    long_run(store, 310)
    ref = store.require(keys.step_chunk("x", 200))
    path = Path(store.path(ref.path if damage == "content" else f"{ref.key}.commit"))
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-20])
    table = Curves(store).table([Span("x", -1, None)])
    assert table.steps == list(range(1, 311))
    assert [*table.columns["loss"]] == [float(step) for step in range(1, 311)]


def test_a_chunk_waits_for_the_step_before_it(store: ArtifactStore) -> None:
    long_run(store, 200)
    for key in [keys.step_record("x", 100), keys.step_chunk("x", 100)]:
        store.delete(store.require(key))
    # All steps are old, so that the missing one is missing for good.
    assert len(Curves(store).table([Span("x", -1, None)]).steps) == 199
    store.delete(store.require(keys.step_chunk("x", 200)))
    store.delete(store.require(keys.step_record("x", 101)))
    record(store, "x", 101, at=time.time())
    chunked.pack(store, "x", 101)
    assert len(Curves(store).table([Span("x", -1, None)]).steps) == 99


def damage(store: ArtifactStore, key: str, what: str) -> Path:
    """Damages an artifact's content or marker; returns where the sound one was put aside."""
    path = Path(store.path(store.require(key).path if what == "content" else f"{key}.commit"))
    aside = path.with_name(f"{path.name}.aside")
    aside.write_bytes(path.read_bytes())
    path.write_bytes(path.read_bytes()[:-9])
    return aside


@pytest.mark.parametrize("what", ["content", "marker"])
def test_a_damaged_step_costs_its_own_point_until_it_is_restored(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr("ratchet.api.store.curves.FRESH_S", 0.0)
    curves, spans = Curves(store), [Span("x", -1, None)]
    now = time.time()
    for step in (1, 2, 3):
        record(store, "x", step, at=now)
    aside = damage(store, keys.step_record("x", 2), what)
    assert (curves.table(spans).steps, curves.table(spans).damaged) == ([1, 3], [2])
    # One that comes while the run goes on, and what comes after it.
    record(store, "x", 4, at=now)
    damage(store, keys.step_record("x", 4), what)
    record(store, "x", 5, at=now)
    table = curves.table(spans)
    assert (table.steps, table.damaged) == ([1, 3, 5], [2, 4])
    assert table.first(1).damaged == [2] and table.first(3).damaged == [2, 4]
    assert table.thinned(4).damaged == [2, 4]
    assert curves.table(spans, after=2, until=3).damaged == []
    aside.replace(str(aside).removesuffix(".aside"))
    monkeypatch.setattr("ratchet.api.store.curves.LISTED_S", 0.0)
    curves.table(spans)
    table = curves.table(spans)
    assert (table.steps, table.damaged) == ([1, 2, 3, 5], [4])


def test_a_damaged_step_after_a_missing_one_waits_for_it(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ratchet.api.store.curves.FRESH_S", 0.0)
    curves, spans = Curves(store), [Span("x", -1, None)]
    record(store, "x", 1)
    record(store, "x", 3, at=time.time())
    damage(store, keys.step_record("x", 3), "content")
    assert curves.table(spans).steps == [1]
    record(store, "x", 2)
    assert curves.table(spans).steps == [1, 2]
    store.put_json(f"{keys.step_records('x')}/step-notes.json", {})
    assert Curves(store).table(spans).steps == [1, 2]


@pytest.mark.asyncio(loop_scope="session")
async def test_csv_is_whole_and_says_what_a_limit_or_damage_left_out(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ratchet.api.routes.metrics.ROWS", 20)
    monkeypatch.setattr("ratchet.api.store.curves.ROWS_A_PART", 8)
    run_id = (await served.start("long"))["id"]
    for step in range(1, 27):
        record(served.store, run_id, step)
    damage(served.store, keys.step_record(run_id, 7), "content")
    url = f"/v1/runs/{run_id}/metrics"
    whole = await served.http.get(f"{url}?format=csv&keys=loss")
    rows = list(csv.reader(io.StringIO(whole.text)))
    steps = [step for step in range(1, 27) if step != 7]
    assert [row[0] for row in rows] == ["step", *map(str, steps)]
    assert "link" not in whole.headers and whole.headers["ratchet-damaged-steps"] == "7"
    # By parts, as whoever follows the links gets it.
    result, after = [], f"{url}?format=csv&keys=loss&limit=10"
    while after:
        part = await served.http.get(after)
        result += list(csv.reader(io.StringIO(part.text)))[1:]
        link = part.headers.get("link", "")
        assert not link or link.endswith('>; rel="next"')
        after = link.partition(">")[0].removeprefix("<")
    assert result == rows[1:]
    page = (await served.http.get(f"{url}?until_step=24")).json()
    assert len(page["data"]) == 20 and page["has_more"] and page["damaged"] == [7]


@pytest.mark.asyncio(loop_scope="session")
async def test_ranges_keys_points_and_csv(served: Served) -> None:
    run_id = (await served.start("curved"))["id"]
    for step in range(1, 101):
        spike = 50.0 if step == 42 else 0.0
        record(served.store, run_id, step, **{"reward/all/mean": step / 100, "kl": spike})
    url = f"/v1/runs/{run_id}/metrics"
    page = (await served.http.get(f"{url}?after_step=10&until_step=12&keys=kl")).json()
    assert page["data"] == [
        {"step": 11, "time": 1.0, "metrics": {"kl": 0.0}},
        {"step": 12, "time": 1.0, "metrics": {"kl": 0.0}},
    ]
    thin = (await served.http.get(f"{url}?points=10&keys=kl")).json()
    assert len(thin["data"]) <= 10 and thin["has_more"] is False
    assert {"step": 42, "time": 1.0, "metrics": {"kl": 50.0}} in thin["data"]
    for query, accept in (("?format=csv", "*/*"), ("", "text/csv")):
        answer = await served.http.get(url + query, headers={"accept": accept})
        assert answer.headers["content-type"].startswith("text/csv")
        rows = list(csv.reader(io.StringIO(answer.text)))
        assert rows[0] == ["step", "time", "kl", "reward/all/mean"] and len(rows) == 101
        assert rows[42] == ["42", "1.0", "50.0", "0.42"]
    for query in ("points=3", "limit=0", "after_step=x", "format=xml"):
        problem(await served.http.get(f"{url}?{query}"), 422, "invalid-request")
