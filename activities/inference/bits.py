"""Compares the bits that an engine holds with those that the trainer exported.

Invariants:

- A tensor counts as compared only if all of it was read, on every rank that holds some of it: the
  ranks together cover it, and what several of them hold is the same.
- What is not compared is named, with the reason.
- The engine samples between calls: each one blocks it for about SLICE_S.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ratchet.activities.contracts.weights import Bits, Engine
from ratchet.activities.inference.fingerprints import Fingerprints, hexed

METHOD = "held_fingerprints"
SLICE_S = 0.1
"""Duration of one reading call, in seconds."""
NO_READER = f"Method '{METHOD}' is not implemented"


@dataclass
class Share:
    """What one rank holds of a range of a tensor, as far as it was read."""

    count: int = 0
    sum: int = 0


@dataclass
class Held:
    """What an engine reported. `shares` are by tensor, range and rank."""

    dtype: str = ""
    shares: dict[str, dict[tuple[int, ...], dict[int, Share]]] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)

    def add(self, rank: int, answer: Mapping[str, Any]) -> None:
        """Adds the answer of one rank to one call."""
        self.dtype = answer["dtype"]
        self.unread |= answer["unread"]
        for name, span, count, fingerprint in answer["rows"]:
            ranks = self.shares.setdefault(name, {}).setdefault(tuple(span), {})
            share = ranks.setdefault(rank, Share())
            share.count += count
            share.sum += int(fingerprint, 16)


async def held(engine: Engine, shapes: Mapping[str, list[int]]) -> Held:
    """Reads what an engine holds of tensors of these shapes, between its steps."""
    result = Held()
    places: list[int | None] = []
    while not places or any(place is not None for place in places):
        # A finished rank gets a place behind its end.
        starts = [2**62 if place is None else place for place in places]
        kwargs = {"tensors": shapes, "starts": starts, "seconds": SLICE_S}
        answer = await engine.post("/collective_rpc", json={"method": METHOD, "kwargs": kwargs})
        for rank, part in enumerate(answer["results"]):
            result.add(rank, part)
        places = [part["next"] for part in answer["results"]]
    return result


def compare(expected: Fingerprints, engine: Held) -> Bits:
    """Mismatches of the engine's bits, and what could not be compared."""
    prints = expected.dtypes.get(engine.dtype)
    if prints is None:
        known = ", ".join(expected.dtypes)
        reason = f"the engine holds {engine.dtype}, but fingerprints are of {known}"
        return Bits(unread=dict.fromkeys(expected.shapes, reason))
    compared = 0
    wrong: list[str] = []
    unread: dict[str, str] = {}
    for name, shape in expected.shapes.items():
        shares = engine.shares.get(name, {})
        reason = engine.unread.get(name) or _gap(shape, shares)
        if reason:
            unread[name] = reason
            continue
        compared += 1
        wrong += list(_differences(name, prints[name], shares))
    return Bits(compared, wrong, unread)


def _gap(shape: Iterable[int], shares: Mapping[tuple[int, ...], Mapping[int, Share]]) -> str:
    """Why shares do not cover a whole tensor; '' if they do."""
    size, covered = math.prod(shape), 0
    for (row, row_end, column, column_end), ranks in shares.items():
        area = (row_end - row) * (column_end - column)
        if any(share.count != area for share in ranks.values()):
            return "the engine read only some of it"
        covered += area
    return "" if covered == size else f"the engine holds {covered} of its {size} numbers"


def _differences(
    name: str, wanted: str, shares: Mapping[tuple[int, ...], Mapping[int, Share]]
) -> Iterable[str]:
    whole = 0
    for (row, row_end, column, column_end), ranks in shares.items():
        by_print: dict[str, list[int]] = {}
        for rank, share in ranks.items():
            by_print.setdefault(hexed(share.sum), []).append(rank)
        if len(by_print) > 1:
            yield (
                f"{name}, rows {row}-{row_end}, columns {column}-{column_end}: ranks differ, "
                + "; ".join(f"{ranks} hold {print_}" for print_, ranks in by_print.items())
            )
        whole += next(iter(ranks.values())).sum
    if hexed(whole) != wanted:
        holders = ", ".join(map(str, sorted({rank for ranks in shares.values() for rank in ranks})))
        yield f"{name} (rank {holders}): expected {wanted}, held {hexed(whole)}"
