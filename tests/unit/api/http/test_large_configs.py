"""Configs that are large or odd: refused with a reason, and nobody else waits for them."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ratchet.api.app import create_app
from ratchet.api.schemas.problems import ApiProblem
from ratchet.api.services import core
from ratchet.api.services.launch import read_config
from ratchet.configs.load import MOST_KEYS, MOST_REPORTED, ConfigError, parse, validate
from ratchet.configs.upgrades import config_document
from tests.unit.api.conftest import Served, asgi, config, connection
from tests.unit.api.routes.test_create import problem

LIMIT = 256 * 1024
BAR_S = 0.1
"""Longest that reading one config may keep all else from being answered."""

ENV = {"id": "reverse-text"}


def with_envs(count: int, **more: Any) -> dict[str, Any]:
    envs = [{**ENV, "name": f"e{number}", **more} for number in range(count)]
    return {"max_steps": 5, "train": {"batch_size": 8, "group_size": 4, "env": envs}}


def as_json(**more: Any) -> str:
    return json.dumps({"max_steps": 5, "train": {"env": [ENV]}, **more})


def toml_envs(count: int) -> str:
    head = "max_steps = 5\n[train]\n"
    return head + "".join(f'[[train.env]]\nid = "x"\nname = "e{n}"\n' for n in range(count))


BODIES = {
    "a dotted key of 16,000 parts": ("toml", "a." * 16_000 + "b = 1\n"),
    "a quoted dotted key": ("toml", '"a" . ' * 40_000 + "b = 1\n"),
    "a dotted key of 600 parts": ("toml", "max_steps = 5\n" + "a." * 600 + "b = 1\n"),
    "many dotted keys": ("toml", "".join(f"x{n}." + "a." * 29 + "b=1\n" for n in range(3500))),
    "as many dotted keys as may be": (
        "toml",
        "".join(f"x{n}." + "a." * 13 + "b=1\n" for n in range(MOST_KEYS // 16)),
    ),
    "as many tables as may be": ("toml", "".join(f"[t{n}]\n" for n in range(MOST_KEYS // 4))),
    "too many tables": ("toml", "".join(f"[t{n}]\n" for n in range(24_000))),
    "a list of numbers": ("toml", "a = [" + "1," * 125_000 + "]\n"),
    "deep lists": ("toml", "a = " + "[" * 125_000),
    "escapes": ("toml", 'a = "' + '\\"' * 125_000 + '"\n'),
    "9,000 envs": ("json", json.dumps(with_envs(9000))[:LIMIT]),
    "9,000 envs in TOML": ("toml", toml_envs(5000)),
    "as many envs as may be": ("json", json.dumps(with_envs(256))),
    "60,000 unknown keys": ("json", as_json(**{f"k{n}": 1 for n in range(19_000)})),
    "as many unknown keys as may be": ("json", as_json(**{f"k{n}": 1 for n in range(9_900)})),
    "bad filters": ("json", as_json(filters={"pre_batch": [{"type": "zero"}] * 4_900})),
    "own flags": ("json", as_json(inference={"extra_args": ["--host=x"] * 9_900})),
    "a long unknown key": ("json", as_json(**{"max_step" * 30_000: 1})),
    "a long name of an algorithm": ("json", as_json(algo={"type": "grpo" * 60_000})),
    "long arguments": ("json", json.dumps(with_envs(1, args={"x": list(range(9_000))}))),
}


async def held(work: Callable[[], object]) -> float:
    """CPU seconds for which `work` in a thread keeps the loop from going on, at the longest."""
    loop, worst = asyncio.get_running_loop(), 0.0
    future = loop.run_in_executor(None, work)
    while not future.done():
        # Other processes take none of this one's.
        began = time.process_time()
        await asyncio.sleep(0.001)
        worst = max(worst, time.process_time() - began)
    await future
    return worst


@pytest.mark.alone
@pytest.mark.parametrize("name", BODIES)
async def test_reading_a_config_keeps_nothing_else_waiting(name: str) -> None:
    media, text = BODIES[name]
    data = text.encode()
    assert len(data) <= LIMIT

    def read() -> None:
        try:
            read_config(data, media)
        except ApiProblem as error:
            assert len(error.document.errors or ()) <= MOST_REPORTED + 1

    began = time.process_time()
    assert min([await held(read), await held(read)]) < BAR_S
    assert time.process_time() - began < 4.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a." * 17 + "b = 1", "more than 16 parts (line 1)"),
        ("x = 1\n[" + "'a' . " * 17 + '"b"]', "more than 16 parts (line 2)"),
        ("x = {" + "a." * 17 + "b = 1}", "more than 16 parts (line 1)"),
        ("a = 1\n" * (MOST_KEYS + 1), "more than 10000 keys"),
    ],
)
def test_toml_with_too_many_keys_is_not_read(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert says in str(caught.value)


def test_text_with_dots_is_read() -> None:
    text = '"' + "So it goes. And so on... a.b.c, 3.14. " * 200 + '"'
    assert parse(f"a = {text}\n" + "b." * 14 + "c = 1")["a"].startswith("So it goes.")


@pytest.mark.asyncio(loop_scope="session")
async def test_what_is_too_large_is_413_and_too_many_mistakes_are_counted(served: Served) -> None:
    post = "/v1/runs?dry_run=true"
    large = with_envs(250, args={"note": "x" * 900})
    assert len(json.dumps(large)) < served.settings.max_body_bytes
    for path in (post, "/v1/runs"):
        problem(await served.http.post(path, json=large), 413, "config-too-large")
    values = config(train={"env": [{**ENV, "args": {"x": [1] * 10_001}}]})
    problem(await served.http.post(post, json=values), 413, "body-too-large")
    many = problem(await served.http.post(post, json=with_envs(257)), 422, "invalid-config")
    assert many["errors"][0]["pointer"] == "/train/env" and "256" in many["detail"]
    assert (await served.http.post(post, json=with_envs(256))).status_code == 200
    wrong = problem(
        await served.http.post(post, json=config(**{f"k{n}": 1 for n in range(500)})),
        422,
        "invalid-config",
    )
    assert len(wrong["errors"]) == MOST_REPORTED + 1
    assert wrong["errors"][-1]["message"] == "and 400 more mistakes"
    run = await served.start("small")
    patch = {f"k{n}": 1 for n in range(4_000)}
    answer = await served.http.patch(f"/v1/runs/{run['id']}", json=patch)
    assert len(problem(answer, 422, "invalid-request")["errors"]) <= MOST_REPORTED + 1


@pytest.mark.asyncio(loop_scope="session")
async def test_a_change_that_makes_a_config_too_large_is_413(served: Served) -> None:
    def train(note: int) -> dict[str, Any]:
        return {"env": [{**ENV, "args": {"note": "x" * note}}]}

    document = config_document(validate(config(train=train(0))))
    room = LIMIT - len(json.dumps(document, separators=(",", ":")))
    run = await served.start("grows", train=train(room - 100))
    await served.until(run["id"], status="running")
    url = f"/v1/runs/{run['id']}"
    patch = {"metadata": {"note": "x" * 200}}
    problem(await served.http.patch(url, json=patch), 413, "config-too-large")
    nulls = {"metadata": {f"k{number}": None for number in range(3000)}}
    assert (await served.http.patch(url, json=nulls)).status_code == 200


@pytest.mark.asyncio(loop_scope="session")
async def test_a_config_that_is_not_read_in_time_is_503(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "READ_S", 0.05)
    async with asgi(create_app(replace(served.settings), connection(served.env))) as http:
        services = http._transport.app.state.services  # type: ignore[attr-defined]
        busy = asyncio.Event()
        loop = asyncio.get_running_loop()
        blocked = services._reader.submit(
            lambda: asyncio.run_coroutine_threadsafe(busy.wait(), loop).result()
        )
        # Neither what is wrong with a config nor what it would do is found in the loop itself.
        for body in ({}, config()):
            answer = await http.post("/v1/runs?dry_run=true", json=body)
            problem(answer, 503, "config-unread")
            assert answer.headers["retry-after"] == "5"
        busy.set()
        await asyncio.wrap_future(blocked)
