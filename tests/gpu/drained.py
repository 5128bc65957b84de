"""An engine that says no version of its tokens: it is drained before each push.

Invariant: weights are pushed only while no request is open, and a request is opened only after a
gate has passed. So everything in a reply is of the version that was verified last, which the engine
itself does not say.
"""

import asyncio
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.weights import Tolerance
from ratchet.activities.hosting.spec import ServerSpec
from ratchet.activities.inference import gate
from ratchet.activities.inference.load import parse_load
from ratchet.activities.inference.store_transfer import StoreTransfer
from ratchet.activities.storage.keys import CANARY_FILE
from ratchet.activities.storage.store import ArtifactStore
from ratchet.configs.run import RunConfig


@dataclass(frozen=True)
class Reply:
    """What an engine sampled of a prompt, and the version that it is of."""

    version: int
    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Push:
    """The gate's verdict on a version, and seconds: in which nothing is sampled, of them those that
    weights load, and of the gate.
    """

    version: int
    passed: bool
    difference: float
    mean: float
    compared: int
    unverified: str
    wrong: list[str]
    pause_s: float
    push_s: float
    gate_s: float


@dataclass
class Drained:
    """The engine of `spec`. `version`: of what it samples; None until a gate has passed."""

    client: httpx.AsyncClient
    spec: ServerSpec
    store: ArtifactStore
    tolerance: Tolerance
    version: int | None = None
    pushes: list[Push] = field(default_factory=list)

    @property
    def model(self) -> str:
        """Its served name."""
        return self.spec.model

    @property
    def url(self) -> str:
        """Its address."""
        return self.spec.address

    async def post(self, path: str, **body: Any) -> Any:
        """The answer's JSON; None if it is none."""
        answer = (await self.client.post(path, **body)).raise_for_status()
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        return answer.json() if is_json else None

    async def drain(self) -> None:
        """Waits until no request is open."""
        while True:
            text = (await self.client.get("/metrics")).raise_for_status().text
            load = parse_load(text, index=0, epoch=1, max_model_len=0)
            if load.running + load.waiting == 0:
                return
            await asyncio.sleep(0.02)

    async def push(self, version: int, weights: ArtifactRef) -> Push:
        """Drains it, loads `weights` and runs the gate."""
        transfer = StoreTransfer(self.store)
        fetched = transfer.receive(weights)
        self.version = None
        await self.drain()
        began = time.monotonic()
        # In this mode the keys and values that it has cached are forgotten, too.
        await self.post("/pause", params={"mode": "wait", "clear_cache": "true"})
        loading = time.monotonic()
        await transfer.push(self, fetched)
        loaded = time.monotonic()
        await self.post("/resume")
        resumed = time.monotonic()
        verdict = await transfer.verify(self, fetched, self.tolerance)
        push = Push(
            version=version,
            passed=verdict.passed,
            difference=verdict.diff,
            mean=verdict.mean,
            compared=verdict.bits.compared,
            unverified=verdict.bits.unverified,
            wrong=verdict.bits.wrong[:3],
            pause_s=resumed - began,
            push_s=loaded - loading,
            gate_s=time.monotonic() - resumed,
        )
        self.pushes.append(push)
        if push.passed:
            self.version = version
        return push

    async def sample(self, prompt: list[int], tokens: int, seed: int) -> Reply:
        """One reply; its version is the one that was verified last."""
        version = self.version
        assert version is not None, "no gate has passed since the last push"
        sampling = {"max_tokens": tokens, "temperature": 1.0, "logprobs": 0, "seed": seed}
        body = {
            "model": self.model,
            "token_ids": prompt,
            "sampling_params": {**sampling, "ignore_eos": True},
        }
        answer = await self.post("/inference/v1/generate", json=body)
        assert version == self.version, "weights were pushed while a request was open"
        (choice,) = answer["choices"]
        entries = choice["logprobs"]["content"]
        return Reply(version, choice["token_ids"], [float(entry["logprob"]) for entry in entries])

    def report(self) -> list[dict[str, Any]]:
        """All pushes so far."""
        return [asdict(push) for push in self.pushes]


def measured(store: ArtifactStore, first: ArtifactRef, run: RunConfig) -> Tolerance:
    """The gate's tolerance, from the noise measured on version 0."""
    canary = gate.parse_canary(store.read_file(first, CANARY_FILE), first.key)
    tolerance = gate.measured_tolerance(run, canary.noise)
    assert tolerance is not None, "version 0 is exported with its noise"
    return tolerance
