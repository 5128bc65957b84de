"""The rollout room against a real engine and real env servers, on a small random policy."""

import asyncio
import hashlib
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.context import WorkerContext
from activities.contracts import names
from activities.contracts.hosting import HostInput
from activities.contracts.rollouts import (
    EngineTarget,
    FinalizeEvalInput,
    FinalizeGroupInput,
    GroupResult,
    GroupWork,
    Kind,
    RunRolloutsInput,
    ShipBatchInput,
)
from activities.envs.host import env_spec
from activities.inference.engine import engine_spec
from activities.rollouts.activities import RolloutActivities
from activities.storage import keys, series
from activities.storage.batch import decode_batch
from activities.training.tokenizer import IM_END, vocabulary
from configs.run import RunConfig
from tests.e2e.policies import random_policy

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

RUN = "e2e"


def _make_policy(folder: Path) -> None:
    model, tokenizer = random_policy(0, 256)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@dataclass
class Engine:
    """A running vLLM, its own process group."""

    url: str
    model: str
    process: subprocess.Popen[bytes]

    def target(self) -> EngineTarget:
        return EngineTarget(index=0, epoch=0, url=self.url, model=self.model, version=0)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _start_engine(ctx: WorkerContext) -> Engine:
    weights = ctx.store.require(keys.weights(RUN, 0))
    host = HostInput(run_id=RUN, role="engine", index=0, queue="q", weights=weights)
    spec = asyncio.run(engine_spec(ctx, host, 0))
    log = ctx.home / "engine.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            spec.argv,
            cwd=spec.cwd,
            env={**os.environ, **spec.env},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    engine = Engine(spec.address, spec.model, process)
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        if asyncio.run(spec.probe()):
            return engine
        time.sleep(0.5)
    engine.kill()
    raise AssertionError(log.read_text()[-5000:])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def ctx(home: Path) -> WorkerContext:
    """A worker's context whose store holds the run's config and version 0."""
    policy = home / "policy"
    _make_policy(policy)
    config = RunConfig.model_validate(
        {
            "max_steps": 1,
            "train": {
                "env": [{"id": "reverse-text"}, {"id": "reverse-retry"}],
                "batch_size": 16,
                "sampling": {"max_tokens": 90},
            },
            "eval": {"env": [{"id": "reverse-text"}], "sampling": {"max_tokens": 90}},
            "trainer": {"seq_len": 256},
            # A random policy's groups may be all alike, and every row is looked at here.
            "filters": {"post_batch": []},
        }
    )
    ctx = WorkerContext(home=home, store_url=str(home / "store"), own_queue="q")
    ctx.store.put_json(keys.config(RUN), config.model_dump(mode="json"))
    ctx.store.put_folder(keys.weights(RUN, 0), policy, attempt="made")
    return ctx


@pytest.fixture(scope="module")
def engine(ctx: WorkerContext) -> Iterator[Engine]:
    engine = _start_engine(ctx)
    post = httpx.post(f"{engine.url}/update_weight_version", json={"new_version": "0.7"})
    post.raise_for_status()
    yield engine
    engine.kill()


@dataclass
class EnvServer:
    """A running env server, its own process group."""

    address: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


async def _start_env(ctx: WorkerContext, name: str) -> EnvServer:
    host = HostInput(run_id=RUN, role="env", index=0, queue="q", name=name)
    spec = await env_spec(ctx, host, 1)
    process = subprocess.Popen(
        spec.argv, cwd=spec.cwd, env={**os.environ, **spec.env}, start_new_session=True
    )
    async with asyncio.timeout(spec.start_timeout_s):
        while not await spec.probe():
            assert process.poll() is None
            await asyncio.sleep(0.3)
    return EnvServer(spec.address, process)


@pytest.fixture
async def text_env(ctx: WorkerContext) -> AsyncIterator[EnvServer]:
    server = await _start_env(ctx, "reverse-text")
    yield server
    server.kill()


@pytest.fixture
async def retry_env(ctx: WorkerContext) -> AsyncIterator[EnvServer]:
    server = await _start_env(ctx, "reverse-retry")
    yield server
    server.kill()


def _work(group: str, env: str, size: int = 8, kind: Kind = "train", example: int = 3) -> GroupWork:
    return GroupWork(group=group, kind=kind, env=env, example=example, size=size)


def _documents(ctx: WorkerContext, work: GroupWork) -> list[dict[str, Any]]:
    refs = [ctx.store.committed(keys.rollout(RUN, work.group, i)) for i in range(work.size)]
    return [ctx.store.get_json(ref) for ref in refs if ref is not None]


def _check_samples(document: dict[str, Any]) -> None:
    for sample in document["samples"]:
        length = len(sample["token_ids"])
        assert length == len(sample["loss_mask"]) == len(sample["logprobs"])
        columns = (sample["loss_mask"], sample["logprobs"], sample["versions"])
        for sampled, logprob, version in zip(*columns, strict=True):
            assert (logprob < 0 and version == 0) if sampled else (logprob == 0 and version == -1)


async def test_single_turn_group_to_batch(
    ctx: WorkerContext, engine: Engine, text_env: EnvServer
) -> None:
    rooms, run = RolloutActivities(ctx), ActivityEnvironment().run
    work = _work("train/0", "reverse-text")
    given = RunRolloutsInput(RUN, work, engine.target(), text_env.address)
    started = time.monotonic()
    result = await run(rooms.run_rollouts, given)
    first = time.monotonic() - started
    assert (result.ok, result.errored) == (8, 0)
    documents = _documents(ctx, work)
    replies = set()
    for document in documents:
        _check_samples(document)
        (sample,) = document["samples"]
        assert document["labels"] == ["0.7"]
        assert document["turns"] == 1
        reply = [t for t, on in zip(sample["token_ids"], sample["loss_mask"], strict=True) if on]
        assert document["truncated"] == (reply[-1] != vocabulary()[IM_END])
        assert document["sampled_tokens"] == len(reply)
        replies.add(tuple(reply))
        # Full precision survives: rounded values would all have few digits.
        assert any(value != round(value, 5) for value in sample["logprobs"])
    assert len(replies) == 8, "members of a group must differ"

    started = time.monotonic()
    again = await run(rooms.run_rollouts, given)
    assert again == result, "a retry adopts what was committed"
    print(f"first group {first:.1f} s, adopted in {time.monotonic() - started:.2f} s")

    group: GroupResult = await run(rooms.finalize_group, FinalizeGroupInput(RUN, work, 0))
    assert (group.survivors, group.samples, group.labels) == (8, 8, ["0.7"])
    assert group.version_start == 0
    assert group == await run(rooms.finalize_group, FinalizeGroupInput(RUN, work, 0, "late"))
    assert group.ref is not None
    digest = hashlib.sha256(group.ref.sha256.encode()).hexdigest()
    ship = ShipBatchInput(RUN, step=1, groups=[work.group], digest=digest)
    batch = await run(rooms.ship_batch, ship)
    assert batch.ref is not None
    rows = decode_batch(ctx.store.get(batch.ref))
    assert len(rows) == batch.samples == 8
    assert sum(row.advantages[-1] for row in rows) == pytest.approx(0, abs=1e-9)
    assert batch.metrics_ref is not None
    metrics = ctx.store.get_json(batch.metrics_ref)
    assert metrics["staleness/max"] == 0
    assert metrics["timing/all/overhead/min"] > 0
    assert metrics["train/agg/all/decode_len/max"] == max(d["sampled_tokens"] for d in documents)
    with pytest.raises(ApplicationError, match="not the ones"):
        await run(rooms.ship_batch, replace(ship, digest="0" * 64))
    live = ctx.store.live_keys(keys.live_records(RUN))
    assert live and ctx.store.read_live(live[0])["rollouts"] >= 8
    seen, _ = series.page(ctx.store, RUN, 0.0, 100)
    assert seen[-1]["worker_inflight"] == 0 and seen[-1]["tokens_per_s"] > 0

    eval_work = _work("eval/0-0/reverse-text/0", "reverse-text", 2, "eval", 0)
    await run(
        rooms.run_rollouts, RunRolloutsInput(RUN, eval_work, engine.target(), text_env.address)
    )
    await run(rooms.finalize_group, FinalizeGroupInput(RUN, eval_work, 0))
    record = await run(
        rooms.finalize_eval,
        FinalizeEvalInput(RUN, "0-0/reverse-text", "reverse-text", 0, 1, 2),
    )
    assert (record.rollouts, record.errored, record.versions) == (2, 0, (0, 0))


async def test_multi_turn_is_one_exact_sequence(
    ctx: WorkerContext, engine: Engine, retry_env: EnvServer
) -> None:
    from transformers import AutoTokenizer

    rooms, run = RolloutActivities(ctx), ActivityEnvironment().run
    work = _work("train/1", "reverse-retry", size=16)
    result = await run(
        rooms.run_rollouts, RunRolloutsInput(RUN, work, engine.target(), retry_env.address)
    )
    assert (result.ok, result.errored) == (16, 0)
    tokenizer = AutoTokenizer.from_pretrained(ctx.home / "policy")
    documents = _documents(ctx, work)
    assert any(document["turns"] == 2 for document in documents)
    for document in documents:
        _check_samples(document)
        assert document["branches"] == len(document["samples"]) == 1
        if document["turns"] == 2:
            (sample,) = document["samples"]
            text = tokenizer.decode(sample["token_ids"])
            first, hint = document["messages"][0], document["messages"][2]
            assert text.startswith(f"<|im_start|>user\n{first['content']}<|im_end|>\n")
            assert f"<|im_end|>\n<|im_start|>user\n{hint['content']}<|im_end|>\n" in text
            starts = sum(
                on and not before
                for before, on in zip(
                    [False, *sample["loss_mask"]], sample["loss_mask"], strict=False
                )
            )
            assert starts == 2


async def test_lost_env_server_is_noticed(
    ctx: WorkerContext, engine: Engine, text_env: EnvServer
) -> None:
    rooms, run = RolloutActivities(ctx), ActivityEnvironment().run
    work = _work("train/2", "reverse-text", size=8)
    given = RunRolloutsInput(RUN, work, engine.target(), text_env.address)
    await rooms.tasks.task(RUN, "train", "reverse-text", 0)
    running = asyncio.create_task(run(rooms.run_rollouts, given))
    await asyncio.sleep(1.0)
    text_env.kill()
    started = time.monotonic()
    with pytest.raises(ApplicationError) as caught:
        await running
    assert caught.value.type == names.ENV_LOST
    assert time.monotonic() - started < 8


async def test_cancel_ends_the_rollouts(
    ctx: WorkerContext, engine: Engine, text_env: EnvServer
) -> None:
    rooms = RolloutActivities(ctx)
    work = _work("train/3", "reverse-text", size=8)
    given = RunRolloutsInput(RUN, work, engine.target(), text_env.address)
    await rooms.tasks.task(RUN, "train", "reverse-text", 0)
    environment = ActivityEnvironment()
    running = asyncio.create_task(environment.run(rooms.run_rollouts, given))
    await asyncio.sleep(0.5)
    environment.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert rooms._gauges[RUN].inflight == 0


async def test_lost_engine_is_told_apart_and_not_stored(
    ctx: WorkerContext, engine: Engine, text_env: EnvServer
) -> None:
    rooms, run = RolloutActivities(ctx), ActivityEnvironment().run
    work = _work("train/4", "reverse-text", size=8)
    stale = replace(engine.target(), model="policy-before")
    given = RunRolloutsInput(RUN, work, stale, text_env.address)
    with pytest.raises(ApplicationError) as caught:
        await run(rooms.run_rollouts, given)
    assert caught.value.type == names.ENGINE_LOST, "a replaced engine does not know the model"

    engine.kill()
    given = RunRolloutsInput(RUN, work, engine.target(), text_env.address)
    started = time.monotonic()
    with pytest.raises(ApplicationError) as caught:
        await run(rooms.run_rollouts, given)
    assert caught.value.type == names.ENGINE_LOST
    assert time.monotonic() - started < 30
    assert _documents(ctx, work) == []
