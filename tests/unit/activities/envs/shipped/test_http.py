"""An engine's client in an env server: it asks as the OpenAI SDK does, and fails as it does."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import verifiers.v1 as vf
from aiohttp import web
from openai import OpenAIError
from verifiers.v1.clients import train
from verifiers.v1.clients.base import build_async_openai
from verifiers.v1.errors import model_error

from ratchet.activities.envs.shipped import ratchet_compat
from ratchet.activities.envs.shipped.ratchet_http import EngineClient, suits
from ratchet.activities.hosting.spec import free_port

BODY = {"model": "m", "token_ids": [1, 2], "sampling_params": {"temperature": 1.0, "note": "ü"}}
Handler = Callable[[web.Request], Any]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """The base URL of a server that answers every request by `handler`."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port := free_port())
    await site.start()
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        await runner.cleanup()


def config_of(url: str, **changes: Any) -> vf.TrainClientConfig:
    headers = {"X-Own": "1"}
    return vf.TrainClientConfig(base_url=url, api_key_var="NO_KEY", headers=headers, **changes)


async def post(client: Any, url: str) -> Any:
    """As renderers asks."""
    endpoint = f"{url.removesuffix('/v1')}/inference/v1/generate"
    options = {"headers": {"X-Session-ID": "trace"}}
    return await client.post(endpoint, cast_to=httpx.Response, body=BODY, options=options)


async def refused(client: Any, url: str) -> tuple[str, int]:
    """What verifiers tells of a request that failed."""
    with pytest.raises(OpenAIError) as caught:
        await post(client, url)
    await client.close()
    error = model_error(caught.value)
    return str(error), error.status_code


async def test_an_engine_is_asked_as_by_the_sdk() -> None:
    seen: list[tuple[Any, ...]] = []

    async def engine(request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response({"path": request.path})
        wanted = ("Authorization", "X-Own", "X-Session-ID", "Content-Type", "Accept")
        said = {name: request.headers.get(name) for name in wanted}
        seen.append((request.path, said, json.loads(await request.read())))
        return web.Response(body=b'{"choices": []}')

    async with serving(engine) as url:
        for build in (build_async_openai, EngineClient):
            client: Any = build(config_of(url))
            assert str(client.base_url) == f"{url}/"
            assert (await post(client, url)).content == b'{"choices": []}'
            assert await client.get("/models", cast_to=dict[str, Any]) == {"path": "/v1/models"}
            await client.close()
    assert seen[0] == seen[1]
    assert seen[0][1]["X-Session-ID"] == "trace" and seen[0][2] == BODY


@pytest.mark.parametrize(
    "answer",
    [
        {"status": 500, "text": '{"error": {"message": "died", "code": 500}}'},
        {"status": 400, "text": "too long"},
        {"status": 404, "text": '"nothing"'},
        {"status": 503, "text": ""},
        {"status": 302, "text": "", "headers": {"Location": "/other"}},
    ],
)
async def test_a_refusal_reads_as_that_of_the_sdk(answer: dict[str, Any]) -> None:
    asked: list[str] = []

    async def engine(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(**answer)

    async with serving(engine) as url:
        told = await refused(EngineClient(config_of(url)), url)
        assert len(asked) == 1, "nothing is sent twice, and nowhere else"
        assert told == await refused(build_async_openai(config_of(url)), url)
    assert told[1] == answer["status"]


async def test_an_engine_that_is_gone_reads_as_with_the_sdk() -> None:
    async def engine(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    gone = f"http://127.0.0.1:{free_port()}/v1"
    async with serving(engine) as url:
        for address in (url, gone):
            told = await refused(EngineClient(config_of(address)), address)
            assert told == await refused(build_async_openai(config_of(address)), address)
            assert told == ("Connection error.", 503)


async def test_a_time_out_reads_as_with_the_sdk() -> None:
    async def engine(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    async with serving(engine) as url:
        config = config_of(url, timeout={"read": 0.05})
        told = await refused(EngineClient(config), url)
        assert told == await refused(build_async_openai(config), url)
    assert told == ("Request timed out.", 504)


async def test_who_cancels_a_call_ends_its_request() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def engine(request: web.Request) -> web.Response:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return web.Response()

    async with serving(engine) as url, asyncio.timeout(10):
        client = EngineClient(config_of(url))
        call = asyncio.create_task(post(client, url))
        await begun.wait()
        call.cancel()
        await ended.wait()
        await client.close()


def test_an_engine_behind_tls_or_a_proxy_is_asked_by_the_sdk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    plain = config_of("http://10.1.2.3:8000/v1")
    assert suits(plain)
    assert not suits(config_of("https://10.1.2.3/v1"))
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    assert not suits(plain)
    monkeypatch.setenv("no_proxy", "10.1.2.3")
    assert suits(plain)


async def test_verifiers_asks_an_engine_with_this_client() -> None:
    ratchet_compat.apply()
    ratchet_compat.apply()
    lean, stock = (
        train.TrainClient(config_of(f"{scheme}://127.0.0.1:1/v1")) for scheme in ("http", "https")
    )
    assert isinstance(lean.client, EngineClient)
    assert not isinstance(stock.client, EngineClient)
    await stock.close()
    await lean.close()
