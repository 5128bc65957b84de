"""Rollouts by way of a real env server, Ratchet's and verifiers' own, with an engine that chats."""

import asyncio
import contextlib
import importlib
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from verifiers.v1.episode import WireEpisode
from verifiers.v1.serve import EnvServer
from verifiers.v1.serve.types import RunRequest

from ratchet.activities.contracts.rollouts import EngineTarget
from ratchet.activities.envs import loading, playing
from ratchet.activities.envs.client import ABORTED, EnvClient, UnreadEpisode
from ratchet.activities.envs.playing import RolloutServer
from ratchet.activities.envs.samples import Reading, Rollout
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
        assert client._sends_episodes is (kind is EnvServer)
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


async def test_who_reads_episodes_gets_them_and_others_get_rollouts() -> None:
    async with engine_at() as (_, url), client_of(RolloutServer) as client:
        episode = await client.episode(request(url))
        (trace,) = episode.traces
        assert trace.last_reply == "cba"
        assert (await client.play(request(url), CHAT)).sampled_tokens == 2
        assert not client._sends_episodes


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


@pytest.mark.parametrize("kind", [RolloutServer, EnvServer])
async def test_who_cancels_ends_the_rollout(kind: type[EnvServer]) -> None:
    async with engine_at() as (engine, url), client_of(kind) as client:
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
        async def _play(self, wanted: RunRequest) -> Any:
            raise asyncio.CancelledError

    async with client_of(Fickle) as client:
        with pytest.raises(RuntimeError, match=f"^{ABORTED}$"):
            await client.play(request("http://127.0.0.1:9"), CHAT)


async def test_a_refusal_says_what_it_can(caplog: pytest.LogCaptureFixture) -> None:
    # Test runners cannot pass such a line on.
    caplog.set_level(logging.CRITICAL, logger=playing.__name__)

    class Odd(RolloutServer):
        async def _play(self, wanted: RunRequest) -> Any:
            raise ValueError("half a letter: \ud800")

    async with client_of(Odd) as client:
        with pytest.raises(RuntimeError, match=r"^ValueError: half a letter: \\ud800$"):
            await client.play(request("http://127.0.0.1:9"), CHAT)


@pytest.mark.parametrize("wrong", [None, object()])
async def test_an_episode_that_cannot_be_read_or_sent_is_no_rollout(wrong: Any) -> None:
    """Nothing of it is stored, since the environment did what it should."""

    class Broken(RolloutServer):
        async def _play(self, wanted: RunRequest) -> Any:
            if wrong is None:
                return None
            trace = {"task": {"type": "T", "data": TASK}, "agent": {"config": {}}}
            episode = WireEpisode.model_validate({"task": trace["task"], "traces": [trace]})
            episode.traces[0].stop_condition = wrong
            return episode

    async with client_of(Broken) as client:
        with pytest.raises(UnreadEpisode):
            await client.play(request("http://127.0.0.1:9"), CHAT)


async def test_records_may_hold_numbers_of_any_kind() -> None:
    class Numbers(RolloutServer):
        async def _play(self, wanted: RunRequest) -> Any:
            episode = await super()._play(wanted)
            episode.traces[0].metrics["numpy"] = np.float32(0.5)
            episode.traces[0].rewards["similarity"].weight = np.float64(2.0)
            return episode

    async with engine_at() as (_, url), client_of(Numbers) as client:
        rollout = await client.play(request(url), CHAT)
    assert rollout.record["metrics"]["numpy"] == 0.5 and rollout.reward == 2.0
    json.dumps(rollout.record)


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
