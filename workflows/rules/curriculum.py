"""Curricula: which example a train counter stands for in a pool env, and which groups may train.

Pure and durable: everything is a function of the run's config and `CurriculumState`, so that the
same state gives the same draws. Invariants: the state always holds the pool of every example of
every difficulty_pool env; a counter keeps its draw until it is forgotten; the state takes a third
of a byte per example, beside what is in flight.
"""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Mapping
from fractions import Fraction
from itertools import accumulate
from string import ascii_lowercase, ascii_uppercase, digits

from ratchet.activities.contracts.rollouts import GroupResult
from ratchet.configs.curriculum import AdvantageRangeConfig, DifficultyPoolConfig
from ratchet.configs.run import RunConfig
from ratchet.workflows.protocol.state import CurriculumState

LARGEST_POOLED = 200_000
POOLS = ("unseen", "hard", "normal", "easy")
UNSEEN, HARD, NORMAL, EASY = range(len(POOLS))

# A base64 digit has six bits, thus the pools of three examples, the first in the lowest bits.
_DIGITS = ascii_uppercase + ascii_lowercase + digits + "+/"
_TRIPLES = {digit: bytes((k & 3, k >> 2 & 3, k >> 4)) for k, digit in enumerate(_DIGITS)}


def pack(pools: bytes) -> str:
    """Pools of examples, one byte each, as base64 digits of three; the rest of the last is 0."""
    padded = pools + bytes(-len(pools) % 3)
    return "".join(
        _DIGITS[padded[k] | padded[k + 1] << 2 | padded[k + 2] << 4]
        for k in range(0, len(padded), 3)
    )


def unpack(text: str, size: int) -> bytes:
    """The pools of `size` examples, one byte each; the inverse of `pack`."""
    assert len(text) == -(-size // 3), "the state is of another dataset"
    return b"".join(_TRIPLES[digit] for digit in text)[:size]


def too_large(config: RunConfig, examples: Mapping[str, int]) -> list[tuple[str, str]]:
    """Config key and message for every env whose pools outgrow the durable state.

    `examples` counts by 'train/<env>'. The limit holds for all difficulty_pool envs of a run
    together, since their pools share one continue-as-new.
    """
    problems, total = [], 0
    for k, env in enumerate(config.train.env):
        if not isinstance(env.curriculum.sampler, DifficultyPoolConfig):
            continue
        size = examples[f"train/{env.name}"]
        total += size
        if total > LARGEST_POOLED:
            others = f", {total} with the envs before it" if total > size else ""
            message = (
                f"sampler 'difficulty_pool' keeps the pool of every example, of at most "
                f"{LARGEST_POOLED} in a run; {env.name!r} has {size}{others}; "
                "use sampler 'standard' or a smaller part of the dataset"
            )
            problems.append((f"train.env.{k}.curriculum.sampler", message))
    return problems


class _Pools:
    """The examples of one env in their pools. A draw or a move scans them in C, without a loop
    over examples in Python: about 0.1 ms for 100,000.
    """

    def __init__(self, config: DifficultyPoolConfig, text: str, size: int) -> None:
        self.text = text
        self._pool_of = bytearray(unpack(text, size))
        self._ceilings = (config.hard_below, config.normal_below)
        self._weights = _whole_weights(config)
        self.counts = [self._pool_of.count(pool) for pool in range(len(POOLS))]

    def draw(self, key: str) -> int:
        """The example at a point, derived from `key`, on a line of all examples, each as long as
        its weight.
        """
        weights = self._weights
        if not any(w * n for w, n in zip(weights, self.counts, strict=True)):
            weights = [1] * len(POOLS)
        ends = list(accumulate(w * n for w, n in zip(weights, self.counts, strict=True)))
        digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
        point = int.from_bytes(digest, "big") * ends[-1] >> 128
        pool = bisect_right(ends, point)
        start = ends[pool - 1] if pool else 0
        return self._member(pool, (point - start) // weights[pool])

    def place(self, example: int, reward_mean: float) -> None:
        """Puts `example` into the pool of its reward."""
        old = self._pool_of[example]
        new = next(
            (
                pool
                for pool, ceiling in zip((HARD, NORMAL), self._ceilings, strict=True)
                if reward_mean <= ceiling
            ),
            EASY,
        )
        self._pool_of[example] = new
        self.counts[old] -= 1
        self.counts[new] += 1
        digit = example // 3
        triple = pack(bytes(self._pool_of[3 * digit : 3 * digit + 3]))
        self.text = self.text[:digit] + triple + self.text[digit + 1 :]

    def _member(self, pool: int, nth: int) -> int:
        """The `nth` example of `pool`, by halving the range that holds it."""
        assert 0 <= nth < self.counts[pool]
        low, high = 0, len(self._pool_of)
        while high - low > 1:
            middle = (low + high) // 2
            left = self._pool_of.count(pool, low, middle)
            if nth < left:
                high = middle
            else:
                low, nth = middle, nth - left
        return low


def _whole_weights(config: DifficultyPoolConfig) -> list[int]:
    """Weights by index of POOLS as whole numbers, so that a draw is exact."""
    weights = (
        config.unseen_weight,
        config.hard_weight,
        config.normal_weight,
        config.easy_weight,
    )
    shares = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(share.denominator for share in shares))
    return [int(share * scale) for share in shares]


class Curriculum:
    """The curricula of a run's train envs over `state`, which it changes in place."""

    def __init__(
        self, config: RunConfig, examples: Mapping[str, int], state: CurriculumState
    ) -> None:
        """`examples` counts by 'train/<env>', from the first draw on; a pool env that `state` does
        not know is unseen.
        """
        self._seed = config.seed
        self._examples = examples
        self.state = state
        self._samplers: dict[str, DifficultyPoolConfig] = {}
        self._pools: dict[str, _Pools] = {}
        self._gates: dict[str, list[AdvantageRangeConfig]] = {}
        for env in config.train.env:
            sampler = env.curriculum.sampler
            if isinstance(sampler, DifficultyPoolConfig):
                self._samplers[env.name] = sampler
            if env.curriculum.gates:
                self._gates[env.name] = env.curriculum.gates

    @property
    def decides(self) -> bool:
        """Whether arrivals change what is drawn next, or which groups count."""
        return bool(self._samplers or self._gates)

    def samples(self, env: str) -> bool:
        """Whether the examples of `env` are drawn here; else they follow from the counter."""
        return env in self._samplers

    def _pools_of(self, env: str) -> _Pools:
        if env not in self._pools:
            size = self._examples[f"train/{env}"]
            text = self.state.pools.setdefault(env, pack(bytes(size)))
            self._pools[env] = _Pools(self._samplers[env], text, size)
        return self._pools[env]

    def draw(self, env: str, counter: int) -> int:
        """The example of pool env `env` for train counter `counter`, the same until forgotten.

        Drawn with replacement, with a chance proportional to the weight of the pool that the
        example is in: a pool's share of the draws is its weight times its size. If only pools of
        weight 0 have examples, all count alike, so that a run never ends for want of one.
        """
        state = self.state
        if str(counter) not in state.draws:
            number = state.drawn.get(env, 0)
            state.draws[str(counter)] = self._pools_of(env).draw(
                f"{self._seed}/{env}/draw/{number}"
            )
            state.drawn[env] = number + 1
        return state.draws[str(counter)]

    def draws_for(self, envs: Mapping[int, str]) -> dict[str, int]:
        """Draws for train counters, given with their envs, in order of counters.

        Returns all that is drawn for them by counter as text; counters of standard envs have no
        draw.
        """
        pooled = [counter for counter in sorted(envs) if self.samples(envs[counter])]
        return {str(counter): self.draw(envs[counter], counter) for counter in pooled}

    def drawn(self, counter: int) -> int | None:
        """The example drawn for a counter that is not forgotten; None in a standard env."""
        return self.state.draws.get(str(counter))

    def forget(self, counter: int) -> None:
        """Drops the draw of a counter whose group will not be requeued any more."""
        self.state.draws.pop(str(counter), None)

    def observe(self, env: str, example: int, reward_mean: float) -> None:
        """Moves `example` to the pool of `reward_mean`, the mean over its latest group alone.

        Groups without a scored rollout have no such mean, and cancelled ones do not count: neither
        is observed. Standard envs remember nothing.
        """
        if self.samples(env):
            pools = self._pools_of(env)
            pools.place(example, reward_mean)
            self.state.pools[env] = pools.text

    def admits(self, group: GroupResult) -> bool:
        """Whether every gate of the group's env lets it train; counts the verdict."""
        if group.env not in self._gates:
            return True
        rejected = any(_rejects(gate, group) for gate in self._gates[group.env])
        counts = self.state.rejected if rejected else self.state.admitted
        counts[group.env] = counts.get(group.env, 0) + 1
        return not rejected

    def metrics(self) -> dict[str, float]:
        """Shares of the pools, and groups judged since the last call, which resets their counts.

        'curriculum/<env>/pool/<pool>' for pool envs, 'curriculum/<env>/{admitted,rejected}' for
        envs with gates.
        """
        result: dict[str, float] = {}
        for env in self._samplers:
            pools = self._pools_of(env)
            whole = sum(pools.counts)
            for pool, count in zip(POOLS, pools.counts, strict=True):
                result[f"curriculum/{env}/pool/{pool}"] = count / whole
        for env in self._gates:
            result[f"curriculum/{env}/admitted"] = float(self.state.admitted.pop(env, 0))
            result[f"curriculum/{env}/rejected"] = float(self.state.rejected.pop(env, 0))
        return result


def _rejects(gate: AdvantageRangeConfig, group: GroupResult) -> bool:
    """A group without advantages has nothing to be rejected for."""
    if group.advantage_range is None:
        return False
    lowest, highest = group.advantage_range
    return gate.reject_min <= lowest and highest <= gate.reject_max
