"""When which fault is injected: pure functions of a seed.

A fault is named by a `Spec` (what, and to whom); `faults.py` knows how it is carried out.
Invariants: times rise; every kind that can be injected comes once before any comes again.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tests.chaos.targets import SERVERS, SERVICES, Role

What = Literal[
    "kill",
    "stall",
    "cut-temporal",
    "cut-engine",
    "slow-store",
    "failing-store",
    "full-disk",
    "kill-in-checkpoint",
    "kill-in-push",
    "redeliver",
]

ENGINE_ROLES = ("engine-api", "engine-core", "inference-worker")
"""What takes an engine down, for tens of seconds."""


@dataclass(frozen=True, order=True)
class Spec:
    """One kind of fault. `role` is '' where a fault has no process for its target."""

    what: What
    role: Role | Literal[""] = ""

    @property
    def name(self) -> str:
        """'kill engine-core', 'full-disk', …"""
        return f"{self.what} {self.role}".strip()

    @property
    def downs_engine(self) -> bool:
        """Whether an engine has to be started anew afterwards, as a rule."""
        return self.role in ENGINE_ROLES


@dataclass(frozen=True)
class Planned:
    """A fault and its time, in seconds from the first step on."""

    at_s: float
    spec: Spec


ROLES: tuple[Role, ...] = (*SERVICES, *SERVERS)
OTHERS = (
    Spec("cut-temporal"),
    Spec("cut-engine"),
    Spec("slow-store"),
    Spec("failing-store"),
    Spec("full-disk"),
    Spec("kill-in-checkpoint", "trainer-process"),
    Spec("kill-in-checkpoint", "trainer-worker"),
    Spec("kill-in-push", "trainer-process"),
    Spec("kill-in-push", "engine-core"),
    Spec("redeliver"),
)
RARE = tuple(
    Spec("kill-in-push", role) for role in ("trainer-worker", "engine-api", "inference-worker")
)
"""What only long sessions have."""


def every_kind() -> list[Spec]:
    """All faults there are."""
    return [*(Spec(what, role) for role in ROLES for what in ("kill", "stall")), *OTHERS, *RARE]


def _spread(specs: Sequence[Spec]) -> list[Spec]:
    """The same faults, those that down an engine as far from each other as may be."""
    heavy = [spec for spec in specs if spec.downs_engine]
    light = [spec for spec in specs if not spec.downs_engine]
    order: list[Spec] = []
    for number, spec in enumerate(heavy):
        first, last = (len(light) * k // len(heavy) for k in (number, number + 1))
        order += [spec, *light[first:last]]
    return order or light


def quick(seed: int, spacing_s: float, possible: Sequence[Spec]) -> list[Planned]:
    """Every role once, killed or stalled as the seed has it, and every other kind once."""
    dice = random.Random(seed)
    specs = [spec for role in ROLES if (spec := _one_of(dice, role, possible)) is not None]
    specs += [spec for spec in OTHERS if spec in possible]
    dice.shuffle(specs)
    return [Planned(k * spacing_s, spec) for k, spec in enumerate(_spread(specs))]


def _one_of(dice: random.Random, role: Role, possible: Sequence[Spec]) -> Spec | None:
    # The dice are thrown either way, so that what is possible does not change the rest.
    options = [Spec("kill", role), Spec("stall", role)]
    dice.shuffle(options)
    return next((spec for spec in options if spec in possible), None)


def soak(seed: int, seconds: float, count: int, possible: Sequence[Spec]) -> list[Planned]:
    """`count` faults at random times of `seconds`, in shuffled rounds over all kinds.

    Each has a slot of its own, in whose first three quarters it falls at random: no two coincide,
    and gaps vary between a quarter of a slot and nearly two.
    """
    if count < 0 or seconds <= 0 or not possible:
        raise ValueError(
            f"{count} faults in {seconds} s from {len(possible)} kinds: some s and kinds"
        )
    dice = random.Random(seed)
    specs: list[Spec] = []
    while len(specs) < count:
        deck = sorted(possible)
        dice.shuffle(deck)
        specs += _spread(deck)
    slot = seconds / max(count, 1)
    return [
        Planned((k + 0.75 * dice.random()) * slot, spec) for k, spec in enumerate(specs[:count])
    ]
