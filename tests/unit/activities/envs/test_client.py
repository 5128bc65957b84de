"""Rollouts by way of a real env server, Ratchet's and verifiers' own, with an engine that chats."""

import asyncio
import contextlib
import importlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from verifiers.v1.serve import EnvServer

from ratchet.activities.contracts.rollouts import EngineTarget
from ratchet.activities.envs import loading
from ratchet.activities.envs.client import ABORTED, EnvClient
from ratchet.activities.envs.playing import RolloutServer
from ratchet.activities.envs.samples import Reading, Rollout, RolloutSample
from ratchet.activities.rollouts import chat
from ratchet.configs.env import SamplingConfig

TASK = {"idx": 0, "prompt": "abc", "word": "abc"}
CHAT = Reading(chat=True)


class Engine:
    """Answers chat completions, or keeps those who ask waiting."""

    def __init__(self) -> None:
        self.answers = True
        self.waiting = self.left = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                await reader.readexactly(length)
                if not self.answers:
                    self.waiting += 1
                    await reader.read(1)
                    self.left += 1
                    break
                writer.write(self.reply())
                await writer.drain()
        writer.close()

    @staticmethod
    def reply() -> bytes:
        """A completion of two tokens."""
        entries = [{"token": "c", "logprob": -0.5}, {"token": "b", "logprob": -1 / 3}]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "cba"},
            "finish_reason": "stop",
            "token_ids": [7, 8],
            "logprobs": {"content": entries},
        }
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        about = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
        whole = {**about, "choices": [choice], "usage": usage, "prompt_token_ids": [1, 2, 3]}
        body = json.dumps(whole).encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        return head.encode() + b"\r\n\r\n" + body


@contextlib.asynccontextmanager
async def engine_at() -> AsyncIterator[tuple[Engine, str]]:
    """An engine and its address."""
    engine = Engine()
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    try:
        yield engine, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@contextlib.asynccontextmanager
async def client_of(kind: type[EnvServer]) -> AsyncIterator[EnvClient]:
    """A client of a server of such a kind, which serves reverse-text."""
    config = loading.server_config("reverse-text", {}, 60.0)
    server = kind(config, address="tcp://127.0.0.1:0")
    serving = asyncio.create_task(server.run())
    client = EnvClient(server.address)
    try:
        yield client
    finally:
        await client.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def request(url: str, task: dict[str, Any] = TASK) -> dict[str, Any]:
    """A rollout whose policy the engine at `url` is."""
    return chat.request(EngineTarget(0, 1, url, "m", 0), SamplingConfig(max_tokens=4), {}, task)


def timeless(rollout: Rollout) -> Rollout:
    """The rollout without how long it took."""
    return replace(rollout, record={**rollout.record, "timing": {}})


@pytest.fixture(autouse=True)
def shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Env servers have the shipped environments on their import path, and one event loop each."""
    monkeypatch.syspath_prepend(str(loading.SHIPPED_DIR))
    importlib.import_module("ratchet_chat")._clients.cache_clear()


@pytest.mark.parametrize("kind", [RolloutServer, EnvServer])
async def test_a_rollout_comes_back_to_the_bit(kind: type[EnvServer]) -> None:
    """verifiers' own server stands for one that an older build started: it knows no rollouts."""
    async with engine_at() as (_, url), client_of(kind) as client:
        played = await asyncio.gather(*(client.play(request(url), CHAT) for _ in range(3)))
        by_episodes = client._episodes is not None
    assert by_episodes is (kind is EnvServer)
    for rollout in played:
        assert rollout.error is None
        (sample,) = rollout.samples
        assert (sample.token_ids, sample.loss_mask) == ([1, 2, 3, 7, 8], [False] * 3 + [True] * 2)
        assert sample.logprobs == [0.0, 0.0, 0.0, -0.5, -1 / 3]
        assert (rollout.reward, rollout.error, rollout.record["metrics"]) == (1, None, {"exact": 1})
        assert rollout.record["timing"]["end"] >= rollout.record["timing"]["start"] > 0
        said = [message["content"] for message in rollout.record["messages"]]
        assert said[-1] == "cba" and timeless(rollout) == timeless(played[0])


async def test_both_kinds_of_servers_say_the_same() -> None:
    async with engine_at() as (_, url):
        async with client_of(RolloutServer) as client:
            own = await client.play(request(url), CHAT)
        async with client_of(EnvServer) as client:
            other = await client.play(request(url), CHAT)
    assert timeless(own) == timeless(other)


async def test_the_caller_may_lay_out_what_has_no_tokens() -> None:
    async with engine_at() as (_, url), client_of(RolloutServer) as client:
        sample = RolloutSample([5], [True], [0.0], [-1])
        played = await client.play(request(url), Reading(), lambda trace: [sample])
        assert played.samples == [sample] and played.reward == 1
        assert (await client.play(request(url), CHAT)).sampled_tokens == 2


@pytest.mark.parametrize("kind", [RolloutServer, EnvServer])
async def test_a_refusal_has_the_servers_words(kind: type[EnvServer]) -> None:
    async with client_of(kind) as client:
        with pytest.raises(RuntimeError, match=r"^ValidationError: .*\nword"):
            await client.play(request("http://127.0.0.1:9", {"idx": 0, "prompt": "abc"}), CHAT)


async def test_an_engine_that_is_gone_is_a_result() -> None:
    async with client_of(RolloutServer) as client:
        played = await client.play(request("http://127.0.0.1:9"), CHAT)
    assert played.provider and played.error is not None and played.samples == []


async def _until_it_waits(engine: Engine, playing: asyncio.Task[Rollout]) -> None:
    async with asyncio.timeout(60):
        while not engine.waiting:
            assert not playing.done(), playing
            await asyncio.sleep(0.01)


async def test_who_cancels_ends_the_rollout() -> None:
    async with engine_at() as (engine, url), client_of(RolloutServer) as client:
        engine.answers = False
        playing = asyncio.create_task(client.play(request(url), CHAT))
        await _until_it_waits(engine, playing)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        async with asyncio.timeout(60):
            while not engine.left:
                await asyncio.sleep(0.01)
        engine.answers = True
        assert (await client.play(request(url), CHAT)).error is None, "the client goes on"


async def test_a_rollout_that_ends_itself_is_aborted() -> None:
    """As one does whose environment cancels its own task."""

    class Fickle(RolloutServer):
        async def _play(self, asked: dict[str, Any]) -> Rollout:
            raise asyncio.CancelledError

    async with client_of(Fickle) as client:
        with pytest.raises(RuntimeError, match=f"^{ABORTED}$"):
            await client.play(request("http://127.0.0.1:9"), CHAT)


def test_a_rollout_worker_imports_no_verifiers(tmp_path: Path) -> None:
    """It costs seconds of CPU and a hundred megabytes, and nearly no worker needs it."""
    code = (
        "import sys; import ratchet.activities.rollouts.activities; "
        "from ratchet.activities.envs.client import EnvClient; "
        "print(sorted({'verifiers', 'torch', 'transformers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip() == "[]"
