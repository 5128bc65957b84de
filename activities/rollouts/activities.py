"""Activities of the rollout room: run rollouts, score groups, sum up evals, ship batches.

Invariants: a finished rollout is committed before anything else happens to it, and adopted by
every later attempt; it survives a store that fails for up to a minute, and a lost env server. A
rollout that was ended by the engine, or by the env server's own end, is never committed. Every wait
for an env server is bounded: by the rollout's time-out, which counts execution, by the server's own
limit (LONGEST_WAIT_S more), and by the watch on the server.
"""

import asyncio
import contextlib
import functools
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
from temporalio import activity

from ratchet.activities.contracts import names
from ratchet.activities.contracts.rollouts import (
    PERMIT,
    BatchResult,
    EvalResult,
    FinalizeEvalInput,
    FinalizeGroupInput,
    GroupResult,
    LoadTasksInput,
    RunRolloutsInput,
    RunRolloutsResult,
    ShipBatchInput,
)
from ratchet.activities.contracts.training import label_of
from ratchet.activities.envs import failures, samples
from ratchet.activities.envs.client import ABORTED
from ratchet.activities.rollouts import chat, evaluations, frozen, groups, shipping
from ratchet.activities.rollouts.clock import EngineClock
from ratchet.activities.rollouts.connections import EnvConnection, EnvConnections
from ratchet.activities.rollouts.gauges import RunGauges
from ratchet.activities.rollouts.patience import patiently
from ratchet.activities.rollouts.policies import Policies
from ratchet.activities.rollouts.releases import Releases
from ratchet.activities.rollouts.tasks import TaskLibrary
from ratchet.activities.runtime.context import WorkerContext, attempt_token
from ratchet.activities.runtime.failing import final
from ratchet.activities.runtime.heartbeat import HEARTBEAT_S, heartbeats
from ratchet.activities.scoring import filters
from ratchet.activities.scoring.algorithms import CreditError
from ratchet.activities.scoring.check import AlgorithmLibrary
from ratchet.activities.scoring.references import ReferenceLost
from ratchet.activities.scoring.threads import aside
from ratchet.activities.storage import documents, keys
from ratchet.configs.algorithm import needs_task, teacher_of
from ratchet.configs.env import TrainEnvConfig
from ratchet.configs.filters import FilterConfig
from ratchet.configs.reference import FrozenModelConfig

ABORTED_S = 15.0
"""A server that is ending has ended within this time: its keeper allows less."""
SCORING_THREADS = 64
"""Threads for algorithms that may block, such as a user's; others wait in the event loop."""


class _EngineTrouble(Exception):
    """A rollout that the engine ended; it must not be stored."""


class RolloutActivities:
    """One per rollout worker process."""

    def __init__(self, ctx: WorkerContext, releases: Releases) -> None:
        self.ctx = ctx
        self.releases = releases
        self.tasks = TaskLibrary(ctx)
        self.policies = Policies(ctx)
        self.algorithms = AlgorithmLibrary(ctx, self.policies.load_render)
        self.connections = EnvConnections()
        self._layouts = frozen.Layouts()
        self._seats = frozen.Seats()
        self._labels = chat.Labels()
        self._scoring = ThreadPoolExecutor(SCORING_THREADS, thread_name_prefix="scoring")
        self._storing: set[asyncio.Task[Any]] = set()
        self._clocks: dict[str, EngineClock] = {}
        self._gauges: dict[str, RunGauges] = {}

    # -- rollouts ---------------------------------------------------------------------------

    @activity.defn(name=names.LOAD_TASKS)
    async def load_tasks(self, input: LoadTasksInput) -> None:
        """Loads the tasks of every env of the run. Raises as `TaskLibrary.task` does."""
        async with heartbeats():
            await self.tasks.load(input.run_id)

    @activity.defn(name=names.RUN_ROLLOUTS)
    async def run_rollouts(self, input: RunRolloutsInput) -> RunRolloutsResult:
        """Runs the rollouts of a group at once, committing each as it ends, and then finalizes the
        group if the input says so; likewise more groups beside it.

        Raises ApplicationError ENV_LOST when the env server is gone, as soon as completed rollouts
        are stored; ENGINE_LOST when the others have ended if the engine ended one; BAD_INPUT if the
        task does not exist or a frozen model refuses to sample. Errors of the environment and
        timeouts are results like any other. Raises StoreUnavailable if a rollout cannot be stored
        for PATIENCE_S, when the others have ended.
        """
        groups = input.of_each()
        rollouts = sum(len(one.indexes) for one in groups)
        with contextlib.ExitStack() as stack:
            ended = [stack.enter_context(self._releasing(one, rollouts)) for one in groups]
            runs = map(self._run_group, groups, ended)
            outcomes = await asyncio.gather(*runs, return_exceptions=True)
        results = []
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            results.append(outcome)
        return replace(results[0], more=[result.finalized for result in results[1:]])

    async def _run_group(
        self, input: RunRolloutsInput, ended: Callable[[int], object]
    ) -> RunRolloutsResult:
        work = input.work
        found = await asyncio.to_thread(self._adopt, input)
        missing = [index for index in input.indexes if index not in found]
        gauges = self._run_gauges(input)
        if missing:
            ended(len(found))
            async with self._beating(input, found, gauges):
                await self._run_missing(input, missing, found, gauges, ended)
        errored = sum(document["error"] is not None for document in found.values())
        sampled_tokens = sum(document["sampled_tokens"] for document in found.values())
        finalized = None
        if input.finalize_from is not None:
            adopted = len(missing) < len(found)
            finalized = await self._finalize_here(input, input.finalize_from, found, adopted)
        return RunRolloutsResult(
            work.group, len(found) - errored, errored, sampled_tokens, finalized
        )

    async def _finalize_here(
        self,
        input: RunRolloutsInput,
        version: int,
        found: dict[int, dict[str, Any]],
        adopted: bool,
    ) -> GroupResult | None:
        """Finalizes the group that was just rolled out, from the documents at hand; None if that
        fails: FINALIZE_GROUP then meets what is wrong and says so, since no rollout failed here.
        An earlier attempt finalized it only if rollouts of that one were `adopted`.
        """
        group = FinalizeGroupInput(input.run_id, input.work, version)
        rollouts = [found[index] for index in range(input.work.size)]
        try:
            return await self._finalize(group, rollouts, look=adopted)
        except Exception:
            activity.logger.warning("%s is finalized on its own", input.work.group, exc_info=True)
            return None

    def _releasing(
        self, input: RunRolloutsInput, rollouts: int
    ) -> AbstractContextManager[Callable[[int], object]]:
        """Yields a function that reports to Dispatch how many rollouts of the part have ended, one
        of the `rollouts` of this activity.
        """
        owner = activity.info().workflow_id
        assert owner is not None, "rollouts run for a workflow"
        key = f"{input.work.group}/{input.first}"
        waits = input.gauges.waiting_for == PERMIT
        return self.releases.part(owner, key, rollouts, waits=waits)

    def _adopt(self, input: RunRolloutsInput) -> dict[int, dict[str, Any]]:
        """Rollouts of the group that an earlier attempt committed."""
        store, run_id, group = self.ctx.store, input.run_id, input.work.group
        # One look at the folder: nearly always there is none.
        committed = set(store.committed_keys(keys.rollouts(run_id, group)))
        wanted = {index: keys.rollout(run_id, group, index) for index in input.indexes}
        return {
            index: documents.read(store, store.require(key))
            for index, key in wanted.items()
            if key in committed
        }

    async def _run_missing(
        self,
        input: RunRolloutsInput,
        missing: Sequence[int],
        found: dict[int, dict[str, Any]],
        gauges: RunGauges,
        ended: Callable[[int], object],
    ) -> None:
        work = input.work
        task = await self.tasks.task(input.run_id, work.kind, work.env, work.example)
        request = await self._request(input, task)
        async with self.connections.use(input.env_address) as connection:

            async def one(index: int) -> None:
                gauges.inflight += 1
                try:
                    found[index] = await self._one(input, connection, request, index)
                finally:
                    gauges.inflight -= 1
                gauges.finished(found[index]["sampled_tokens"])
                ended(len(found))

            running = [asyncio.create_task(one(index)) for index in missing]
            all_ended = asyncio.create_task(asyncio.wait(running))
            lost = asyncio.create_task(connection.lost.wait())
            try:
                await asyncio.wait({all_ended, lost}, return_when=asyncio.FIRST_COMPLETED)
                if not all_ended.done():
                    message = connection.reason
                    # A completed rollout needs no server any more, only to be stored.
                    for playing in set(running) - self._storing:
                        playing.cancel()
                    await asyncio.wait(running)
                    raise final(names.ENV_LOST, message)
                outcomes = [done.exception() for done in running]
            finally:
                for pending in (all_ended, lost, *running):
                    pending.cancel()
                await asyncio.gather(all_ended, lost, *running, return_exceptions=True)
        self._raise_first(outcomes)

    @staticmethod
    def _raise_first(outcomes: Sequence[BaseException | None]) -> None:
        """Raises the error of a group's rollouts, if any: bugs first, then errors of the engine."""
        failures = [outcome for outcome in outcomes if outcome is not None]
        for failure in failures:
            if not isinstance(failure, _EngineTrouble):
                raise failure
        if failures:
            message = f"{len(failures)} rollouts were ended by the engine: {failures[0]}"
            raise final(names.ENGINE_LOST, message)

    async def _request(self, input: RunRolloutsInput, task: dict[str, Any]) -> dict[str, Any]:
        """A request of the env client, the same for each rollout of a group."""
        config = self.ctx.config(input.run_id)
        work, engine = input.work, input.engine
        sampling = config.sampling(work.env, work.kind)
        played_by = config.sampler(work.env, work.kind)
        if played_by is not None:
            return frozen.request(played_by, sampling, task)
        if config.asks_by_chat(work.kind):
            return chat.request(engine, sampling, config.model.renderer_options, task)
        client = {
            "type": "train",
            "base_url": f"{engine.url.rstrip('/')}/v1",
            "api_key_var": "RATCHET_ENGINE_KEY",
            "renderer": await self.policies.renderer(input.run_id),
            "renderer_model_name": await self.policies.tokenizer(input.run_id),
        }
        # The salt keeps cached keys and values of one version from serving another.
        salt = {"cache_salt": str(engine.version)}
        wanted = sampling.request() | salt
        return {"client": client, "model": engine.model, "sampling": wanted, "task_data": task}

    async def _one(
        self,
        input: RunRolloutsInput,
        connection: EnvConnection,
        request: dict[str, Any],
        index: int,
    ) -> dict[str, Any]:
        """Runs and commits one rollout; returns the document that the store holds."""
        work = input.work
        config = self.ctx.config(input.run_id)
        played_by = config.sampler(work.env, work.kind)
        limit = config.env(work.env, work.kind).timeout_s
        before = None
        if played_by is None:
            before = await self._label(input)
            label = label_of(input.engine.model)
            reading = samples.Reading(before is not None, label, config.trainer.seq_len)
        else:
            await connection.client.import_episodes()
        try:
            async with self._executing(input.engine.url, played_by, limit) as url:
                if played_by is None:
                    rollout = await connection.client.play(request, reading)
                else:
                    episode = await connection.client.episode(frozen.at(request, url))
        except TimeoutError:
            text = failures.out_of_time(work.kind, work.env, limit)
            rollout = samples.failed("Timeout", text)
        except RuntimeError as error:
            # The env server's own refusal: task data it cannot read, or an abort.
            if str(error) == ABORTED:
                await self._require_alive(connection)
            rollout = samples.failed("EnvServer", str(error))
        else:
            if played_by is not None:
                rollout = await self._laid_out(input.run_id, episode)
            elif before is not None:
                after = await self._label(input)
                assert after is not None, "an engine's label is there before and after"
                rollout = samples.served_by(rollout, samples.Served(before, after))
        if played_by is not None and rollout.error is not None:
            if rollout.provider:
                self._seats.fail(url)
                failure = frozen.trouble(played_by, rollout.error, rollout.status)
                raise (
                    final(names.BAD_INPUT, failure) if isinstance(failure, CreditError) else failure
                )
            rollout = replace(rollout, error=frozen.shown(played_by, rollout.error))
        if rollout.provider:
            assert rollout.error is not None
            raise _EngineTrouble(f"{rollout.error['type']}: {rollout.error['message']}")
        document = {
            "group": work.group,
            "index": index,
            "kind": work.kind,
            "env": work.env,
            "example": work.example,
            "temperature": (
                frozen.TEMPERATURE if played_by else request["sampling"]["temperature"]
            ),
            "version": -1 if played_by else input.engine.version,
            "engine": {"index": input.engine.index, "epoch": input.engine.epoch},
            **samples.to_document(rollout),
        }
        return await self._stored(input.run_id, document)

    @asynccontextmanager
    async def _executing(
        self, engine: str, played_by: FrozenModelConfig | None, limit: float
    ) -> AsyncIterator[str]:
        """Raises TimeoutError once the block has executed for `limit` seconds. If a frozen model
        plays, waits for a slot there first and yields its URL; otherwise the clock of the policy's
        engine counts.
        """
        if played_by is None:
            async with self._clocks.setdefault(engine, EngineClock(engine)).limit(limit):
                yield ""
        else:
            async with self._seats.of(played_by) as url, asyncio.timeout(limit):
                yield url

    @staticmethod
    async def _require_alive(connection: EnvConnection) -> None:
        """Raises ENV_LOST if the server ends: before that it aborts its rollouts.

        A server that stays up has aborted this rollout only: its environment's code cancelled
        itself.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(connection.lost.wait(), ABORTED_S)
            raise final(names.ENV_LOST, connection.reason)

    async def _stored(self, run_id: str, document: dict[str, Any]) -> dict[str, Any]:
        """Commits a rollout and returns the document that the store holds; retries while the store
        fails, for a limited time.
        """
        task = asyncio.current_task()
        assert task is not None
        self._storing.add(task)
        try:
            commit = functools.partial(self._commit, run_id, document, attempt_token())
            return await patiently(commit)
        finally:
            self._storing.discard(task)

    async def _label(self, input: RunRolloutsInput) -> str | None:
        """The label of the engine's weights where a rollout's tokens do not carry it: that of the
        adapter which its requests name, if they name one.
        """
        if not self.ctx.config(input.run_id).asks_by_chat(input.work.kind):
            return None
        if label := label_of(input.engine.model):
            return label
        try:
            return await self._labels.read(input.engine.url)
        except httpx.HTTPError as error:
            text = f"it does not say which weights it has: {type(error).__name__}: {error}"
            raise _EngineTrouble(text) from error

    async def _laid_out(self, run_id: str, episode: Any) -> samples.Rollout:
        """The rollout of a frozen model's episode; its text is rendered in the policy's tokens."""
        layout = await self._layouts.layout(
            await self.policies.tokenizer(run_id), await self.policies.renderer(run_id)
        )
        return await asyncio.to_thread(
            samples.from_episode, episode, samples.Reading(), layout.samples
        )

    def _commit(self, run_id: str, document: dict[str, Any], attempt: str) -> dict[str, Any]:
        """Commits a rollout and returns the committed document, which may be another attempt's."""
        key = keys.rollout(run_id, document["group"], document["index"])
        ref = documents.put(self.ctx.store, key, document, attempt=attempt)
        return document if ref.attempt == attempt else documents.read(self.ctx.store, ref)

    # -- heartbeats and gauges --------------------------------------------------------------

    def _run_gauges(self, input: RunRolloutsInput) -> RunGauges:
        if input.run_id not in self._gauges:
            worker = f"{socket.gethostname()}-{os.getpid()}"
            self._gauges[input.run_id] = RunGauges(self.ctx.store, input.run_id, worker)
        gauges = self._gauges[input.run_id]
        gauges.hear(input.gauges)
        return gauges

    @asynccontextmanager
    async def _beating(
        self, input: RunRolloutsInput, found: dict[int, dict[str, Any]], gauges: RunGauges
    ) -> AsyncIterator[None]:
        """Heartbeats the number of rollouts done, and writes gauges, during the block."""

        async def beat() -> None:
            while True:
                # The server writes each to its database, and short groups need none.
                await asyncio.sleep(HEARTBEAT_S)
                activity.heartbeat({"done": len(found), "size": len(input.indexes)})

        async def write_gauges() -> None:
            while True:
                await gauges.write()
                await asyncio.sleep(HEARTBEAT_S)

        # Separate tasks, so that a slow store delays gauges and nothing else.
        tasks = [asyncio.create_task(beat()), asyncio.create_task(write_gauges())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await gauges.write(force=gauges.inflight == 0)

    # -- groups, evals, batches -------------------------------------------------------------

    @activity.defn(name=names.FINALIZE_GROUP)
    async def finalize_group(self, input: FinalizeGroupInput) -> GroupResult:
        """Scores a group and commits it; every later call returns the first commit.

        Raises ApplicationError BAD_INPUT if the env's algorithm can give it no credit, ENGINE_LOST
        if the algorithm needs the policy and `engine` no longer serves it, and ReferenceLost, which
        is retried, if a frozen model does not answer.
        """
        self.algorithms.references.bind()
        return await self._finalize(input)

    async def _finalize(
        self,
        input: FinalizeGroupInput,
        rollouts: Sequence[dict[str, Any] | None] | None = None,
        *,
        look: bool = True,
    ) -> GroupResult:
        """What `finalize_group` does, with the group's `rollouts` if they are at hand. Unless it is
        to `look`, nobody has committed the group.
        """
        async with heartbeats():
            judge = post_batch = task = None
            if input.work.kind == "train":
                slots = self.ctx.config(input.run_id).filters
                judge = await self._judge(input.run_id, slots.pre_batch)
                post_batch = await self._judge(input.run_id, slots.post_batch)
                task = await self._task_for_algorithm(input)
            key = keys.group(input.run_id, input.work.group)
            attempt = attempt_token()
            ref = await asyncio.to_thread(self.ctx.store.committed, key) if look else None
            if ref is None:
                began = time.monotonic()
                if rollouts is None:
                    rollouts = await asyncio.to_thread(self._rollouts_of, input)
                document = await self._score_group(input, rollouts, judge, post_batch, task)
                document["scoring_s"] = time.monotonic() - began
                ref = await asyncio.to_thread(
                    documents.put, self.ctx.store, key, document, attempt=attempt
                )
            # A document of this attempt is at hand already.
            if ref.attempt != attempt:
                document = await asyncio.to_thread(documents.read, self.ctx.store, ref)
            return groups.result(document, ref)

    async def _task_for_algorithm(self, input: FinalizeGroupInput) -> dict[str, Any] | None:
        """The group's task, if its algorithm needs it; else None."""
        work = input.work
        config = self.ctx.config(input.run_id).algorithm(work.env)
        if not needs_task(config):
            return None
        return await self.tasks.task(input.run_id, work.kind, work.env, work.example)

    async def _judge(self, run_id: str, slot: Sequence[FilterConfig]) -> groups.Judge:
        """A slot of filters, ready to judge rollouts."""
        needed = filters.needs_vocabulary(slot)
        vocab_size = await self.policies.vocab_size(run_id) if needed else None
        return functools.partial(filters.judge, slot, vocab_size=vocab_size)

    async def _score_group(
        self,
        input: FinalizeGroupInput,
        rollouts: Sequence[dict[str, Any] | None],
        judge: groups.Judge | None,
        post_batch: groups.Judge | None,
        task: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """The document of a group. Cancelling the caller cancels its requests, too."""
        work = input.work
        config = self.ctx.config(input.run_id)
        env = config.env(work.env, work.kind)
        algorithm = None
        if work.kind == "train":
            algorithm = await asyncio.to_thread(
                self.algorithms.algorithm, input.run_id, work.env, input.engine
            )
        score = functools.partial(
            groups.scored,
            work,
            rollouts,
            input.version,
            input.lost,
            algorithm,
            judge,
            post_batch=post_batch,
            require_full=isinstance(env, TrainEnvConfig) and env.require_full_group,
            state=input.algo_state,
            task=task,
        )
        # Groups that wait for a model need no thread: they may be many, and wait long.
        waits = work.kind == "train" and teacher_of(config.algorithm(work.env)) is not None
        try:
            return await (score() if waits else aside(self._scoring, score))
        except CreditError as error:
            raise final(names.BAD_INPUT, error) from error
        except ReferenceLost as error:
            if error.live:
                raise final(names.ENGINE_LOST, error) from error
            raise

    def _rollouts_of(self, input: FinalizeGroupInput) -> list[dict[str, Any] | None]:
        """A group's rollout documents [size], None where there is none."""
        store, work = self.ctx.store, input.work
        refs = [
            store.committed(keys.rollout(input.run_id, work.group, index))
            for index in range(work.size)
        ]
        return [None if found is None else documents.read(store, found) for found in refs]

    @activity.defn(name=names.FINALIZE_EVAL)
    async def finalize_eval(self, input: FinalizeEvalInput) -> EvalResult:
        """Sums up an eval epoch from its finalized groups and commits the record."""
        async with heartbeats():
            work = functools.partial(evaluations.finalize, self.ctx.store, input)
            return await asyncio.to_thread(work, attempt=attempt_token())

    @activity.defn(name=names.SHIP_BATCH)
    async def ship_batch(self, input: ShipBatchInput) -> BatchResult:
        """Writes the batch file of a step, without the rollouts that post-batch filters remove.

        If nothing is left, no file is written and the result has no reference. The metrics are
        stored in either case.

        Raises ApplicationError (not retryable) if the store's groups are not those of `digest`.
        """
        async with heartbeats():
            slot = self.ctx.config(input.run_id).filters.post_batch
            judge = await self._judge(input.run_id, slot)
            write = functools.partial(
                shipping.ship,
                self.ctx.store,
                input,
                judge,
                self.ctx.config(input.run_id).filters,
                attempt=attempt_token(),
            )
            return await asyncio.to_thread(write)
