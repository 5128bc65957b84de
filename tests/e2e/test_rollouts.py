"""The rollout room against a real engine and real env servers, on a small random policy."""

import asyncio
import hashlib
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import psutil
import pytest
import pytest_asyncio
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from ratchet.activities.contracts import names
from ratchet.activities.contracts.hosting import HostInput
from ratchet.activities.contracts.rollouts import (
    EngineTarget,
    FinalizeEvalInput,
    FinalizeGroupInput,
    GroupResult,
    GroupWork,
    Kind,
    RunRolloutsInput,
    ShipBatchInput,
)
from ratchet.activities.envs.host import env_spec
from ratchet.activities.hosting import keeper, reaper
from ratchet.activities.rollouts.activities import RolloutActivities
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.storage import keys, series
from ratchet.activities.storage.batch import decode_batch
from ratchet.activities.storage.documents import read
from ratchet.activities.training.tokenizer import IM_END, vocabulary
from ratchet.configs.run import RunConfig
from tests.e2e.engines import SEQ_LEN, Policy, Served
from tests.groups import rollout_activities

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="session"),
]

RUN = "e2e"
PUSH = 7
LABEL = f"0.{PUSH}a"
STOPS = ("Q", "Z")
"""Tokens of their own, and no part of a special token's name."""
WITHIN_S = 90.0
"""How long anything may take that must happen: only a machine that stands still takes longer."""


@pytest.fixture(scope="module")
def ctx(served: Served, tmp_path_factory: pytest.TempPathFactory) -> WorkerContext:
    """A worker's context; its store, the engine's, holds the run's config and version 0."""
    home = tmp_path_factory.mktemp("home")
    config = RunConfig.model_validate(
        {
            "max_steps": 1,
            "train": {
                "env": [
                    {"id": "reverse-text"},
                    {"id": "reverse-retry", "sampling": {"max_tokens": 90, "stop": list(STOPS)}},
                ],
                "batch_size": 16,
                "sampling": {"max_tokens": 90},
            },
            "eval": {
                "env": [
                    {"id": "reverse-text"},
                    {"id": "reverse-retry", "sampling": {"max_tokens": 90, "stop": list(STOPS)}},
                ],
                "sampling": {"max_tokens": 90, "top_k": 1},
            },
            "trainer": {"seq_len": SEQ_LEN},
            # A random policy's groups may be all alike, and every row is looked at here.
            "filters": {"post_batch": []},
        }
    )
    ctx = WorkerContext(home=home, store_url=str(served.ctx.home / "store"), own_queue="q")
    ctx.store.put_json(keys.config(RUN), config.model_dump(mode="json"))
    Policy(0, initializer_range=0.02).export(ctx, 0, run=RUN)
    return ctx


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def target(ctx: WorkerContext, served: Served) -> EngineTarget:
    """The engine, verified at version 0."""
    result = await served.sync(0, ctx.store.require(keys.weights(RUN, 0)), PUSH)
    assert result.label == LABEL
    return EngineTarget(0, 1, served.spec.address, served.spec.model, version=0)


@pytest.fixture(scope="module")
def rooms(ctx: WorkerContext) -> RolloutActivities:
    """A rollout worker's room."""
    return rollout_activities(ctx)


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


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def text_env(ctx: WorkerContext) -> AsyncIterator[EnvServer]:
    server = await _start_env(ctx, "reverse-text")
    yield server
    server.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def retry_env(ctx: WorkerContext) -> AsyncIterator[EnvServer]:
    server = await _start_env(ctx, "reverse-retry")
    yield server
    server.kill()


def _work(group: str, env: str, size: int = 8, kind: Kind = "train", example: int = 3) -> GroupWork:
    return GroupWork(group=group, kind=kind, env=env, example=example, size=size)


def _documents(ctx: WorkerContext, work: GroupWork) -> list[dict[str, Any]]:
    refs = [ctx.store.committed(keys.rollout(RUN, work.group, i)) for i in range(work.size)]
    return [read(ctx.store, ref) for ref in refs if ref is not None]


def _check_samples(document: dict[str, Any]) -> None:
    for sample in document["samples"]:
        length = len(sample["token_ids"])
        assert length == len(sample["loss_mask"]) == len(sample["logprobs"])
        columns = (sample["loss_mask"], sample["logprobs"], sample["versions"])
        for sampled, logprob, version in zip(*columns, strict=True):
            assert (logprob < 0 and version == 0) if sampled else (logprob == 0 and version == -1)


async def _in_flight(rooms: RolloutActivities) -> None:
    """Waits until rollouts execute."""
    async with asyncio.timeout(WITHIN_S):
        while RUN not in rooms._gauges or not rooms._gauges[RUN].inflight:
            await asyncio.sleep(0.02)


async def test_single_turn_group_to_batch(
    ctx: WorkerContext, rooms: RolloutActivities, target: EngineTarget, text_env: EnvServer
) -> None:
    run = ActivityEnvironment().run
    work = _work("train/0", "reverse-text")
    given = RunRolloutsInput(RUN, work, target, text_env.address)
    started = time.monotonic()
    result = await run(rooms.run_rollouts, given)
    first = time.monotonic() - started
    assert (result.ok, result.errored) == (8, 0)
    documents = _documents(ctx, work)
    replies = set()
    for document in documents:
        _check_samples(document)
        (sample,) = document["samples"]
        assert document["labels"] == [LABEL]
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
    assert (group.survivors, group.samples, group.labels) == (8, 8, [LABEL])
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

    eval_work, more = (
        _work(f"eval/0-0/reverse-text/{n}", "reverse-text", 2, "eval", n) for n in range(2)
    )
    given = RunRolloutsInput(RUN, eval_work, target, text_env.address, finalize_from=0, more=[more])
    result = await run(rooms.run_rollouts, given)
    groups = [eval_work.group, more.group]
    assert [group.group for group in (result.finalized, *result.more)] == groups
    assert await run(rooms.run_rollouts, given) == result, "a retry adopts both"
    record = await run(
        rooms.finalize_eval,
        FinalizeEvalInput(RUN, "0-0/reverse-text", "reverse-text", 0, 2, 2),
    )
    assert (record.rollouts, record.errored, record.versions) == (4, 0, (0, 0))
    one, other = (document["samples"][0] for document in _documents(ctx, eval_work))
    assert one["token_ids"] == other["token_ids"], "only the likeliest token is ever sampled"
    assert set(one["logprobs"]) == {0.0}, "which is certain in the distribution really sampled"
    for document in _documents(ctx, eval_work):
        (sample,) = document["samples"]
        assert (document["labels"], document["mixed"]) == ([LABEL], False)
        assert {v for v, on in zip(sample["versions"], sample["loss_mask"], strict=True) if on} == {
            0
        }
        assert document["sampled_tokens"] == sum(sample["loss_mask"]) > 0


async def test_an_eval_of_many_turns_goes_through_chat_and_says_so_when_weights_changed(
    ctx: WorkerContext,
    rooms: RolloutActivities,
    served: Served,
    target: EngineTarget,
    retry_env: EnvServer,
) -> None:
    run = ActivityEnvironment().run
    work = _work("eval/0-1/reverse-retry/0", "reverse-retry", 16, "eval", 0)
    playing = asyncio.create_task(
        run(rooms.run_rollouts, RunRolloutsInput(RUN, work, target, retry_env.address))
    )
    await _in_flight(rooms)
    await served.sync(0, ctx.store.require(keys.weights(RUN, 0)), PUSH + 1)
    result = await playing
    assert (result.ok, result.errored) == (16, 0)
    documents = _documents(ctx, work)
    for document in documents:
        labels = {LABEL, f"0.{PUSH + 1}a"}
        assert set(document["labels"]) <= labels
        assert document["mixed"] == (len(document["labels"]) == 2)
        versions = {v for sample in document["samples"] for v in sample["versions"]}
        assert (0 in versions) != document["mixed"]
        said = [m.get("content") or "" for m in document["messages"] if m["role"] == "assistant"]
        assert not any(stop in text for text in said for stop in STOPS), "as users are answered"
    assert any(document["turns"] == 2 for document in documents)
    assert any(document["mixed"] for document in documents)
    await run(rooms.finalize_group, FinalizeGroupInput(RUN, work, 0))
    asked = FinalizeEvalInput(RUN, "0-1/reverse-retry", "reverse-retry", 0, 1, 16)
    record = await run(rooms.finalize_eval, asked)
    assert record.versions == (0, 0)
    ref = ctx.store.require(keys.eval_record(RUN, "0-1/reverse-retry"))
    assert ctx.store.get_json(ref)["mixed"] == sum(d["mixed"] for d in documents)
    await served.sync(0, ctx.store.require(keys.weights(RUN, 0)), PUSH)


async def test_multi_turn_is_one_exact_sequence(
    ctx: WorkerContext, rooms: RolloutActivities, target: EngineTarget, retry_env: EnvServer
) -> None:
    from transformers import AutoTokenizer

    run = ActivityEnvironment().run
    work = _work("train/1", "reverse-retry", size=16)
    result = await run(rooms.run_rollouts, RunRolloutsInput(RUN, work, target, retry_env.address))
    assert (result.ok, result.errored) == (16, 0)
    tokenizer = AutoTokenizer.from_pretrained(
        ctx.store.fetch_folder(ctx.store.require(keys.weights(RUN, 0)))
    )
    documents = _documents(ctx, work)
    assert any(document["turns"] == 2 for document in documents)
    first_ends = set()
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
            first_ends.add(_first_end(sample))
        _check_last_reply(document)
    # A reply that a stop string ended is a finished one: there is another turn.
    assert first_ends & set(STOPS)


def _first_end(sample: dict[str, Any]) -> str:
    """What ended the first of two replies; its turn is closed before the next message."""
    mask, ids = sample["loss_mask"], sample["token_ids"]
    end = mask.index(False, mask.index(True))
    names = {vocabulary()[token]: token for token in (IM_END, *STOPS)}
    last = names[ids[end - 1]]
    if last != IM_END:
        assert ids[end] == vocabulary()[IM_END], "an end that was not sampled does not train"
    return last


def _check_last_reply(document: dict[str, Any]) -> None:
    """Its text has the stop string that ended it, its tokens nothing beyond."""
    last = document["samples"][0]["token_ids"][-1]
    stops = [vocabulary()[stop] for stop in STOPS]
    assert document["truncated"] == (last not in (vocabulary()[IM_END], *stops))
    text = document["messages"][-1].get("content") or ""
    assert not set(STOPS) & set(text[:-1])
    assert text.endswith(STOPS) == (last in stops)


async def test_cancel_ends_the_rollouts(
    ctx: WorkerContext, rooms: RolloutActivities, target: EngineTarget, text_env: EnvServer
) -> None:
    work = _work("train/3", "reverse-text", size=8)
    given = RunRolloutsInput(RUN, work, target, text_env.address)
    await rooms.tasks.task(RUN, "train", "reverse-text", 0)
    environment = ActivityEnvironment()
    running = asyncio.create_task(environment.run(rooms.run_rollouts, given))
    await _in_flight(rooms)
    environment.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert rooms._gauges[RUN].inflight == 0


async def test_lost_env_server_is_noticed(
    ctx: WorkerContext, rooms: RolloutActivities, target: EngineTarget, text_env: EnvServer
) -> None:
    run = ActivityEnvironment().run
    work = _work("train/2", "reverse-text", size=8)
    given = RunRolloutsInput(RUN, work, target, text_env.address)
    await rooms.tasks.task(RUN, "train", "reverse-text", 0)
    running = asyncio.create_task(run(rooms.run_rollouts, given))
    await _in_flight(rooms)
    text_env.kill()
    # At once, and not as one that is silent for long.
    with pytest.raises(ApplicationError, match="nothing listens there any more") as caught:
        async with asyncio.timeout(WITHIN_S):
            await running
    assert caught.value.type == names.ENV_LOST


async def test_engine_under_another_name_is_lost(
    rooms: RolloutActivities, target: EngineTarget, retry_env: EnvServer
) -> None:
    stale = replace(target, model="policy-before")
    given = RunRolloutsInput(RUN, _work("train/4", "reverse-retry"), stale, retry_env.address)
    with pytest.raises(ApplicationError) as caught:
        await ActivityEnvironment().run(rooms.run_rollouts, given)
    assert caught.value.type == names.ENGINE_LOST, "a replaced engine does not know the model"


async def test_killed_engine_leaves_no_process(served: Served, target: EngineTarget) -> None:
    (record,) = reaper.records(served.ctx.home)
    table = keeper.process_table()
    family = [psutil.Process(pid) for pid in keeper.descendants(record.keeper[0], table)]
    assert len(family) >= 2
    print("engine memory", sum(p.memory_info().rss for p in family) >> 20, "MiB")
    os.kill(served.process.pid, signal.SIGKILL)
    async with asyncio.timeout(WITHIN_S):
        await served.process.exited.wait()
    assert not any(process.is_running() for process in family)
    with pytest.raises(ApplicationError) as error:
        await served.sync(0, served.weights, PUSH + 1)
    assert error.value.type == names.ENGINE_LOST


async def test_killed_engine_is_lost_and_nothing_is_stored(
    ctx: WorkerContext,
    rooms: RolloutActivities,
    served: Served,
    target: EngineTarget,
    retry_env: EnvServer,
) -> None:
    assert served.process.exited.is_set(), "the test before killed it"
    work = _work("train/5", "reverse-retry")
    given = RunRolloutsInput(RUN, work, target, retry_env.address)
    with pytest.raises(ApplicationError) as caught:
        async with asyncio.timeout(WITHIN_S):
            await ActivityEnvironment().run(rooms.run_rollouts, given)
    assert caught.value.type == names.ENGINE_LOST
    assert _documents(ctx, work) == []
