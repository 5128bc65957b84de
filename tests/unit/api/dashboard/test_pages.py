"""The dashboard in real Chromium on a few records of its own: what is damaged, what is no longer
kept, and who tells how late his event loop is. The package playwright and Chromium are needed.
"""

import asyncio
import json
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import expect
from starlette.types import ASGIApp, Receive, Scope, Send

from ratchet.activities.contracts.services import ServiceState, services_file
from ratchet.activities.storage import keys
from ratchet.activities.storage.series import Series
from ratchet.api.app import create_app
from tests.e2e.browsing import PHONE, browsing, confirm, reading
from tests.unit.api.client.support import make_steps
from tests.unit.api.conftest import Served, connection, eventually, listening, put_checkpoint
from tests.unit.api.routes.test_control import ended
from tests.unit.api.routes.test_evals import ALONE, ENV, OFTEN, SELDOM, put
from tests.unit.api.routes.test_rollouts import group
from tests.unit.api.store.test_curves import damage, record

UNKNOWN = b"00000000-0000-0000-0000-000000000000.5.0"

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def appears(page: Any, text: str) -> None:
    await page.get_by_text(text).first.wait_for()


async def test_what_is_damaged_is_named_where_it_is_left_out(served: Served) -> None:
    run = (await served.start("damaged"))["id"]
    await served.until(run, step=3)
    for step in (1, 2, 3):
        record(served.store, run, step, **{"reward/all/mean": step / 10, "time/train": 1.0})
        group(served, run, f"train/{step}", "e", [0.0, 1.0])
        value = {"env": "e", "step": step, "reward_mean": 0.5}
        served.store.put_json(keys.eval_record(run, f"{step}-1/e"), value)
    damage(served.store, keys.step_record(run, 2), "content")
    damage(served.store, keys.group(run, "train/2"), "content")
    damage(served.store, keys.eval_record(run, "3-1/e"), "content")
    app = create_app(served.settings, connection(served.env))
    async with (
        listening(app) as http,
        browsing() as browser,
        reading(browser, str(http.base_url).rstrip("/"), instruments=True) as reader,
    ):
        page = reader.page
        await reader.open(f"#/runs/{run}", '="all"')
        await appears(page, "Damaged steps, left out: 2.")
        await appears(page, "Damaged evals, left out: e at step 3 (")
        assert await reader.serious() == []
        await page.goto(f"{reader.api}/dashboard/#/runs/{run}/timeline")
        await page.wait_for_selector('html[data-ready="timeline"]', state="attached")
        await appears(page, "Damaged steps, left out: 2.")
        await reader.open(f"#/runs/{run}/rollouts?r=train:2:0", '="rollouts"')
        await appears(page, "Damaged groups, left out: train/2.")
        await appears(page, "An artifact of the run is damaged")
        await expect(page.locator("a.rollout")).to_have_count(4)
        assert await reader.serious() == []
        await page.goto(f"{reader.api}/dashboard/#/runs?q={run}")
        await page.get_by_label("Filter by name or metadata").fill(run)
        await appears(page, "Damaged steps, left out: 2.")
        # Chromium counts the refusal of the damaged rollout among errors.
        assert [c for c in reader.complaints if "500" not in c] == []


class Forgetting:
    """An API whose streams end once `cut` is set, and which has by then forgotten every event."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.cut = asyncio.Event()
        self.forgot = asyncio.Event()
        self.cursors: list[bytes | None] = []
        """`Last-Event-ID` of each request for a stream."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ()))
        if headers.get(b"accept") != b"text/event-stream":
            await self.app(scope, receive, send)
            return
        self.cursors.append(headers.get(b"last-event-id"))
        if self.cursors[-1] is not None:
            await self.forgot.wait()
            result = {**headers, b"last-event-id": UNKNOWN}
            await self.app({**scope, "headers": [*result.items()]}, receive, send)
        elif self.cut.is_set():
            await self.app(scope, receive, send)
        else:
            streaming = asyncio.create_task(self.app(scope, receive, send))
            await self.cut.wait()
            streaming.cancel()


async def test_a_page_whose_cursor_is_forgotten_loads_again_and_goes_on(served: Served) -> None:
    run = (await served.start("forgotten"))["id"]
    await served.until(run, step=3)
    app = Forgetting(create_app(served.settings, connection(served.env)))
    async with (
        listening(app) as http,
        browsing() as browser,
        reading(browser, str(http.base_url).rstrip("/")) as reader,
    ):
        page = reader.page
        await reader.open(f"#/runs/{run}/events", '="events"')
        await page.wait_for_selector("#link[data-state=live]")
        await appears(page, "step 3 is done")
        app.cut.set()
        await page.wait_for_selector("#link[data-state=reconnecting]")
        await make_steps(served, run, 4)
        await eventually(lambda: asyncio.sleep(0, len(app.cursors)), lambda count: count == 2)
        await expect(page.get_by_text("step 4 is done")).to_have_count(0)
        app.forgot.set()
        # It happened while nothing was heard, and no stream tells it.
        await appears(page, "step 4 is done")
        await page.wait_for_selector("#link[data-state=live]")
        await make_steps(served, run, 5)
        await appears(page, "step 5 is done")
        assert [cursor is None for cursor in app.cursors] == [True, False, True]


async def test_the_end_of_a_run_is_no_lost_connection(served: Served) -> None:
    run = (await served.start("finishes"))["id"]
    await served.until(run, step=3)
    app = create_app(served.settings, connection(served.env))
    async with (
        listening(app) as http,
        browsing() as browser,
        reading(browser, str(http.base_url).rstrip("/"), instruments=True) as reader,
    ):
        page = reader.page
        await reader.open(f"#/runs/{run}/events", '="events"')
        await page.wait_for_selector("#link[data-state=live]")
        await page.evaluate(STATES)
        await served.http.post(f"/v1/runs/{run}/stop")
        await page.wait_for_selector("#link[data-state=ended]", state="attached")
        await page.locator(".badge", has_text="succeeded").wait_for()
        assert "reconnecting" not in await page.evaluate("window.states")


STATES = """
() => {
    const link = document.getElementById("link");
    window.states = [];
    new MutationObserver(() => window.states.push(link.dataset.state))
        .observe(link, { attributes: true });
}
"""
"""Keeps what the header says of the connection from now on."""


async def test_a_crash_loop_is_said_above_the_runs(served: Served) -> None:
    file = services_file(served.settings.home)
    states = [
        ServiceState("api", "up", "2026-01-02T00:00:00Z", 1, 0, "logs/api.log"),
        ServiceState("worker-env", "crash-looping", "2026-01-02T00:00:00Z", 7, 4, "logs/env.log"),
    ]
    file.write_text(json.dumps([asdict(state) for state in states]))
    app = create_app(served.settings, connection(served.env))
    try:
        async with (
            listening(app) as http,
            browsing() as browser,
            reading(browser, str(http.base_url).rstrip("/"), instruments=True) as reader,
        ):
            await reader.open("#/runs", '="runs"')
            alert = reader.page.locator(".services")
            await expect(alert).to_contain_text("worker-env is crash-looping: it ended 4 times")
            await expect(alert.locator("p")).to_have_count(1)
            assert await reader.serious() == []
    finally:
        file.unlink()


async def test_lag_and_usage_are_charted_by_role(
    served: Served,
) -> None:
    run = (await served.start("lagging"))["id"]
    await served.until(run, step=3)
    for step in (1, 2, 3):
        record(served.store, run, step, **{"reward/all/mean": step / 10, "time/train": 1.0})
    began = time.time() - 60
    own: dict[str, Any] = {
        "worker_inflight": 3,
        "permits": 64,
        "sampled_tokens": 9,
        "tokens_per_s": 2.0,
    }
    for source, p99, said in (
        ("rollout-a-1-aaaaaa", 0.007, own),
        ("env-a-2-bbbbbb", 0.01, {}),
        ("env-b-3-cccccc", 0.03, {}),
        ("orchestrator-a-4-dddddd", 0.002, {}),
    ):
        series = Series(run, source)
        for i in range(3):
            lag = {"mean": p99 / 8, "max": p99 * 3, "p99": p99}
            used = {"cpu_cores": 0.5, "memory_bytes": 1 << 30}
            if source.startswith("env"):
                used["gpus"] = [{"index": 0, "utilization": 0.25, "memory_bytes": 3 << 30}]
            sample = {"time": began + 10 * i, "event_loop_lag": lag, "usage": used, **said}
            series.add(sample).write(served.store)
    app = create_app(served.settings, connection(served.env))
    async with (
        listening(app) as http,
        browsing() as browser,
        reading(browser, str(http.base_url).rstrip("/")) as reader,
    ):
        await reader.open(f"#/runs/{run}", '="all"')
        found: dict[str, dict[str, float]] = {}
        for name in ("lag", "inflight", "cpu", "ram", "gpu", "gpu-memory"):
            panel = reader.page.locator(f"#panel-{name}")
            await panel.scroll_into_view_if_needed()
            chips = panel.locator(".legend .chip")
            await chips.first.wait_for()
            said = [text.split() for text in await chips.all_inner_texts()]
            found[name] = {words[0]: float(words[-1]) for words in said}
        assert found["lag"] == {"rollout": 0.007, "env": 0.03, "orchestrator": 0.002}
        assert found["cpu"] == {"rollout": 0.5, "env": 1, "orchestrator": 0.5}, "both env workers"
        assert found["ram"] == {"rollout": 1, "env": 2, "orchestrator": 1}
        assert found["gpu"] == {"env": 0.25} and found["gpu-memory"] == {"env": 3}
        assert found["inflight"]["permits"] == 64, "a lag sample is no rollout worker's"
        assert reader.complaints == []


async def test_panels_are_found_added_and_taken_away(served: Served) -> None:
    """By name and by pattern, of one run and of several as one; the run's health heads them."""
    runs = [(await served.start("found", metadata={"arm": "ab"[i > 1]}))["id"] for i in range(3)]
    for place, run in enumerate(runs):
        await served.until(run, step=3)
        for step in (1, 2, 3):
            said = {"reward/all/mean": step / 10 + place, "metrics/reverse-text/exact": 0.5}
            record(served.store, run, step, **said, **{"odd/thing": 7.0, "errors/all/rate": 0.02})
        value = {
            "env": "e",
            "step": 3,
            "reward_mean": 0.5,
            "errored": 2,
            "error": "no",
            "metrics": {},
        }
        served.store.put_json(
            keys.eval_record(run, "3-1/e"), {**value, "metrics": {"avg@4": 0.375}}
        )
    app = create_app(served.settings, connection(served.env))
    async with (
        listening(app) as http,
        browsing() as browser,
        reading(browser, str(http.base_url).rstrip("/"), instruments=True) as reader,
    ):
        page = reader.page
        await reader.open(f"#/runs/{runs[0]}", '="all"')
        await expect(page.locator(".health")).to_contain_text("no worker polls for rollout")
        await page.locator(".health summary").click()
        async with page.expect_popup() as opened:
            await page.locator(".health").get_by_role("link", name="Read more").first.click()
        advice = await opened.value
        assert advice.url.endswith("/dashboard/help/reading-a-run.html#no-worker")
        await expect(advice.locator("#no-worker")).to_be_in_viewport()
        await advice.close()
        await expect(page.locator("#panel-own .legend")).to_contain_text("exact")
        finder = page.get_by_label("Find or add a panel")
        await finder.fill("^odd/|reward")
        await expect(page.locator("figure.panel:visible")).to_have_count(3)
        await finder.fill("odd/thnig")
        await appears(page, "No panel and no metric of this run matches odd/thnig.")
        await finder.fill("odd/thing")
        await finder.press("Enter")
        added = page.locator("figure", has=page.get_by_label("Remove panel odd/thing"))
        await expect(added).to_be_in_viewport()
        await page.get_by_role("heading", name="Evals").click()
        await appears(page, "avg@4 0.375")
        async with page.expect_download() as taken:
            await page.get_by_role("button", name="Download").click()
        lines = (await (await taken.value).path()).read_text().splitlines()
        assert lines[0].startswith("run,step,time,") and "odd/thing" in lines[0]
        assert len(lines) == 4 and lines[3].startswith(f"{runs[0]},3,")
        assert await reader.serious() == []
        await reader.open(f"#/compare?runs={','.join(runs)}", '="all"')
        await page.get_by_label("Group").select_option("by arm")
        legend = page.locator("#panel-reward .legend")
        await expect(legend).to_contain_text("arm: a (2)")
        await expect(legend).to_contain_text("arm: b (1)")
        curves = "[[[1, 2, 3], [0, 1, 2]], [[1, 3], [2, 6]], [[2], [null]]]"
        pooled = f"import('/dashboard/js/extracts.js').then((m) => m.pooled({curves}))"
        mean = await page.evaluate(pooled)
        assert (mean["xs"], mean["ys"]) == ([1, 2, 3], [1, 2.5, 4])
        assert [high - low for low, high in zip(mean["low"], mean["high"], strict=True)] == [
            pytest.approx(2 * spread) for spread in (2**0.5, 1.5 * 2**0.5, 8**0.5)
        ]
        spans = "[59.6, 299.7, 3599.6].map(m.duration)"
        written = f"import('/dashboard/js/format.js').then((m) => {spans})"
        assert await page.evaluate(written) == ["1 min 0 s", "5 min 0 s", "1 h 0 min"]
        assert reader.complaints == []


async def test_the_launch_form_names_every_type_that_there_is(served: Served) -> None:
    async with (
        listening(create_app(served.settings, connection(served.env))) as http,
        browsing() as browser,
        reading(browser, str(http.base_url).rstrip("/")) as reader,
    ):
        await reader.open("#/launch", '="launch"')
        field = reader.page.locator("label", has_text="algo.type").locator("select")
        types = (await field.locator("option").all_text_contents())[1:]
        assert {"grpo", "sft", "opd"} <= {*types}
        await expect(field).to_have_accessible_description(f"One of {', '.join(types)}.")


async def test_two_evaluations_are_compared_by_example(served: Served) -> None:
    other, this = [(await served.start("judged", **ALONE))["id"] for _ in range(2)]
    for run, rewards in ((other, SELDOM), (this, OFTEN)):
        await served.until(run, status="running")
        put(served.store, run, rewards)
    app = create_app(served.settings, connection(served.env))
    async with (
        listening(app) as http,
        browsing() as browser,
        reading(browser, str(http.base_url).rstrip("/"), instruments=True) as reader,
    ):
        page = reader.page
        await reader.open(f"#/compare?runs={other},{this}", '="all"')
        row = page.get_by_role("region", name="Evals on the same examples").locator("tbody tr")
        for text in (ENV, this, "avg@2", "0.700 [", "0.350 [", "better", "7 / 0 / 3"):
            await expect(row).to_contain_text(text)
        await page.get_by_text(f"{ENV}: examples of {this} and {other} that differ").click()
        link = page.get_by_role("region", name=f"Examples that differ in {ENV}").locator("a").first
        where = f"#/runs/{this}/rollouts?kind=eval&r=eval%3A0-0%3A{ENV}%3A0%3A0"
        await expect(link).to_have_attribute("href", where)
        assert await reader.serious() == []
        await reader.open(f"#/runs/{this}", '="all"')
        await expect(page.locator(".facts")).to_contain_text("Evaluates")
        steps = re.compile(r"^\s*0\s*$", re.MULTILINE)
        await expect(page.locator(".run-head")).not_to_contain_text(steps, use_inner_text=True)
        await appears(page, "avg@2 0.700 [")
        await reader.open("#/runs", '="runs"')
        listed = page.locator("tr", has=page.get_by_role("link", name=this))
        await expect(listed.locator("td").nth(3)).to_have_text("eval")
        assert reader.complaints == []


async def test_the_head_of_a_run_has_the_warnings_of_its_last_steps(served: Served) -> None:
    """Each with its step; then they are events, which the head leads to."""
    run = (await served.start("warns"))["id"]
    await served.until(run, status="paused")
    app = create_app(served.settings, connection(served.env))
    async with (
        listening(app) as http,
        browsing() as browser,
        reading(browser, str(http.base_url).rstrip("/"), instruments=True) as reader,
    ):
        page = reader.page
        await reader.open(f"#/runs/{run}/config", '="config"')
        await appears(page, "paused: a look")
        warnings = page.get_by_label("Warnings").locator("li")
        await expect(warnings).to_have_text(
            [re.compile(rf"batch {n}: only 4 of 64 rollouts can train step 0, ") for n in (5, 4, 3)]
        )
        assert await reader.serious() == []
        await make_steps(served, run, 10)
        await expect(warnings).to_have_count(0)
        await page.get_by_role("link", name="Earlier warnings").click()
        await expect(page.get_by_label("Level")).to_have_value("warning")
        # Each of them, those of before too, is an event.
        await appears(page, "batch 1: only 4 of 64")
        await expect(page.get_by_text("run.created")).to_have_count(0)
        assert reader.complaints == []


async def test_why_a_run_paused_itself_is_said_once_with_what_to_do(served: Served) -> None:
    run = (await served.start("rests"))["id"]
    await served.until(run, status="paused")
    app = create_app(served.settings, connection(served.env))
    async with (
        listening(app) as http,
        browsing() as browser,
        reading(browser, str(http.base_url).rstrip("/"), instruments=True) as reader,
    ):
        page = reader.page
        await reader.open(f"#/runs/{run}", '="all"')
        health = page.get_by_label("Health")
        await expect(health).to_contain_text("Fix what it names, then resume the run")
        await expect(health.locator("li code").first).to_have_text(f"ratchet runs resume {run}")
        await expect(health).to_contain_text("the disk is full at step 0")
        await expect(page.get_by_text("the disk is full")).to_have_count(1)
        more = health.get_by_role("link", name="Read more").first
        await expect(more).to_have_attribute("href", "help/reading-a-run.html#paused")
        assert await reader.serious() == []
        await health.get_by_role("button", name="Resume").click()
        await confirm(page)
        await page.locator(".badge", has_text="running").wait_for()
        # Without an answer of the health it says at least what the run itself does.
        await page.route("**/health", lambda route: route.abort())
        rests = (await served.start("rests"))["id"]
        await served.until(rests, status="paused")
        await reader.open(f"#/runs/{rests}", '="all"')
        await expect(health).to_contain_text("the disk is full")


async def test_a_run_that_failed_goes_on_only_from_a_checkpoint(
    served: Served, tmp_path: Path
) -> None:
    runs = [(await served.start("fails"))["id"] for _ in range(2)]
    for run in runs:
        await served.until(run, status="failed")
    early, later = runs
    # The run itself has not reported it, as one that was terminated.
    put_checkpoint(served.store, later, 2, tmp_path)
    app = create_app(served.settings, connection(served.env))
    async with (
        listening(app) as http,
        browsing() as browser,
        reading(browser, str(http.base_url).rstrip("/"), instruments=True) as reader,
    ):
        page = reader.page
        health, tools = page.get_by_label("Health"), page.locator(".run-head .tools")
        await reader.open(f"#/runs/{early}", '="all"')
        await expect(health).to_contain_text("create a new run")
        await expect(health.get_by_role("button", name="Resume")).to_have_count(0)
        copy = health.get_by_role("link", name="Launch a copy")
        await expect(copy).to_have_attribute("href", f"#/launch?from={early}")
        await expect(tools.locator("[data-verb=note]")).to_be_visible()
        for verb in ("resume", "fork"):
            await expect(tools.locator(f"[data-verb={verb}]")).to_have_count(0)
        assert await reader.serious() == []
        await reader.open(f"#/runs/{later}", '="all"')
        await expect(health.locator("li code")).to_have_text(f"ratchet runs resume {later}")
        await expect(health.get_by_role("button", name="Resume")).to_be_visible()
        for verb in ("resume", "fork"):
            await expect(tools.locator(f"[data-verb={verb}]")).to_be_visible()


async def test_the_launch_page_says_how_long_workers_check(served: Served) -> None:
    run = (await served.start("copied"))["id"]
    async with (
        listening(create_app(served.settings, connection(served.env))) as http,
        browsing() as browser,
        reading(browser, str(http.base_url).rstrip("/")) as reader,
    ):
        # No answer of the workers replaces what is said meanwhile.
        await reader.page.route(re.compile("preflight=true"), lambda route: None)
        await reader.open(f"#/launch?from={run}", '="launch"')
        await appears(reader.page, "10 to 20 seconds, up to a minute on a busy machine")


async def test_a_note_is_written_on_the_page_of_a_run_that_has_ended(served: Served) -> None:
    run = await ended(served)
    app = create_app(served.settings, connection(served.env))
    async with (
        listening(app) as http,
        browsing() as browser,
        reading(browser, str(http.base_url).rstrip("/"), instruments=True) as reader,
    ):
        await reader.open(f"#/runs/{run}/events", '="events"')
        shown, field = reader.page.get_by_role("note"), reader.page.get_by_role("textbox")
        await expect(shown).to_have_count(0)
        for before, text in (("", "<b>jumped</b>\nat 40"), ("<b>jumped</b>\nat 40", "")):
            await reader.page.get_by_role("button", name="Note").click()
            await expect(field).to_have_value(before)
            await field.fill(text)
            assert await reader.serious() == []
            await reader.page.get_by_role("button", name="Save the note").click()
            await expect(shown).to_have_text([text] if text else [], use_inner_text=True)
            answer = await served.http.get(f"/v1/runs/{run}")
            assert answer.json()["note"] == text
        assert reader.complaints == []


async def test_a_run_on_a_phone_says_which_worker_is_missing(served: Served) -> None:
    """With the header on one row, and shares drawn from 0 to 1, however small they are."""
    run = (await served.start("lone"))["id"]
    await served.until(run, step=3)
    Series(run, "trainer-a-1-aaaaaa").add({"time": time.time() - 34}).write(served.store)
    for step in (1, 2, 3):
        record(served.store, run, step, **{"is_truncated/all/mean": 0.02, "reward/all/mean": 0.1})
    app = create_app(served.settings, connection(served.env))
    async with (
        listening(app) as http,
        browsing() as browser,
        reading(
            browser, str(http.base_url).rstrip("/"), viewport=PHONE, instruments=True
        ) as reader,
    ):
        await reader.open(f"#/runs/{run}", '="all"')
        await expect(reader.page.locator(".run-head")).to_contain_text(MISSING)
        rows = await reader.page.evaluate(ROWS)
        assert len(rows) >= 5 and max(top for top, _ in rows) < min(end for _, end in rows), rows
        panel = reader.page.locator("#panel-truncation")
        await panel.scroll_into_view_if_needed()
        await panel.locator(".legend .chip").first.wait_for()
        scales = await reader.page.evaluate(SCALES)
        assert scales["panel-truncation"] == [0, 1]
        assert scales["panel-reward"] != [0, 1], "a reward is no share"


@pytest.mark.parametrize("where", ["#/runs", "events", "timeline"])
async def test_nothing_is_cut_on_a_phone(served: Served, where: str) -> None:
    run = (await served.start("narrow", metadata={"purpose": "what a phone shows of a run"}))["id"]
    await served.until(run, step=3)
    ready = where.removeprefix("#/")
    async with (
        listening(create_app(served.settings, connection(served.env))) as http,
        browsing() as browser,
        reading(
            browser, str(http.base_url).rstrip("/"), viewport=PHONE, instruments=True
        ) as reader,
    ):
        place = where if where == "#/runs" else f"#/runs/{run}/{where}"
        await reader.open(place, f'="{ready}"')
        await reader.settled()
        await reader.page.locator("tbody tr").first.wait_for()
        assert await reader.page.evaluate(CUT) == []
        if where == "#/runs":
            row = reader.page.get_by_role("row").filter(has_text=run)
            await expect(row.get_by_text("ago")).to_be_visible()
            assert await reader.serious() == []


CUT = """[...document.querySelectorAll(".tabs, .tools, .scroll, .scroll .sub")]
    .filter((it) => it.scrollWidth > it.clientWidth).map((it) => it.outerHTML.slice(0, 80))"""
"""All that is wider than its place."""
MISSING = re.compile(r"no trainer worker for (3[4-9]|[45]\d) s")
ROWS = """[...document.querySelectorAll(".bar > .brand, .bar nav a, .bar-end > *")]
    .map((it) => it.getBoundingClientRect()).filter((it) => it.width)
    .map((it) => [it.top, it.bottom])"""
"""Top and bottom of all that the header shows."""
SCALES = """Object.fromEntries([0, 1, 2, 3].flatMap((k) => uPlot.sync(`sync-${k}`).plots)
    .map((it) => [it.root.closest("figure").id, [it.scales.y.min, it.scales.y.max]]))"""
"""By panel."""


async def test_a_run_that_does_not_exist_is_not_said_to_be_away(served: Served) -> None:
    app = create_app(served.settings, connection(served.env))
    async with (
        listening(app) as http,
        browsing() as browser,
        reading(browser, str(http.base_url).rstrip("/")) as reader,
    ):
        await reader.page.goto(f"{reader.api}/dashboard/#/runs/nope")
        await appears(reader.page, "There is no run")
        await expect(reader.page.locator("#link")).to_have_attribute("data-state", "ended")


async def test_rollouts_that_failed_have_no_reward(served: Served) -> None:
    run = (await served.start("failing"))["id"]
    await served.until(run, step=3)
    group(served, run, "train/1", "e", [None, None])
    app = create_app(served.settings, connection(served.env))
    async with (
        listening(app) as http,
        browsing() as browser,
        reading(browser, str(http.base_url).rstrip("/")) as reader,
    ):
        await reader.page.goto(f"{reader.api}/dashboard/#/runs/{run}/rollouts")
        await expect(reader.page.locator(".members header .sub").first).to_have_text("failed")
        await expect(reader.page.locator(".histogram button")).to_have_count(0)
