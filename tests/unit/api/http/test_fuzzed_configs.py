"""Configs at random, valid and broken: each is answered, none with a 5xx, and nobody waits for it.

Half of them are an example's with a few values changed, moved or taken away, so that much of each
is right; the others are what a JSON or TOML body can hold at all.
"""

import asyncio
import json
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import tomli_w
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratchet.api.app import create_app
from ratchet.api.schemas import keys as api_keys
from ratchet.configs.run import RunConfig
from tests import ROOT
from tests.unit.api.conftest import asgi
from tests.unit.api.http.test_security import AWAY, bearer
from tests.unit.api.http.test_security import settings as api_settings

BAR_S = 0.1
"""Longest that one config may keep /healthz from being answered."""
EXAMPLES = [
    tomllib.loads(file.read_text()) for file in sorted((ROOT / "configs/examples").glob("*.toml"))
]
WORDS = sorted(
    {key for one in RunConfig.model_json_schema()["$defs"].values() for key in one["properties"]}
    | RunConfig.model_fields.keys()
)

text = st.text(max_size=40) | st.sampled_from(
    ["grpo", "sft", "adamw", "auto", "<none>", "ratchet/tiny", "reverse-text", "../..", "\x00", "é"]
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-2, 10**6)
    | st.sampled_from([-(2**63), 2**63, 10**40, 1e308, -0.0, 5e-324])
    | st.floats(allow_nan=False, allow_infinity=False)
    | text
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(WORDS) | text, inner, max_size=4)
    ),
    max_leaves=12,
)


def places(config: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where values lie in plain data."""
    items = (
        config.items()
        if isinstance(config, dict)
        else enumerate(config)
        if isinstance(config, list)
        else ()
    )
    return [above] + [place for key, value in items for place in places(value, (*above, key))]


@st.composite
def near_valid(draw: st.DrawFn) -> Any:
    """An example with up to five mistakes, or with none."""
    config = json.loads(json.dumps(draw(st.sampled_from(EXAMPLES))))
    for _ in range(draw(st.integers(0, 5))):
        *above, last = draw(st.sampled_from([place for place in places(config) if place]))
        section = config
        for key in above:
            section = section[key]
        match draw(st.sampled_from(["change", "change", "add", "remove", "repeat"])):
            case "change":
                section[last] = draw(values)
            case "add" if isinstance(section, dict):
                section[draw(st.sampled_from(WORDS) | text)] = draw(values)
            case "repeat" if isinstance(section, list):
                section.extend([section[last]] * draw(st.integers(1, 50)))
            case _:
                del section[last]
    return config


def as_toml(config: Any) -> str:
    """A config as TOML, as far as that can say it; what it cannot is cut off."""
    try:
        return tomli_w.dumps(config)
    except (TypeError, AttributeError, ValueError):
        return str(config)


def as_bytes(text: str) -> bytes:
    """Text in UTF-8; what that cannot carry is replaced."""
    return text.encode("utf-8", "replace")


bodies = st.one_of(
    near_valid().map(lambda config: ("application/json", json.dumps(config).encode())),
    near_valid().map(lambda config: ("application/toml", as_bytes(as_toml(config)))),
    values.map(lambda value: ("application/json", json.dumps(value).encode())),
    st.tuples(
        st.sampled_from(["application/json", "application/toml", "text/toml", "text/plain", ""]),
        st.binary(max_size=200) | st.text(max_size=200).map(as_bytes),
    ),
    st.tuples(
        st.just("application/json"),
        st.builds(
            lambda config, cut: json.dumps(config).encode()[:cut], near_valid(), st.integers(0, 400)
        ),
    ),
)


def each_body(count: int) -> Any:
    """Runs a test with so many bodies, the same each time."""
    wanted = settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: wanted(given(body=bodies)(test))


def headers_of(media: str, key: str | None) -> dict[str, str]:
    return {**({"content-type": media} if media else {}), **(bearer(key) if key else {})}


@pytest.mark.parametrize("guarded", [False, True])
def test_no_config_is_a_5xx(tmp_path: Path, guarded: bool) -> None:
    home = tmp_path / "home"
    key = api_keys.add(home / "api_keys.json", "k", ["write"], 10_000_000) if guarded else None
    result = Counter[int]()
    with TestClient(create_app(api_settings(home), AWAY)) as api:

        @each_body(150)
        def ask(body: tuple[str, bytes]) -> None:
            media, data = body
            headers = headers_of(media, key)
            answer = api.post("/v1/runs?dry_run=true", content=data, headers=headers)
            assert answer.status_code < 500, answer.text
            result[answer.status_code] += 1

        ask()
    assert result[200] > 5 and result[422] > 20 and result[400] > 5, result


async def stalled(
    http: httpx.AsyncClient, headers: dict[str, str], data: bytes
) -> tuple[int, float]:
    """The status of a dry run, and the longest that /healthz took to answer beside it, in CPU
    seconds of this process, of which others on the machine take none.
    """
    worst = 0.0
    asked = asyncio.create_task(http.post("/v1/runs?dry_run=true", content=data, headers=headers))
    while not asked.done():
        began = time.process_time()
        # Asking without a pause would take most of the time that there is.
        await asyncio.sleep(0.005)
        (await http.get("/healthz")).raise_for_status()
        worst = max(worst, time.process_time() - began)
    return (await asked).status_code, worst


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("guarded", [False, True])
def test_10000_configs_stall_nobody(tmp_path: Path, guarded: bool) -> None:
    """Five thousand each, with keys and without. A stall counts if it is there three times."""
    home = tmp_path / "home"
    key = api_keys.add(home / "api_keys.json", "k", ["write"], 10_000_000) if guarded else None
    result, stalls = Counter[int](), list[float]()
    http = asgi(create_app(api_settings(home), AWAY))
    with asyncio.Runner() as runner:

        @each_body(5000)
        def ask(body: tuple[str, bytes]) -> None:
            media, data = body
            headers = headers_of(media, key)
            status, worst = runner.run(stalled(http, headers, data))
            result[status] += 1
            for _ in range(2):
                if worst > BAR_S:
                    worst = min(worst, runner.run(stalled(http, headers, data))[1])
            stalls.append(worst)
            assert status < 500 and worst <= BAR_S, (status, worst, data[:2000])

        ask()
    print(f"{len(stalls)} configs, worst stall {max(stalls) * 1e3:.1f} ms, {dict(result)}")
    assert len(stalls) >= 5000 and result[200] > 100
