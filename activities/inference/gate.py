"""The gate: an engine serves a version only after two tests of it.

The first compares bits: what the engine holds, tensor by tensor and rank by rank, with what the
trainer exported (`bits.py`). The second covers what bits do not show (positions, caches, the order
of layers), and weights that cannot be compared: the engine scores the canary, fixed token sequences
exported with the weights, and its log-probabilities may differ from the trainer's by no more than a
tolerance.

The tolerance comes from the config, for any token, or is KERNELS times the noise of the model's own
kernels, at least EXACT. That noise is the difference of log-probabilities between the model in
float32 and in a dtype that trainer or engine compute in, with another attention implementation; it
is measured once, on version 0, whose canary records it. In float32 the largest difference counts.
In bfloat16 the largest one is random, and grows while a policy trains (3.1 times that of version 0
after 15 steps of SmolLM2 at 2e-5), so the mean counts (1.4 times; layers in a wrong order: 12
times; a wrong base of the rotary embedding: 4.7 times).
"""

import asyncio
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from temporalio.exceptions import ApplicationError

from ratchet.activities.contracts.upgrades import CANARY
from ratchet.activities.contracts.weights import Bits, Engine, Tolerance, Verdict
from ratchet.activities.inference import bits
from ratchet.activities.inference.fingerprints import Fingerprints, read
from ratchet.activities.storage.keys import CANARY_FILE
from ratchet.configs.run import RunConfig

KERNELS = {"float32": 20.0, "bfloat16": 3.0}
"""By how much more kernels of engine and trainer may differ than two attention implementations of
the trainer. In float32 the sums of every layer matter, not only those of attention: a factor of 5.6
was observed (SmolLM2 on a CPU); in bfloat16 rounding hides that.
"""
EXACT = 1e-4
"""Nats. Kernels that compute in float32 stay below it."""
AT_ONCE = {"float32": 2, "bfloat16": 6}
"""Sequences scored together, by the engine's dtype. An engine scores them in one step, and other
rollouts get no token before it ends: on a CPU, six in float32 would be a long one.
"""


@dataclass(frozen=True)
class Sequence:
    """`logprobs[i]` is the trainer's log-probability (nats) of `token_ids[i + 1]`."""

    token_ids: list[int]
    logprobs: list[float]

    def request(self, model: str) -> dict[str, Any]:
        """Body of a generate request that makes the engine score the sequence as a prompt."""
        return {
            "model": model,
            "token_ids": self.token_ids,
            "sampling_params": {
                "max_tokens": 1,
                "temperature": 1.0,
                "top_p": 1.0,
                "prompt_logprobs": 0,
            },
        }


@dataclass(frozen=True)
class Noise:
    """Differences of log-probabilities caused by kernels alone, in nats."""

    largest: float
    mean: float


@dataclass(frozen=True)
class Canary:
    """Sequences, and the noise of kernels by the dtype of an engine."""

    sequences: list[Sequence]
    noise: dict[str, Noise]


@dataclass(frozen=True)
class Expected:
    """What an engine is compared with. None: weights from a build that took no fingerprints."""

    canary: Canary
    fingerprints: Fingerprints | None


def parse_canary(text: str | bytes, where: str) -> Canary:
    """A canary from JSON; raises ValueError for a malformed one, NewerSchema."""
    data = CANARY.upgraded(json.loads(text), where)
    sequences = [Sequence(s["token_ids"], s["logprobs"]) for s in data["sequences"]]
    for sequence in sequences:
        length = len(sequence.token_ids)
        if length < 2 or len(sequence.logprobs) != length - 1:
            raise ValueError(
                f"{where}: {length} tokens need {length - 1} log-probabilities (at least one), "
                f"got {len(sequence.logprobs)}"
            )
    noise = {dtype: Noise(n["largest"], n["mean"]) for dtype, n in data["noise"].items()}
    return Canary(sequences, noise)


def read_expected(folder: Path) -> Expected:
    """The reference data of exported weights.

    Raises ValueError if they have no canary or a malformed one, NewerSchema.
    """
    path = folder / CANARY_FILE
    if not path.is_file():
        raise ValueError(f"{folder} has no {CANARY_FILE}: its engine cannot be verified")
    return Expected(parse_canary(path.read_text(), str(path)), read(folder))


def engine_logprobs(sequence: Sequence, answer: dict[str, Any]) -> list[float]:
    """The engine's log-probabilities of `token_ids[1:]`, from its answer to `request`.

    Raises ValueError if the answer does not score every token.
    """
    scored = answer.get("prompt_logprobs") or []
    if len(scored) != len(sequence.token_ids):
        raise ValueError(
            f"the engine scored {len(scored)} of {len(sequence.token_ids)} canary tokens"
        )
    # The first entry is null: nothing precedes it.
    pairs = zip(scored[1:], sequence.token_ids[1:], strict=True)
    return [entry[str(token)]["logprob"] for entry, token in pairs]


def compare(
    canary: Canary, engine: list[list[float]], tolerance: Tolerance, found: Bits
) -> Verdict:
    """The verdict at the token where they differ most; NaN and infinity count as most."""
    places = [
        (number, sequence.logprobs[index], engine[number][index], index)
        for number, sequence in enumerate(canary.sequences)
        for index in range(len(sequence.logprobs))
    ]

    def distance(place: tuple[int, float, float, int]) -> float:
        diff = abs(place[2] - place[1])
        return math.inf if math.isnan(diff) else diff

    number, trainer, answered, index = max(places, key=distance)
    before = sum(len(sequence.token_ids) for sequence in canary.sequences[:number])
    mean = sum(map(distance, places)) / len(places)
    return Verdict(before + index + 1, answered, trainer, mean, tolerance, found)


def measured_tolerance(config: RunConfig, noise: dict[str, Noise]) -> Tolerance | None:
    """The tolerance from the measurement on version 0; None if there is none."""
    exact = config.trainer.compute_dtype == config.inference.dtype == "float32"
    dtype = "float32" if exact else "bfloat16"
    if dtype not in noise:
        return None
    if exact:
        return Tolerance(largest=max(EXACT, KERNELS[dtype] * noise[dtype].largest))
    return Tolerance(mean=max(EXACT, KERNELS[dtype] * noise[dtype].mean))


async def verify(engine: Engine, expected: Expected, tolerance: Tolerance) -> Verdict:
    """Runs both tests. The engine keeps sampling; no request or call blocks it for long."""
    found, dtype = await _compare_bits(engine, expected.fingerprints)
    at_once = AT_ONCE.get(dtype, 1)

    async def scored(sequence: Sequence) -> list[float]:
        answer = await engine.post("/inference/v1/generate", json=sequence.request(engine.model))
        return engine_logprobs(sequence, answer)

    answers: list[list[float]] = []
    sequences = expected.canary.sequences
    for first in range(0, len(sequences), at_once):
        answers += await asyncio.gather(*map(scored, sequences[first : first + at_once]))
    return compare(expected.canary, answers, tolerance, found)


async def _compare_bits(engine: Engine, expected: Fingerprints | None) -> tuple[Bits, str]:
    """What differs, and the engine's dtype; '' if it does not say."""
    if expected is None:
        return Bits(unread={"": "these weights were exported without fingerprints"}), ""
    try:
        held = await bits.held(engine, expected.shapes)
    except ApplicationError as error:
        if bits.NO_READER not in error.message:
            raise
        return Bits(unread={"": f"the engine was started without {bits.METHOD}"}), ""
    return bits.compare(expected, held), held.dtype
