"""The dashboard's files: complete, small, offline, and without a way for text to become markup."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from starlette.types import ASGIApp, Message
from temporalio.envconfig import ClientConnectConfig

from ratchet.activities.contracts.controls import CONTROLS
from ratchet.activities.contracts.names import Queues
from ratchet.activities.contracts.statuses import ENDED, STATUSES
from ratchet.api.app import create_app
from ratchet.api.dashboard.pages import CONTRACT, FILES, contract
from ratchet.api.settings import Settings
from ratchet.configs.live import LIVE_KEYS

OWN = sorted((FILES / "js").glob("*.js"))
VENDORED = FILES / "vendor" / "uplot"
LIMIT = 155_000


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    """The app with a Temporal address where nobody listens."""
    settings = Settings(store_url=f"file://{tmp_path}", queues=Queues(), min_free_bytes=1)
    app = create_app(settings, ClientConnectConfig(target_host="127.0.0.1:1"))
    return TestClient(app, base_url="http://127.0.0.1")


def imports_of(path: Path, pattern: str) -> set[Path]:
    found = {path.parent / name for name in re.findall(pattern, path.read_text())}
    assert all(module.exists() for module in found), f"{path.name} imports what is not there"
    return {module.resolve() for module in found}


def loaded_by(*roots: Path) -> set[Path]:
    """The modules that a browser fetches for `roots`: what they import, without `import()`."""
    seen: set[Path] = set()
    queue = [root.resolve() for root in roots]
    while queue:
        module = queue.pop()
        if module not in seen:
            seen.add(module)
            queue += imports_of(module, r'from "(\./[\w-]+\.js)"')
    return seen


def test_pages_are_served_and_stay_at_home(client: TestClient) -> None:
    home = client.get("/", follow_redirects=False)
    assert home.headers["location"] == "/dashboard/"
    page = client.get("/dashboard/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    for name in re.findall(r'(?:src|href)="([\w/.-]+\.(?:js|css|svg))"', page.text):
        assert client.get(f"/dashboard/{name}").status_code == 200, name
    missing = client.get("/dashboard/js/none.js")
    assert missing.status_code == 404
    assert missing.headers["content-type"] == "application/problem+json"


async def raw(app: ASGIApp, path: str) -> int:
    """The status of a GET of `path` as a server hands it on. Clients resolve `..` by themselves."""
    heard: list[Message] = []

    async def receive() -> Message:
        # The client stays, and has no more to say.
        return await asyncio.Future[Message]()

    async def send(message: Message) -> None:
        heard.append(message)

    asked = {"type": "http", "http_version": "1.1", "method": "GET", "scheme": "http"}
    where = {"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": ""}
    address = {"server": ("127.0.0.1", 80), "client": ("127.0.0.1", 9)}
    await app({**asked, **where, **address, "headers": [(b"host", b"127.0.0.1")]}, receive, send)
    return int(heard[0]["status"])


async def test_no_file_can_be_reached_outside(client: TestClient) -> None:
    assert (FILES.parent / "pages.py").exists()
    assert await raw(client.app, "/dashboard/js/main.js") == 200
    assert await raw(client.app, "/dashboard/css/../js/main.js") == 200
    for path in ("../pages.py", "js/../../pages.py", f"{FILES.parent}/pages.py", "..\\pages.py"):
        assert await raw(client.app, f"/dashboard/{path}") == 404, path


def test_nothing_is_loaded_from_elsewhere() -> None:
    for path in [*OWN, FILES / "index.html", *FILES.glob("css/*.css")]:
        outside = re.findall(r"(?:https?:)?//[\w.-]+\.\w{2,}", path.read_text())
        assert not [url for url in outside if "www.w3.org" not in url], path.name


def test_text_never_becomes_markup() -> None:
    """What a model writes must not run in the reader's browser."""
    for path in OWN:
        banned = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
        assert not re.search(banned, path.read_text()), path.name


def test_each_page_loads_less_than_155_kb_of_scripts() -> None:
    js = FILES / "js"
    plot = (VENDORED / "uPlot.iife.min.js").stat().st_size
    pages = imports_of(js / "main.js", r'import\("(\./[\w-]+\.js)"\)')
    tabs = imports_of(js / "run.js", r'import\("(\./[\w-]+\.js)"\)')
    assert {page.stem for page in pages} == {"runs", "run", "compare", "launch"}
    index = (FILES / "index.html").read_text()
    named = re.findall(r'rel="modulepreload" href="(.+?)"', index)
    preloaded = [FILES / name for name in named if name != CONTRACT]
    assert {path.resolve() for path in preloaded} <= loaded_by(js / "main.js", js / "run.js")
    first = [js / "main.js", *preloaded]
    ways = [(*first, page) for page in pages] + [(*first, js / "run.js", tab) for tab in tabs]
    for way in ways:
        size = plot + len(contract()) + sum(module.stat().st_size for module in loaded_by(*way))
        assert size < LIMIT, f"{way[-1].stem}: {size}"


def test_all_scripts_travel_in_less_than_95_kb(client: TestClient) -> None:
    names = [f"js/{path.name}" for path in OWN] + ["vendor/uplot/uPlot.iife.min.js", CONTRACT]
    size = 0
    for name in names:
        with client.stream("GET", f"/dashboard/{name}") as answer:
            size += sum(map(len, answer.iter_raw()))
    assert size < 95_000


def test_every_module_is_used() -> None:
    js = FILES / "js"
    used = loaded_by(js / "main.js")
    for _ in range(3):
        lazily = {m for u in used for m in imports_of(u, r'import\("(\./[\w-]+\.js)"\)')}
        used |= loaded_by(*lazily)
    assert {path.resolve() for path in OWN} - used == {(js / "theme-early.js").resolve()}


def test_the_pages_read_the_tables_of_the_service(client: TestClient) -> None:
    """Their buttons, dialogs and statuses are those that the API answers by."""
    answer = client.get(f"/dashboard/{CONTRACT}")
    assert answer.headers["content-type"].startswith("text/javascript")
    assert answer.headers["cache-control"] == "no-cache"
    assert client.post(f"/dashboard/{CONTRACT}").status_code == 405
    exported = dict(re.findall(r"^export const (\w+) = (.+);$", answer.text, re.M))
    found = {name: json.loads(text) for name, text in exported.items()}
    assert tuple(found["LIVE"]) == LIVE_KEYS
    assert tuple(found["STATUSES"]) == STATUSES and tuple(found["ENDED"]) == ENDED
    assert [verb["name"] for verb in found["CONTROLS"]] == [*CONTROLS]
    for shown, verb in zip(found["CONTROLS"], CONTROLS.values(), strict=True):
        assert tuple(shown["offered"]) == verb.offered and tuple(shown["fields"]) == verb.fields
        assert verb.dismiss not in (verb.confirm or verb.label, "Cancel"), (
            "buttons say what they do"
        )
    used = {
        name
        for path in OWN
        for names in re.findall(r'import \{ (.+?) \} from "\.\./contract\.js"', path.read_text())
        for name in names.split(", ")
    }
    assert used == {*found}


def test_every_verb_is_sent_with_an_idempotency_key() -> None:
    """Only a dry run, which starts nothing, is sent without one."""
    text = (FILES / "js" / "api.js").read_text()
    plain = re.findall(r'request\("(?!GET)\w+".+', text)
    assert len(plain) == 1 and "dry_run: true" in plain[0]
    assert text.count("Idempotency-Key") == 1


def test_uplot_has_its_licence() -> None:
    assert "MIT" in (VENDORED / "LICENSE").read_text()
    assert "uPlot" in (VENDORED / "uPlot.iife.min.js").read_text()[:300]
