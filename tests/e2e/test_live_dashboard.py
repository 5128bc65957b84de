"""The dashboard in real Chromium on a run of the whole real stack."""

import pytest
from playwright.async_api import expect

from ratchet.worker.stack import Stack
from tests import ROOT
from tests.e2e.browsing import act, browsing, reading

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]


async def test_a_live_run_from_launch_to_fork(stack: Stack) -> None:
    """On the whole real stack: launch, watch it move, read a rollout, eval, pause, resume, fork."""
    where = stack.up()
    async with browsing() as browser, reading(browser, where.api) as reader:
        page = reader.page
        page.set_default_timeout(240_000)

        await reader.open("#/launch", '="launch"')
        text = (ROOT / "configs" / "examples" / "reverse_text.toml").read_text()
        # It goes on until it is stopped, however long a browser takes.
        endless = text.replace("max_steps = 32", "max_steps = 10_000")
        assert endless != text
        await page.get_by_label("Language of the text").select_option("toml")
        await page.get_by_label("Config as text").fill(endless)
        await page.locator(".verdict .fine").wait_for()
        await page.get_by_role("button", name="Launch").click()
        await page.get_by_role("heading", name="reverse-text-").wait_for()
        address = page.url
        await page.wait_for_selector("#link[data-state=live]")
        await page.wait_for_selector("#panel-reward canvas")
        step = page.locator(".facts div").first.locator("dd")
        before = await step.inner_text()
        await expect(step).not_to_have_text(before, use_inner_text=True, timeout=240_000)
        await act(page, "eval")
        await page.get_by_role("link", name="Rollouts").click()
        await page.locator("a.rollout").first.click()
        await page.wait_for_selector("article.card.current .token")
        await page.get_by_role("link", name="Timeline").click()
        await page.wait_for_selector('html[data-ready="timeline"]', state="attached")
        await act(page, "pause")
        await page.locator(".badge.warn", has_text="paused").wait_for()
        await act(page, "resume")
        await page.locator(".badge.good", has_text="running").wait_for()
        await act(page, "fork")
        await page.wait_for_url(lambda url: "/runs/" in url and not url.startswith(address))
        await page.locator(".badge.good", has_text="running").wait_for()
        await act(page, "stop")
        await page.locator(".badge.done", has_text="succeeded").wait_for()
        await page.goto(address)
        await act(page, "stop")
        await page.locator(".badge.done", has_text="succeeded").wait_for()
        assert reader.complaints == []
