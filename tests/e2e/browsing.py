"""A browser for the dashboard's tests, an API process with a Temporal of its own, and axe-core."""

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright import async_api as playwright
from playwright.async_api import expect

from tests import ROOT

AXE = Path(__file__).parent / "vendor" / "axe-core" / "axe.min.js"
DESKTOP = {"width": 1440, "height": 1000}
PHONE = {"width": 390, "height": 844}
LONE = """async (value) => {
    const { Chart } = await import(new URL("js/chart.js", location.href));
    const panel = { id: "lone", title: "Lone", note: "" };
    const chart = new Chart(panel, { sync: "lone", onZoom() {}, onRemove() {} });
    document.body.prepend(chart.element);
    const series = { label: "a", color: 0, dash: 0, xs: [3], ys: [value] };
    chart.show([series], { axis: "step", smooth: 0, log: false, range: null });
    while (!chart.plot) await new Promise(requestAnimationFrame);
    await new Promise(requestAnimationFrame);
    const { ctx, bbox, scales } = chart.plot;
    const { data } = ctx.getImageData(bbox.left - 4, bbox.top, bbox.width, bbox.height);
    let colored = 0;
    for (let i = 0; i < data.length; i += 4) {
        const [red, green, blue, alpha] = data.slice(i, i + 4);
        colored += alpha > 128 && Math.max(red, green, blue) - Math.min(red, green, blue) > 60;
    }
    chart.destroy();
    return [colored, scales.y.max];
}"""
"""Draws a chart of one value: how many pixels have a color, and where its axis ends."""
FRAMES = """
async () => {
    const times = [];
    let on = true;
    const tick = (t) => { times.push(t); if (on) requestAnimationFrame(tick); };
    requestAnimationFrame(tick);
    await new Promise((done) => { window.stopFrames = done; });
    on = false;
    return times.slice(1).map((t, i) => t - times[i]);
}
"""
"""How long each frame took to be drawn, until `stopFrames` is called, in milliseconds."""
IN_SIGHT = """
() => {
    const waits = (e) => !e.hidden && e.textContent === "Loading…";
    const panels = [...document.querySelectorAll(".panel")];
    const seen = panels.filter((panel) => panel.getBoundingClientRect().top < innerHeight);
    return !seen.some((panel) => waits(panel.querySelector(".no-data")));
}
"""
"""Whether all charts on the screen are drawn: they are once the browser says they are there."""

WITHIN_S = 90.0
"""How long anything may take that must happen: only a machine that stands still takes longer."""

# By themselves actions have 30 s, and what is expected 5 s.
expect.set_options(timeout=1000 * WITHIN_S)


def chromium() -> str:
    """The system's Chromium."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("needs Chromium (Debian: apt-get install chromium)")
    return found


@asynccontextmanager
async def browsing() -> AsyncIterator[Any]:
    """A headless Chromium."""
    async with playwright.async_playwright() as started:
        browser = await started.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield browser
        await browser.close()


@contextmanager
def serving(home: Path, temporal: str, queues: str) -> Iterator[str]:
    """The address of an API process whose state is in `home`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ratchet.api", "--port", "0"],
        cwd=ROOT,
        env={
            **os.environ,
            "RATCHET_HOME": str(home),
            "RATCHET_QUEUE_PREFIX": queues,
            "TEMPORAL_ADDRESS": temporal,
            "TEMPORAL_NAMESPACE": "default",
        },
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found, "the first line names the address"
        yield found.group()
    finally:
        process.kill()
        process.wait(10)


@dataclass
class Reader:
    """A page of the dashboard as somebody reads it; what its console complained of is kept."""

    page: Any
    api: str
    complaints: list[str] = field(default_factory=list)
    asked: set[Any] = field(default_factory=set)
    """Requests of the page that are not answered in full yet, its streams of events left out."""

    async def open(self, where: str, ready: str) -> None:
        """Goes to a page and waits until it says that it shows `ready` (a CSS attribute test)."""
        await self.page.goto("about:blank")
        await self.page.goto(f"{self.api}/dashboard/{where}")
        await self.page.wait_for_selector(f"html[data-ready{ready}]", state="attached")

    async def settled(self) -> None:
        """Waits until a page that is ready shows all that it fetches. It needs `instruments`."""
        await expect(self.page.locator("main h1").first).to_be_visible()
        await expect(self.page.locator("main .loading")).to_have_count(0)
        await self.page.wait_for_function(IN_SIGHT)
        async with asyncio.timeout(WITHIN_S):
            while self.asked:
                await asyncio.sleep(0.02)

    async def serious(self) -> list[str]:
        """What axe-core finds that is serious or worse."""
        await self.page.add_script_tag(path=str(AXE))
        found = await self.page.evaluate("axe.run()")
        return [
            f"{violation['id']}: {node['html'][:160]}"
            for violation in found["violations"]
            if violation["impact"] in ("serious", "critical")
            for node in violation["nodes"]
        ]


@asynccontextmanager
async def reading(
    browser: Any,
    api: str,
    *,
    viewport: dict[str, int] = DESKTOP,
    scheme: str = "light",
    instruments: bool = False,
) -> AsyncIterator[Reader]:
    """A fresh browser context. `instruments` may run code of tests in pages, which the dashboard's
    own policy forbids.
    """
    context = await browser.new_context(
        viewport=viewport,
        color_scheme=scheme,
        bypass_csp=instruments,
        reduced_motion="reduce",
    )
    context.set_default_timeout(1000 * WITHIN_S)
    reader = Reader(await context.new_page(), api)

    def heard(message: Any) -> None:
        if message.type in ("error", "warning"):
            reader.complaints.append(f"{message.type}: {message.text} {message.location}")

    def asks(request: Any) -> None:
        if request.headers.get("accept") != "text/event-stream":
            reader.asked.add(request)

    def answered(request: Any) -> None:
        reader.asked.discard(request)

    reader.page.on("request", asks)
    reader.page.on("requestfinished", answered)
    reader.page.on("requestfailed", answered)
    reader.page.on("console", heard)
    reader.page.on("pageerror", lambda error: reader.complaints.append(f"uncaught: {error}"))
    yield reader
    # A handler that is at work when its page goes would raise in whatever is done next.
    await reader.page.unroute_all(behavior="ignoreErrors")
    await context.close()


async def confirm(page: Any) -> None:
    """Sends the open dialog, which closes once the API has answered."""
    await page.locator("dialog button[type=submit]").click()
    await page.locator("dialog").wait_for(state="detached")


async def act(page: Any, verb: str) -> None:
    """Asks something of the run that is shown."""
    await page.locator(f"button[data-verb={verb}]").click()
    await confirm(page)
