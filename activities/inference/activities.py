"""The activity that pushes new weights to an engine and verifies that it serves them.

Invariants:

- Every push has its own label, distinct over tries and attempts, so each sampled token shows which
  push it came from. Only the label in the result is verified.
- During a push, sampling in flight is frozen, not aborted, and its cached keys and values are
  recomputed with the new weights. A push under a name of its own touches no sampling at all.
- A push that fails leaves the engine running, under a label that is never accepted.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
from temporalio import activity
from temporalio.exceptions import ApplicationError

from ratchet.activities.contracts import names
from ratchet.activities.contracts.redact import writable
from ratchet.activities.contracts.training import (
    PUSH_TRIES,
    SyncInput,
    SyncResult,
    base_of,
    push_label,
)
from ratchet.activities.contracts.weights import Tolerance
from ratchet.activities.inference import gate
from ratchet.activities.inference.transfers import transfer_of
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.runtime.heartbeat import heartbeats
from ratchet.activities.runtime.tls import shared_context
from ratchet.activities.storage import keys
from ratchet.configs.run import RunConfig

REQUEST_LIMIT_S = 60.0
RESUME_LIMIT_S = 10.0
PUSH_FAILED = "PushFailed"


class InferenceActivities:
    """Pushes weights to engines."""

    def __init__(self, ctx: WorkerContext) -> None:
        self.ctx = ctx

    @activity.defn(name=names.SYNC_WEIGHTS)
    async def sync_weights(self, sync: SyncInput) -> SyncResult:
        """Pushes `sync.weights` to one engine and runs its gate; may be repeated at any time.

        Raises ApplicationError: ENGINE_LOST if the address no longer reaches the named engine;
        GATE_FAILED, with the refused labels as details, if the gate refuses every try
        (both never retried); otherwise retryable errors. Labels of earlier attempts count as
        refused, since it is unknown whether their canary passed.
        """
        async with heartbeats(), _lost_if_unreachable(sync):
            config = await asyncio.to_thread(self.ctx.config, sync.run_id)
            transfer = transfer_of(config, self.ctx.store)
            seconds: dict[str, float] = {}
            with _timed(seconds, "receive"):
                weights = await asyncio.to_thread(transfer.receive, sync.weights)
            tolerance = await asyncio.to_thread(self._tolerance, config, sync)
            first = (activity.info().attempt - 1) * PUSH_TRIES
            rejected = [push_label(sync.version, sync.push, n) for n in range(first)]
            limits = httpx.Timeout(REQUEST_LIMIT_S, connect=5.0)
            async with httpx.AsyncClient(
                base_url=sync.url, timeout=limits, verify=shared_context(), trust_env=False
            ) as client:
                model = base_of(sync.model)
                served = await _served(client, sync)
                for number in range(first, first + PUSH_TRIES):
                    label = push_label(sync.version, sync.push, number)
                    engine = _Engine(client, transfer.name(model, weights, label))
                    replaces = engine.model == model
                    with _timed(seconds, "pause") if replaces else contextlib.nullcontext():
                        async with _paused(engine, label) if replaces else contextlib.nullcontext():
                            with _timed(seconds, "load"):
                                await transfer.push(engine, weights)
                    with _timed(seconds, "verify"):
                        verdict = await transfer.verify(engine, weights, tolerance)
                    if verdict.passed:
                        if sync.oldest is not None:
                            await transfer.retire(engine, served, sync.oldest)
                        return SyncResult(
                            sync.version,
                            label,
                            verdict.diff,
                            rejected,
                            writable(verdict.bits.unverified),
                            "" if replaces else engine.model,
                            seconds,
                        )
                    activity.logger.warning("push %s refused: %s", label, verdict)
                    rejected.append(label)
        raise ApplicationError(
            f"engine {sync.engine_index} (epoch {sync.engine_epoch}) does not serve version "
            f"{sync.version} after {PUSH_TRIES} pushes; {verdict}",
            *rejected,
            type=names.GATE_FAILED,
            non_retryable=True,
        )

    def _tolerance(self, config: RunConfig, sync: SyncInput) -> Tolerance:
        """The tolerance from the noise measured on version 0, if the config sets none."""
        first = self.ctx.store.committed(keys.weights(sync.run_id, 0))
        if first is None or config.inference.gate_tolerance is not None:
            return Tolerance(sync.tolerance)
        canary = self.ctx.store.read_file(first, keys.CANARY_FILE)
        noise = gate.parse_canary(canary, f"{first.key}/{keys.CANARY_FILE}").noise
        return gate.measured_tolerance(config, noise) or Tolerance(sync.tolerance)


@contextlib.contextmanager
def _timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Adds what the block takes to a part's seconds."""
    began = time.monotonic()
    yield
    seconds[part] = seconds.get(part, 0.0) + time.monotonic() - began


def _lost(sync: SyncInput, why: str, *, final: bool = True) -> ApplicationError:
    return ApplicationError(
        f"engine {sync.engine_index} (epoch {sync.engine_epoch}) at {sync.url}: {why}",
        type=names.ENGINE_LOST,
        non_retryable=final,
    )


@contextlib.asynccontextmanager
async def _lost_if_unreachable(sync: SyncInput) -> AsyncIterator[None]:
    """Turns transport errors into ENGINE_LOST: final if nobody listens, else retryable."""
    try:
        yield
    except httpx.ConnectError:
        raise _lost(sync, "nobody listens there") from None
    except httpx.TransportError as error:
        raise _lost(sync, f"did not answer ({type(error).__name__})", final=False) from None


async def _served(client: httpx.AsyncClient, sync: SyncInput) -> list[str]:
    """The names that the engine serves; raises ENGINE_LOST if its own is not one of them."""
    answer = await client.get("/v1/models")
    if answer.is_client_error:
        raise _lost(sync, "something else answers at its address")
    served: list[str] = [model["id"] for model in _checked(answer)["data"]]
    if (own := base_of(sync.model)) not in served:
        raise _lost(sync, f"serves {', '.join(served)} instead of {own}")
    return served


def _checked(answer: httpx.Response) -> Any:
    """The answer's JSON, None if it is none; raises a retryable ApplicationError with the engine's
    message.
    """
    if answer.is_success:
        # An adapter that was loaded is announced in plain words.
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        return answer.json() if is_json else None
    raise ApplicationError(
        f"{answer.request.url.path}: HTTP {answer.status_code}: {answer.text[:500]}",
        type=PUSH_FAILED,
    )


class _Engine:
    """The control endpoints of an engine."""

    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self.model = model
        self._client = client

    @property
    def url(self) -> str:
        """Its address."""
        return str(self._client.base_url)

    async def post(self, path: str, **body: Any) -> Any:
        """The answer's JSON; None if it is none."""
        return _checked(await self._client.post(path, **body))


@contextlib.asynccontextmanager
async def _paused(engine: _Engine, label: str) -> AsyncIterator[None]:
    """The engine is paused in the block; what it samples afterwards carries `label`."""
    try:
        await engine.post("/pause", params={"mode": "keep", "clear_cache": "true"})
        # The label first: should the push fail half-way, what is sampled then is not mistaken for
        # the old version's.
        await engine.post("/update_weight_version", json={"new_version": label})
        yield
    finally:
        # Shielded: an engine left paused by a cancellation would never sample again.
        await asyncio.shield(asyncio.create_task(_resume(engine.url)))


async def _resume(url: str) -> None:
    async with httpx.AsyncClient(
        base_url=url, timeout=RESUME_LIMIT_S, verify=shared_context(), trust_env=False
    ) as client:
        _checked(await client.post("/resume"))
