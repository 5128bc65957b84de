"""The gate: an engine serves a version only after its log-probabilities match the trainer's.

The canary is a fixed token sequence exported with the weights, with the trainer's log-probability
of every token after the first. The engine scores the same tokens as a prompt; the largest
absolute difference must be within the tolerance.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.activities.contracts.weights import Verdict

CANARY_FILE = "canary.json"


@dataclass(frozen=True)
class Canary:
    """`logprobs[i]` is the trainer's log-probability (nats) of `token_ids[i + 1]`."""

    token_ids: list[int]
    logprobs: list[float]

    def request(self, model: str) -> dict[str, Any]:
        """Body of a generate request that makes the engine score the canary as a prompt."""
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


def read_canary(folder: Path) -> Canary:
    """The canary of exported weights. Raises ValueError if it has none or a malformed one."""
    path = folder / CANARY_FILE
    if not path.is_file():
        raise ValueError(f"{folder} has no {CANARY_FILE}: its engine cannot be verified")
    data = json.loads(path.read_text())
    canary = Canary(data["token_ids"], data["logprobs"])
    if len(canary.token_ids) < 2 or len(canary.logprobs) != len(canary.token_ids) - 1:
        raise ValueError(
            f"{path}: {len(canary.token_ids)} tokens need {len(canary.token_ids) - 1} "
            f"log-probabilities (at least one), got {len(canary.logprobs)}"
        )
    return canary


def engine_logprobs(canary: Canary, answer: dict[str, Any]) -> list[float]:
    """The engine's log-probabilities of `token_ids[1:]`, from its answer to `Canary.request`.

    Raises ValueError if the answer does not score every token.
    """
    scored = answer.get("prompt_logprobs") or []
    if len(scored) != len(canary.token_ids):
        raise ValueError(
            f"the engine scored {len(scored)} of {len(canary.token_ids)} canary tokens"
        )
    # The first entry is null: nothing comes before it.
    pairs = zip(scored[1:], canary.token_ids[1:], strict=True)
    return [entry[str(token)]["logprob"] for entry, token in pairs]


def compare(canary: Canary, engine: list[float], tolerance: float) -> Verdict:
    """The verdict at the token where they differ most; NaN and infinity count as most."""

    def distance(index: int) -> float:
        diff = abs(engine[index] - canary.logprobs[index])
        return math.inf if math.isnan(diff) else diff

    worst = max(range(len(engine)), key=distance)
    return Verdict(worst + 1, engine[worst], canary.logprobs[worst], tolerance)
