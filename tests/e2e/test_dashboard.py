"""The dashboard in real Chromium: on recorded runs, one of them long.

The recorded runs are served by an API process; Temporal knows each as an execution that nobody
works on. Needs Chromium and playwright; RATCHET_SCREENSHOTS is a folder for pictures of all pages.
"""

import json
import re
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import expect

from ratchet.activities.storage.store import ArtifactStore
from ratchet.api.schemas.keys import digest
from tests.e2e import recorded
from tests.e2e.browsing import DESKTOP, FRAMES, LONE, PHONE, act, confirm, reading, serving
from tests.e2e.site import FEWER, MOST, PAGES, Site, recorded_site

pytestmark = [
    pytest.mark.e2e,
    # The first of them records a long run, which takes minutes beside other work.
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]

OPENS_S = 2.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with recorded.folder(tmp_path_factory.mktemp("dashboard")) as home:
        yield home


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(home: Path, request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    timed = any(item.get_closest_marker("alone") for item in request.session.items)
    async with recorded_site(home, long=MOST if timed else FEWER) as site:
        yield site


@pytest.mark.alone
@pytest.mark.nightly
async def test_a_run_of_10_000_steps_opens_in_two_seconds(site: Site) -> None:
    """The best of five, since whatever else the machine does only ever adds to it."""
    took = []
    async with reading(site.browser, site.api) as reader:
        for _ in range(5):
            await reader.page.goto("about:blank")
            began = time.monotonic()
            await reader.page.goto(f"{site.api}/dashboard/#/runs/long")
            await reader.page.wait_for_selector("#panel-reward canvas")
            took.append(time.monotonic() - began)
        await expect(reader.page.locator("#panel-reward .legend")).not_to_be_empty()
        assert reader.complaints == []
    assert min(took) < OPENS_S, took


@pytest.mark.alone
@pytest.mark.nightly
async def test_a_run_of_10_000_steps_stays_smooth(site: Site) -> None:
    async with reading(site.browser, site.api, instruments=True) as reader:
        await reader.open("#/runs/long", '="all"')
        page = reader.page
        await page.evaluate(f"window.frames_ = ({FRAMES})(); 0")
        box = await page.locator("#panel-reward .u-over").bounding_box()
        for i in range(60):
            await page.mouse.move(box["x"] + 10 + i * (box["width"] - 20) / 60, box["y"] + 40)
        for _ in range(10):
            await page.mouse.wheel(0, 120)
            await page.wait_for_timeout(30)
        await page.evaluate("window.stopFrames(); 0")
        gaps = await page.evaluate("window.frames_")
    gaps.sort()
    assert len(gaps) > 30
    assert statistics.median(gaps) < 40, "25 frames a second on a software renderer"
    assert gaps[int(0.95 * len(gaps))] < 150, gaps[-10:]


async def test_zooming_fetches_the_steps_in_full(site: Site) -> None:
    async with reading(site.browser, site.api) as reader:
        await reader.open("#/runs/long", '="all"')
        # The panels move down once the head of the page is there.
        await reader.page.locator(".facts").wait_for()
        plot = reader.page.locator("#panel-reward .u-over")
        width = (await plot.bounding_box())["width"]
        await plot.hover(position={"x": 0.60 * width, "y": 60})
        await reader.page.mouse.down()
        await plot.hover(position={"x": 0.64 * width, "y": 60})
        async with reader.page.expect_response(lambda r: "until_step" in r.url) as answered:
            await reader.page.mouse.up()
        rows = (await (await answered.value).json())["data"]
        steps = [row["step"] for row in rows]
        assert 0.59 * site.long < steps[0] < steps[-1] < 0.65 * site.long
        assert int(site.long * 0.6183) in steps, "the step that fell out"
        async with reader.page.expect_response(lambda r: "points=" in r.url) as answered:
            await reader.page.get_by_role("button", name="Reset zoom").click()
        assert "until_step" not in (await answered.value).url
        await expect(reader.page.get_by_role("button", name="Reset zoom")).to_be_hidden()
        assert reader.complaints == []


async def test_buttons_of_a_dialog_say_what_they_do(site: Site) -> None:
    """No two are named alike, and to cancel a run is not to close the dialog."""
    said: dict[str, list[str]] = {}
    async with reading(site.browser, site.api) as reader:
        page = reader.page
        await reader.open("#/runs/short", '="all"')
        for verb in ("pause", "eval", "checkpoint", "fork", "config", "stop", "cancel"):
            await page.locator(f"button[data-verb={verb}]").click()
            await page.locator("dialog[open]").wait_for()
            said[verb] = await page.locator("dialog[open] .buttons button").all_inner_texts()
            await page.locator("dialog[open] .buttons button").first.click()
            await page.locator("dialog").wait_for(state="detached")
    assert all(len(set(names)) == 2 for names in said.values()), f"{said}"
    assert said["cancel"] == ["Keep running", "Cancel the run"]
    assert said["stop"] == ["Keep running", "Stop the run"]


async def test_a_button_is_not_lost_while_it_is_pressed(site: Site) -> None:
    """The facts of the run are drawn again between press and release."""
    async with reading(site.browser, site.api) as reader:
        page = reader.page
        await reader.open("#/runs/short", '="all"')
        await page.locator("button[data-verb=pause]").hover()
        waits = page.locator(".waiting")
        before = await waits.text_content()
        await page.mouse.down()
        await expect(waits).not_to_have_text(before)
        await page.mouse.up()
        await page.get_by_role("dialog", name="Pause short").wait_for()


async def test_a_link_of_the_list_is_not_lost_while_it_is_pressed(site: Site) -> None:
    """Between press and release the run makes a step, and another run comes to the list."""
    steps = 0

    async def listed(route: Any) -> None:
        nonlocal steps
        steps += 1
        answer = await route.fetch()
        body = await answer.json()
        run = next(run for run in body["data"] if run["id"] == "short")
        others = [{**run, "id": f"more-{i}", "step": i} for i in range(steps)]
        body["data"] = [{**run, "step": steps}, *others]
        await route.fulfill(response=answer, json=body)

    async with reading(site.browser, site.api) as reader:
        page = reader.page
        await page.route(re.compile(r"/v1/runs\?"), listed)
        await reader.open("#/runs", '="runs"')
        link = page.get_by_role("link", name="short", exact=True)
        row = page.get_by_role("row").filter(has=link)
        await link.hover()
        before = await row.text_content()
        rows = await page.get_by_role("row").count()
        await page.mouse.down()
        await expect(row).not_to_have_text(before)
        await expect(page.get_by_role("row")).not_to_have_count(rows)
        await expect(link).to_be_focused()
        await page.mouse.up()
        await page.get_by_role("heading", name="short").wait_for()


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.nightly)])
async def test_dialogs_are_accessible(site: Site, scheme: str, viewport: dict[str, int]) -> None:
    """Every dialog of a run's page, with all that it fetches, is as readable as the page."""
    async with reading(
        site.browser, site.api, viewport=viewport, scheme=scheme, instruments=True
    ) as reader:
        page = reader.page
        await reader.open("#/runs/short", '="all"')
        for verb in ("pause", "eval", "checkpoint", "fork", "config", "stop", "cancel", "compare"):
            await page.locator(f"button[data-verb={verb}]").click()
            await page.locator("dialog[open]").wait_for()
            assert await reader.serious() == [], verb
            wide = await page.evaluate("document.documentElement.scrollWidth")
            assert wide <= viewport["width"], verb
            await page.keyboard.press("Escape")
            await page.locator("dialog").wait_for(state="detached")
        await page.keyboard.press("?")
        await page.get_by_role("dialog", name="Keyboard shortcuts").wait_for()
        assert await reader.serious() == []


LOOKS = {"light": (DESKTOP, "light"), "dark": (DESKTOP, "dark"), "phone": (PHONE, "light")}


@pytest.mark.parametrize(
    "look", ["light", "phone", pytest.param("dark", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("name", list(PAGES))
async def test_pages_fit_are_accessible_and_quiet(site: Site, name: str, look: str) -> None:
    """No page is wider than the screen. Pictures are left for whoever looks at them."""
    (viewport, scheme), (where, ready) = LOOKS[look], PAGES[name]
    async with reading(
        site.browser, site.api, viewport=viewport, scheme=scheme, instruments=True
    ) as reader:
        await reader.open(where, ready)
        await reader.settled()
        await reader.page.screenshot(path=site.screenshots / f"{name}-{look}.png")
        wide = await reader.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= viewport["width"]
        assert await reader.serious() == []
        assert reader.complaints == []


async def test_the_model_that_is_chosen_is_the_one_to_export(site: Site) -> None:
    async with reading(site.browser, site.api) as reader:
        await reader.open("#/runs/short/model", '="model"')
        place = reader.page.locator(".model")
        await expect(place).to_contain_text("ratchet runs export short --step 60 --to short-60")
        await reader.page.get_by_label("Version").select_option("Step 59")
        await expect(place).to_contain_text("ratchet runs export short --step 59 --to short-59")
        await expect(place).to_contain_text('name = "run:short@59"')
        await reader.page.get_by_text("Model card").click()
        await expect(place).to_contain_text("# short, step 59")
        assert reader.complaints == []


async def test_reading_a_rollout(site: Site) -> None:
    async with reading(site.browser, site.api) as reader:
        page = reader.page
        await reader.open("#/runs/short/rollouts", '="rollouts"')
        # The first of the list is open at once.
        await page.locator("article.card.current").wait_for()
        await expect(page.locator("a.rollout .preview").first).to_contain_text("reverse ")
        await reader.open("#/runs/short/rollouts?group=train/5", '="rollouts"')
        await expect(page.locator("a.rollout")).to_have_count(8)
        await page.locator("a.rollout").nth(2).click()
        await page.wait_for_selector("article.card.current")
        assert "r=train%3A5%3A2" in page.url, "the address leads here again"
        await expect(page.locator("article.card")).to_have_count(8)
        # Two turns.
        await expect(page.locator("article.card.current .token.begins")).to_have_count(2)
        await page.get_by_label("Colour").select_option("version")
        await page.get_by_role("button", name="Turns").click()
        said = page.locator("article.card.current .message")
        await expect(said).to_have_count(4)
        # A card that was just made has no text to be read on the screen before the next frame.
        await expect(said.nth(2)).to_contain_text("Not yet, try again.", use_inner_text=True)
        await page.get_by_role("button", name="Whitespace").click()
        await expect(said.nth(2)).to_contain_text("Not·yet,·try·again.")
        bar = page.locator(".histogram button:not([disabled])").first
        await bar.click()
        await page.wait_for_selector(".histogram button[aria-pressed=true]")
        rows = page.locator("a.rollout")
        await expect(rows).not_to_have_count(8)
        await expect(rows).not_to_have_count(0)
        listed = await rows.all_text_contents()
        chosen = page.locator("a.rollout[aria-current]")
        before = await chosen.all_text_contents()
        await page.keyboard.press("j")
        # Of one that the bar left out, the next is the first of the list.
        following = listed.index(before[0]) + 1 if before else 0
        await expect(chosen).to_have_text(listed[min(following, len(listed) - 1)])
        assert reader.complaints == []


async def test_every_member_of_a_large_group_can_be_read(site: Site) -> None:
    """Around the chosen member a window is shown; of what was read nothing is fetched again."""
    asked: list[str] = []

    def item(rollout: dict[str, Any], index: int) -> dict[str, Any]:
        return {**rollout, "id": f"train:5:{index}", "index": index, "members": []}

    async def grown(route: Any) -> None:
        place = route.request.url.rpartition("%3A")[2]
        asked.append(place)
        answer = await route.fetch(url=f"{site.api}/v1/runs/short/rollouts/train:5:0")
        one = await answer.json()
        members = [item({**one, "messages": [], "samples": []}, i) for i in range(40)]
        await route.fulfill(json={**item(one, int(place)), "members": members})

    async with reading(site.browser, site.api) as reader:
        page = reader.page
        await page.route("**/rollouts/train*", grown)
        await reader.open("#/runs/short/rollouts?group=train/5&r=train:5:20", '="rollouts"')
        await page.locator("article.card.current", has_text="Rollout 20").wait_for()
        await expect(page.locator("article.card")).to_have_count(16)
        await page.get_by_text("Members 13 to 28 of 40").wait_for()
        await page.get_by_role("link", name="Rollout 27").click()
        await page.locator("article.card.current", has_text="Rollout 27").wait_for()
        await page.get_by_role("link", name="After").click()
        await page.get_by_text("Members 21 to 36 of 40").wait_for()
        await page.locator("article.card.current", has_text="Rollout 28").wait_for()
        await page.goto(f"{site.api}/dashboard/#/runs/short/rollouts?group=train/5&r=train:5:39")
        await page.get_by_text("Members 25 to 40 of 40").wait_for()
        assert sorted(asked, key=int) == [str(i) for i in range(12, 40)], "each of them once"


async def test_rewards_and_errors_are_asked_of_the_api(site: Site) -> None:
    """The bars stay as they are, and the list has all that a bar stands for."""
    async with reading(site.browser, site.api) as reader:
        page = reader.page
        await reader.open("#/runs/short/rollouts?env=reverse-text", '="rollouts"')
        bars = page.locator(".histogram button:not([disabled])")
        before = await bars.count()
        result = int((await bars.first.get_attribute("title") or "").split()[0])
        async with page.expect_response(lambda r: "reward_min=" in r.url) as answered:
            await bars.first.click()
        rows = (await (await answered.value).json())["data"]
        await page.wait_for_selector(".histogram button[aria-pressed=true]")
        assert len(rows) == result
        await expect(page.locator("a.rollout")).to_have_count(result)
        await expect(bars).to_have_count(before)
        await page.locator(".histogram button[aria-pressed=true]").click()
        await page.wait_for_selector(".histogram button[aria-pressed=true]", state="detached")
        async with page.expect_response(lambda r: "errored=true" in r.url):
            await page.get_by_label("Errors").select_option("failed")
        await page.get_by_role("heading", name="No rollouts").wait_for()
        assert reader.complaints == []


async def test_the_config_shows_what_was_changed(site: Site) -> None:
    async def changed(route: Any) -> None:
        result = await (await route.fetch(url=f"{site.api}/v1/runs/short/config")).json()
        if "revision=0" not in route.request.url:
            result["changes"] = {"train": {"env": {recorded.ENVS[1]: {"ratio": 3}}}}
            result["config"]["train"]["env"][1]["ratio"] = 3
        await route.fulfill(json=result)

    async with reading(site.browser, site.api) as reader:
        await reader.page.route("**/short/config*", changed)
        await reader.open("#/runs/short/config", '="config"')
        await expect(reader.page.get_by_label("Only what differs")).to_be_checked()
        row = reader.page.locator("tr", has_text="changed while it ran")
        said = " ".join((await row.inner_text()).split())
        assert said.startswith(f"train.env.{recorded.ENVS[1]}.ratio")
        assert said.removesuffix("changed while it ran").split()[-2:] == ["1", "3"]


async def test_changes_and_forks_offer_what_can_be(site: Site) -> None:
    """Keys name envs as the API does and come with the values that the run has."""
    sent: list[tuple[str, Any]] = []

    async def heard(route: Any) -> Any:
        if route.request.method == "GET":
            return await route.fallback()
        sent.append((route.request.method, route.request.post_data_json))
        await route.fulfill(json={"id": "short"})

    kept = [{"step": 10, "sound": True}, {"step": 20, "sound": False, "problem": "no manifest"}]
    async with reading(site.browser, site.api) as reader:
        page = reader.page
        await page.route("**/v1/runs/short", heard)
        await page.route("**/short/fork", heard)
        await page.route("**/short/checkpoints", lambda route: route.fulfill(json={"data": kept}))
        await reader.open("#/runs/short", '="all"')
        await page.locator("button[data-verb=config]").click()
        await page.locator("dialog[open]").wait_for()
        offered = await page.locator("dialog option").evaluate_all("all => all.map(o => o.value)")
        named = {f"train.env.{env}.ratio" for env in recorded.ENVS}
        assert named | {"max_steps", f"eval.env.{recorded.ENVS[0]}.interval"} <= set(offered)
        assert not {"model.name", "train.env.0.ratio", "train.batch_size"} & set(offered)
        await page.get_by_label("Config key").fill(f"train.env.{recorded.ENVS[1]}.ratio")
        await expect(page.get_by_label("Value")).to_have_value("1")
        await page.get_by_label("Value").fill("2")
        await page.get_by_role("button", name="Add a key").click()
        await page.get_by_label("Config key").nth(1).fill("metadata.note")
        await page.get_by_label("Value").nth(1).fill("12")
        await confirm(page)
        await page.locator("button[data-verb=fork]").click()
        damaged = page.locator("dialog option[disabled]")
        await expect(damaged).to_have_text("step 20 (damaged: no manifest)")
        await page.get_by_role("button", name="Add a key").click()
        await page.get_by_label("Config key").fill("max_steps")
        await page.get_by_label("Value").fill("99")
        await confirm(page)
    note = {"metadata": {"note": "12"}}
    assert sent == [
        ("PATCH", {"train": {"env": {recorded.ENVS[1]: {"ratio": 2}}}, **note}),
        ("POST", {"step": 10, "config": {"max_steps": 99}}),
    ]


async def test_what_is_sent_again_is_sent_by_the_same_key(site: Site) -> None:
    """A lost answer and a second click ask for one thing; other content is another request."""
    keys: list[str] = []

    async def lost(route: Any) -> None:
        keys.append(route.request.headers["idempotency-key"])
        answered = len(keys) > 3
        await (route.fulfill(json={"id": "short"}) if answered else route.abort())

    async with reading(site.browser, site.api) as reader:
        page = reader.page
        await page.route("**/short/stop", lost)
        await reader.open("#/runs/short", '="all"')
        await page.locator("button[data-verb=stop]").click()
        for i, reason in enumerate(("", "", "enough", "")):
            await page.get_by_label("Reason").fill(reason)
            async with page.expect_request("**/short/stop"):
                await page.locator("dialog button[type=submit]").click()
            if i < 3:
                await page.locator("dialog button[type=submit]:not([disabled])").wait_for()
        await page.locator("dialog").wait_for(state="detached")
        await act(page, "stop")
    assert [keys.index(key) for key in keys] == [0, 0, 2, 0, 4]


async def test_keyboard_theme_and_filters(site: Site) -> None:
    async with reading(site.browser, site.api) as reader:
        page = reader.page
        await reader.open("#/runs", '="runs"')
        await expect(page.locator("tbody tr").first).to_contain_text("reverse-retry · ratchet/tiny")
        await page.keyboard.press("/")
        await page.keyboard.type("oth")
        await expect(page.locator("tbody tr")).to_have_count(1)
        await page.keyboard.type("xyz")
        await page.get_by_role("button", name="Show all").click()
        await page.locator("tbody tr").nth(2).wait_for()
        await page.get_by_role("link", name="short").focus()
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#panel-reward canvas")
        await page.locator("h1").click()
        await page.keyboard.press("2")
        await page.wait_for_selector(".timeline canvas")
        await page.keyboard.press("?")
        await page.get_by_role("dialog", name="Keyboard shortcuts").wait_for()
        await page.keyboard.press("Escape")
        await page.locator("#theme").click()
        await page.locator("#theme").click()
        await page.wait_for_selector("html[data-theme=dark]", state="attached")
        await page.reload()
        await page.wait_for_selector("html[data-theme=dark]", state="attached")
        assert reader.complaints == []


async def test_runs_are_filtered_over_all_pages(site: Site) -> None:
    """What fits is found although it is older than all that is shown."""

    async def paged(route: Any) -> None:
        answer = await (await route.fetch()).json()
        first, older = answer["data"][0], "after=" in route.request.url
        limit = int(re.search(r"limit=(\d+)", route.request.url)[1])
        names = ["ancient"] if older else [f"young-{i}" for i in range(limit)]
        rows = [{**first, "id": name, "name": name} for name in names]
        leads_on = {"has_more": not older, "next_after": None if older else first["id"]}
        await route.fulfill(json={**answer, "data": rows, **leads_on})

    async with reading(site.browser, site.api) as reader:
        page = reader.page
        await page.route(lambda url: "/v1/runs?" in url, paged)
        await reader.open("#/runs", '="runs"')
        await page.get_by_role("link", name="young-9", exact=True).wait_for()
        await expect(page.get_by_role("link", name="ancient")).to_have_count(0)
        await page.get_by_label("Filter by name or metadata").fill("ancient")
        await page.get_by_role("link", name="ancient").wait_for()
        await expect(page.locator("tbody tr")).to_have_count(1)


async def test_a_single_value_is_drawn(site: Site) -> None:
    async with reading(site.browser, site.api) as reader:
        await reader.open("#/runs/short", '="all"')
        for value, top in ((0, 1), (7, None)):
            colored, high = await reader.page.evaluate(LONE, value)
            assert colored > 10 and high == (top or high)


async def test_the_launch_form_speaks_json_and_toml(site: Site) -> None:
    """Going from one to the other keeps what was typed; what cannot be read stays."""
    async with reading(site.browser, site.api) as reader:
        page = reader.page
        await reader.open("#/launch", '="launch"')
        language = page.get_by_label("Language of the text")
        text = page.get_by_label("Config as text")
        await page.get_by_label("train.batch_size").fill("32")
        await language.select_option("toml")
        await expect(text).to_have_value(re.compile(r"\[train\]\nbatch_size = 32"))
        await expect(page.get_by_label("train.batch_size")).to_be_hidden()
        await page.get_by_text("This config can be launched.").wait_for()
        none = 'max_steps = "<none>"'
        await text.fill((await text.input_value()).replace("max_steps = 40", none))
        await language.select_option("json")
        await expect(text).to_have_value(re.compile('"max_steps": null'))
        await expect(page.get_by_label("max_steps", exact=True)).to_have_value("none")
        await language.select_option("toml")
        await expect(text).to_have_value(re.compile(none))
        await text.fill("max_steps = = 7")
        await language.select_option("json")
        await page.locator(".verdict .wrong").wait_for()
        await expect(text).to_have_value("max_steps = = 7")
        await expect(language).to_have_value("toml")
        assert [c for c in reader.complaints if "422" not in c and "400" not in c] == []


async def test_the_launch_form_names_mistakes_before_anything_starts(site: Site) -> None:
    async with reading(site.browser, site.api) as reader:
        page = reader.page
        await reader.open("#/launch", '="launch"')
        await page.get_by_label("train.batch_size").fill("-3")
        await page.get_by_text("must be at least 1").first.wait_for()
        await page.locator(".verdict .wrong").wait_for()
        await expect(page.get_by_role("button", name="Launch")).to_be_disabled()
        await page.get_by_label("train.batch_size").fill("32")
        await page.get_by_text("This config can be launched.").wait_for()
        text = page.get_by_label("Config as text")
        await expect(text).to_have_value(re.compile('"batch_size": 32'))
        # The workers' answer to an earlier text no longer counts.
        await page.route(lambda url: "preflight=true" in url, lambda route: None)
        async with page.expect_request(lambda sent: "preflight=true" in sent.url):
            await text.press("Control+End")
            await text.press("Space")
        async with page.expect_event("requestfailed"):
            await text.press("{")
        await expect(page.locator(".verdict")).to_contain_text("Not JSON")
        await expect(page.get_by_role("button", name="Launch")).to_be_disabled()
        assert [c for c in reader.complaints if "422" not in c] == []


async def test_states_without_data_say_what_to_do(site: Site, tmp_path: Path) -> None:
    async with reading(site.browser, site.api) as reader:
        await reader.page.goto(f"{site.api}/dashboard/#/runs/none-such")
        await reader.page.get_by_role("heading", name="No such run").wait_for()
        assert await reader.page.get_by_role("alert").count() == 1
        await reader.page.get_by_role("link", name="All runs").click()
        await reader.page.wait_for_selector("tbody tr")
    with serving(tmp_path, "127.0.0.1:1", "away") as away:
        async with reading(site.browser, away) as reader:
            await reader.page.goto(f"{away}/dashboard/")
            await reader.page.get_by_role("heading", name="Temporal does not answer").wait_for()


async def test_a_key_is_requested_once_and_kept_for_the_tab(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"keys": [{"name": "reader", "sha256": digest("rk_right"), "scopes": ["read"]}]}
    monkeypatch.setenv("RATCHET_API_KEYS", json.dumps(keys))
    store = ArtifactStore(f"file://{tmp_path}/store")
    recorded.write(store, "short", steps=3, ended=time.time(), groups=1)
    with serving(tmp_path, site.temporal, "guarded") as guarded:
        async with reading(site.browser, guarded) as reader:
            page = reader.page
            for given in ("rk_wrong", "rk_right"):
                await page.goto(f"{guarded}/dashboard/#/runs/short")
                await page.get_by_label("API key").fill(given)
                await page.get_by_role("button", name="Use key").click()
            for again in (False, True):
                if again:
                    await page.reload()
                await page.wait_for_selector("#panel-reward canvas")
                # Every request of the page has been answered, so that none asks for a key.
                await page.wait_for_selector('html[data-ready="all"]', state="attached")
                await expect(page.locator("dialog")).to_have_count(0)


async def test_it_goes_on_by_itself_when_the_api_comes_back(site: Site) -> None:
    async with reading(site.browser, site.api) as reader:
        await reader.open("#/runs/short", '="all"')
        await reader.page.wait_for_selector("#link[data-state=live]")
        await reader.page.route("**/v1/**", lambda route: route.abort())
        await reader.page.get_by_role("alert").wait_for()
        await reader.page.unroute("**/v1/**")
        await reader.page.get_by_role("alert").wait_for(state="detached")


async def test_launch_and_every_control(site: Site) -> None:
    """The verbs reach the run, and its answer is seen without a reload."""
    async with reading(site.browser, site.api) as reader:
        page = reader.page

        await reader.open("#/launch", '="launch"')
        await page.get_by_label("name", exact=True).fill("launched")
        await page.get_by_label("max_steps", exact=True).fill("7")
        await page.locator(".verdict .fine").wait_for()
        await page.get_by_role("button", name="Launch").click()
        await page.get_by_role("heading", name="launched-").wait_for()
        await page.locator(".badge.good").wait_for()
        await expect(page.locator(".facts")).to_contain_text("of 7")
        await act(page, "eval")
        await act(page, "pause")
        await page.locator(".badge.warn", has_text="paused").wait_for()
        await act(page, "resume")
        await page.locator(".badge.good", has_text="running").wait_for()
        await page.locator("button[data-verb=fork]").click()
        await page.locator("dialog button[type=submit]").click()
        await page.locator("dialog .trouble", has_text="checkpoint").wait_for()
        await page.keyboard.press("Escape")
        await page.locator("button[data-verb=config]").click()
        await page.get_by_label("Value").fill("32")
        await confirm(page)
        await act(page, "stop")
        await page.locator(".badge.done", has_text="succeeded").wait_for()
        await page.get_by_role("link", name="Events").click()
        await page.get_by_role("cell", name="run.ended").wait_for()
        for word in ("pause", "resume", "stop", "trigger eval"):
            await expect(page.locator(".events")).to_contain_text(word)
        # A refused fork is an answer of the API, which Chromium counts among errors.
        assert [c for c in reader.complaints if "409" not in c] == []
