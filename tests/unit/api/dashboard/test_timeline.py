"""The timeline in real Chromium: no work is drawn where nobody was there to do it."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest

from ratchet.activities.contracts.health import HEALTH_REPORT
from ratchet.activities.contracts.hosting import HostReport
from ratchet.activities.storage import keys
from ratchet.activities.storage.series import Series
from ratchet.api.app import create_app
from tests.e2e.browsing import Reader, browsing, reading
from tests.unit.api.conftest import Served, connection, eventually, listening

pytestmark = pytest.mark.asyncio(loop_scope="session")

COMPUTED = """
async ([reports, loads, end, spans, samples]) => {
    const { awayOf, faultsOf, without, gapsOf, heldUntil } = await import(
        "/dashboard/js/faults.js"
    );
    const faults = faultsOf(reports, end);
    return {
        faults: faults.map(({ role, from, to }) => [role, from, to]),
        cut: spans.map(([from, to]) => without(from, to, awayOf(faults, loads))),
        held: [[10, false], [60, false], [60, true]].map(
            ([next, busy]) => heldUntil(0, next, busy, 15)
        ),
        gaps: gapsOf(samples.map(([time, n]) => ({ time, n })), 15, ({ n }) => n > 0),
    };
}
"""
COLORS = """
() => [...document.querySelectorAll(".timeline canvas")].length && [
    ...document.querySelectorAll(".legend .chip")
].map((chip) => {
    const mark = chip.querySelector("i");
    const style = getComputedStyle(mark);
    const drawn = { hatched: style.backgroundImage, dot: style.backgroundColor };
    return [chip.textContent, `${mark.className} ${drawn[mark.className] ?? style.borderTopColor}`];
})
"""
"""Each meaning in the legend, with its shape and colour."""


WRITTEN = """
const write = CanvasRenderingContext2D.prototype.fillText;
window.written = [];
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
    window.written.push([text, x, y]);
    return write.call(this, text, x, y);
};
"""
"""Keeps what canvases show as text, and where."""


def host_event(time: float, state: str, role: str = "trainer", lost_at: float | None = None) -> Any:
    return {"time": time, "role": role, "index": 0, "state": state, "lostAt": lost_at}


async def test_a_dead_trainer_is_no_work(served: Served) -> None:
    run = (await served.start("dies"))["id"]
    await served.until(run, step=3)
    now = time.time()
    for step, took in ((1, 4.0), (2, 37.0)):
        metrics = {"time/train": took, "time/wait_for_batch": 1.0, "time/sync_weights": 0.0}
        value = {"step": step, "time": now - 40 * (2 - step), "metrics": metrics}
        served.store.put_json(keys.step_record(run, step), value)
    gauge = {"worker_inflight": 8, "inflight_train": 8, "inflight_eval": 0, "permits": 8}
    series = Series(run, "rollout-a-1-aaaaaa")
    for at in (-60.0, -50.0, 0.0):
        series.add({"time": now + at, **gauge}).write(served.store)
    handle = served.env.client.get_workflow_handle(run)
    seen_at = datetime.fromtimestamp(now - 35, UTC).isoformat()
    await handle.signal("host_report", HostReport("trainer", 0, 1, "up"))
    starting = HostReport("trainer", 0, 2, "starting", seen_at=seen_at)
    await handle.signal("host_report", starting)
    await handle.signal("host_report", HostReport("trainer", 0, 2, "up"))
    async with timeline(served, run) as reader:
        page = reader.page
        await page.get_by_role("cell", name="back after").wait_for()
        # Near the end: within the loss.
        lost = await tip(page, 0.8, "trainer", "No trainer 0 for 3")
        assert "trains for" not in lost, lost
        # Between the second sample and the last nobody reported what was in flight.
        await tip(page, 0.8, "flight", "No rollout worker reported")
        colors = await page.evaluate(COLORS)
        assert len({look for _, look in colors}) == len(colors) > 10, colors
        found = await page.evaluate(
            COMPUTED,
            [
                [
                    host_event(5, "up"),
                    host_event(40, "starting", lost_at=31),
                    host_event(42, "down", "engine"),
                    host_event(45, "up"),
                    host_event(90, "starting", "env", lost_at=88),
                ],
                [["trainer", 45.5, 47]],
                100,
                [[30, 67], [0, 10], [33, 44], [46, 50]],
                [[0, 8], [10, 8], [60, 0], [90, 8], [100, 8]],
            ],
        )
        assert found["faults"] == [["trainer", 31, 45], ["engine", 42, 100], ["env", 88, 100]]
        assert found["cut"][1] == {"parts": [[0, 10]], "lost": 0}
        assert found["cut"][2]["parts"] == [] and found["cut"][2]["lost"] == 11
        assert found["cut"][3] == {"parts": [[47, 50]], "lost": 1}, "it loads"
        assert found["held"] == [10, 0, 15], "between two reports what was in flight stays drawn"
        assert found["gaps"] == [[25, 60]], "after a sample without any there is nothing to tell"
        assert reader.complaints == []


LANES = {"flight": 80, "trainer": 172, "work": 289, "faults": 330}
"""Where each lane of the timeline is, in pixels."""


@asynccontextmanager
async def timeline(served: Served, run: str, told: Any = None) -> AsyncIterator[Reader]:
    """A reader of a run's timeline, with the events that `told` serves, if any. What its
    canvas writes is kept in `window.written`.

    Without the API's chores: one of them warns after a while that a role has no worker, and that
    event would move what the timeline shows.
    """
    app = create_app(served.settings, connection(served.env))
    async with (
        listening(app, chores=False) as http,
        browsing() as browser,
        reading(browser, str(http.base_url).rstrip("/")) as reader,
    ):
        if told:
            await reader.page.route(lambda url: "order=desc" in url, told)
        await reader.page.add_init_script(WRITTEN)
        await reader.open(f"#/runs/{run}/timeline", '="timeline"')
        yield reader


async def tip(page: Any, at: float, lane: str, says: str) -> str:
    """What the tip says at a share of the shown time and in a lane, once it says `says`. The page's
    head may come later than the timeline, and moves it.
    """
    canvas = page.locator(".timeline canvas")

    async def look() -> str:
        box = await canvas.bounding_box()
        await canvas.hover(position={"x": at * box["width"], "y": LANES[lane]}, force=True)
        return str(await page.locator(".timeline .tip").inner_text())

    return await eventually(look, lambda text: says in text)


def stamp(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds")


async def test_the_timeline_agrees_with_the_events_of_a_killed_trainer(served: Served) -> None:
    run = (await served.start("killed"))["id"]
    await served.until(run, step=3)
    now = time.time()
    for step, at, took in ((1, -95, 4.0), (2, -20, 45.0)):
        metrics = {"time/train": took, "time/wait_for_batch": 0.0, "time/sync_weights": 0.0}
        value = {"step": step, "time": now + at, "metrics": metrics}
        served.store.put_json(keys.step_record(run, step), value)
    gauge = {"worker_inflight": 8, "inflight_train": 8, "inflight_eval": 0}
    series = Series(run, "rollout-a-1-aaaaaa")
    for at in range(-100, 10, 10):
        series.add({"time": now + at, "permits": 8, **gauge}).write(served.store)
    server = {"role": "trainer", "index": 0, "lost_at": stamp(now - 60)}
    span = {"started_at": stamp(now - 45), "finished_at": stamp(now - 27)}
    back, loaded = "trainer 0 (epoch 2) is up, back after 15 s", "load trainer at step 1 is done"
    events = [
        ("work.done", -27, loaded, {"work": "load_trainer", **span}),
        ("server.up", -45, back, {**server, "state": "up"}),
    ]

    async def told(route: Any) -> None:
        data = [
            {
                "id": f"{kind}/{at}",
                "type": kind,
                "level": "info",
                "message": message,
                "created_at": stamp(now + at),
                "data": fields,
            }
            for kind, at, message, fields in events
            if (kind == "work.done") == ("types=work.done" in route.request.url)
        ]
        await route.fulfill(json={"data": data, "next_after": None})

    async with timeline(served, run, told) as reader:
        page = reader.page
        # Events of work are read after those of servers. The last 100 s are shown.
        loads = await tip(page, 0.64, "work", loaded)
        assert "No trainer" not in loads, loads
        lost = await tip(page, 0.48, "trainer", "No trainer 0 for 15 s")
        assert "trains for" not in lost, lost
        loads = await tip(page, 0.64, "trainer", loaded)
        assert "No trainer" not in loads and "trains for" not in loads, loads
        assert "No trainer" not in await tip(page, 0.64, "faults", ":")
        trains = await tip(page, 0.77, "trainer", "Step 2: trains for 12 s")
        assert "loading for 33 s" in trains, trains
        assert reader.complaints == []


async def test_all_of_a_run_has_the_loss_before_its_first_report(served: Served) -> None:
    """And a silence after rollouts in flight is no time without them."""
    run = (await served.start("early"))["id"]
    await served.until(run, step=3)
    now = time.time()
    series = Series(run, "rollout-a-1-aaaaaa")
    for at in (-40, 0):
        gauge = {"worker_inflight": 0, "inflight_train": 8, "inflight_eval": 0, "permits": 8}
        series.add({"time": now + at, **gauge}).write(served.store)
    server = {"role": "trainer", "index": 0, "lost_at": stamp(now - 100), "state": "up"}

    async def told(route: Any) -> None:
        event = {"id": "up/1", "type": "server.up", "level": "info", "message": "back after 40 s"}
        event |= {"created_at": stamp(now - 60), "data": server}
        data = [] if "types=work.done" in route.request.url else [event]
        await route.fulfill(json={"data": data, "next_after": None})

    async with timeline(served, run, told) as reader:
        await tip(reader.page, 0.2, "faults", "No trainer 0 for 40 s")
        await tip(reader.page, 0.9, "flight", "No rollout worker reported")
        assert reader.complaints == []


async def test_permits_are_labelled_where_they_change(served: Served) -> None:
    run = (await served.start("permits"))["id"]
    await served.until(run, step=3)
    now = time.time()
    gauge = {"worker_inflight": 8, "inflight_train": 8, "inflight_eval": 0}
    series = Series(run, "rollout-a-1-aaaaaa")
    for at in range(-100, 10, 10):
        permits = 64 if at < -60 else 32
        series.add({"time": now + at, "permits": permits, **gauge}).write(served.store)
    async with timeline(served, run) as reader:
        page = reader.page
        await page.get_by_role("cell", name="status: running").first.wait_for()
        await page.evaluate("window.written = []")
        await page.get_by_role("button", name="All", exact=True).click()
        written = await eventually(lambda: page.evaluate("window.written"), bool)
        box = await page.locator(".timeline canvas").bounding_box()
    labels = [(text, x / box["width"], y) for text, x, y in written if text.startswith("permits")]
    # News may have the page drawn more than once.
    draws = len(labels) // 2
    assert draws and [text for text, _, _ in labels] == ["permits 64", "permits 32"] * draws, labels
    (_, first, above), (_, second, below) = labels[-2:]
    assert first < 0.05 and abs(second - 0.4) < 0.05, "where they change"
    # Within the lane, below its name, each above its line.
    assert 20 < above < below < 140


async def test_each_mark_of_an_event_has_one_meaning(served: Served) -> None:
    run = (await served.start("marked"))["id"]
    await served.until(run, step=3)
    handle = served.env.client.get_workflow_handle(run)
    for report in (
        HostReport("engine", 0, 1, "up"),
        HostReport("engine", 0, 1, "down", detail="killed"),
        HostReport("engine", 0, 2, "up"),
    ):
        await handle.signal("host_report", report)
    await served.http.post(f"/v1/runs/{run}/pause", json={"reason": "lunch"})
    finding = {"rule": "truncation", "message": "cut off", "subject": ""}
    await handle.signal(HEALTH_REPORT, {"step": 3, "finding": finding})
    await served.http.post(f"/v1/runs/{run}/stop")
    await served.until(run, status="succeeded")
    async with timeline(served, run) as reader:
        await reader.page.get_by_role("cell", name="the run succeeded").wait_for()
        rows = await reader.page.locator(".events tr").all()
        told = [await row.locator("td").all_text_contents() for row in rows]
        legend = dict(await reader.page.evaluate(COLORS))
    marks = {what: mark for _, mark, what in reversed(told)}
    assert {*marks.values()} <= legend.keys()
    for what, mark in {
        "engine 0 (epoch 1) is up": "server or status",
        "engine 0 (epoch 1) is down: killed": "fault",
        "engine 0 (epoch 2) is up, back after 0 s": "recovery",
        "pause was requested: lunch": "request",
        "status: paused (lunch)": "server or status",
        "Rollouts are cut off: cut off": "warning",
        "the run succeeded: stopped": "server or status",
    }.items():
        assert marks[what] == mark, told
