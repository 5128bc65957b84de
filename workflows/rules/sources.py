"""Where examples come from: pure functions of a counter, so that a cursor is one number.

Invariant: over counters 0, 1, 2, … every train example of an env is served exactly once per
epoch, in an order fixed by the run's seed, and the counter is the only state needed to continue.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ratchet.activities.contracts.rollouts import GroupWork
from ratchet.configs.run import RunConfig
from ratchet.workflows.protocol.state import EvalEpoch, Shares

_FEISTEL_ROUNDS = 4
LONGEST_CYCLE = 1000


def _round(key: str, number: int, value: int) -> int:
    digest = hashlib.blake2b(f"{key}/{number}/{value}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def permute(index: int, size: int, key: str) -> int:
    """Where `index` lands in a keyed permutation of range(size), in constant memory.

    A balanced Feistel network over the next even power of two, walked until it lands inside
    (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """
    assert 0 <= index < size
    half = (max(size - 1, 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    value = index
    while True:
        left, right = value >> half, value & mask
        for number in range(_FEISTEL_ROUNDS):
            left, right = right, left ^ (_round(key, number, right) & mask)
        value = (left << half) | right
        if value < size:
            return value


def train_group(counter: int, attempt: int = 0) -> str:
    """Id of the group for train counter `counter`; `attempt` counts how often it was requeued."""
    return f"train/{counter}" if attempt == 0 else f"train/{counter}.{attempt}"


def train_counter(group: str) -> tuple[int, int]:
    """Counter and attempt of a train group's id."""
    counter, _, attempt = group.removeprefix("train/").partition(".")
    return int(counter), int(attempt or 0)


def next_attempt(group: str) -> str:
    """Id under which a requeued group is rolled out again."""
    counter, attempt = train_counter(group)
    return train_group(counter, attempt + 1)


def smooth_cycle(ratios: list[float]) -> list[int]:
    """One cycle of smooth weighted round robin over indexes, as nginx orders its upstreams.

    Each turn every index gains its weight; the one with most (first of equals) is served and pays
    the total. Ratios that no cycle of at most LONGEST_CYCLE turns can hold are rounded to one.
    """
    shares = [Fraction(str(ratio)) for ratio in ratios]
    scale = math.lcm(*(share.denominator for share in shares))
    weights = [int(share * scale) for share in shares]
    common = math.gcd(*weights)
    weights = [weight // common for weight in weights]
    if sum(weights) > LONGEST_CYCLE:
        whole = sum(ratios)
        weights = [max(round(LONGEST_CYCLE * ratio / whole), 1) for ratio in ratios]
    total, current, order = sum(weights), [0] * len(weights), []
    for _ in range(total):
        current = [have + weight for have, weight in zip(current, weights, strict=True)]
        best = max(range(len(current)), key=lambda k: (current[k], -k))
        current[best] -= total
        order.append(best)
    return order


@dataclass(frozen=True)
class _Turns:
    """Turns of envs from counter `start` on: `cycle` repeated. Of env e, `before[e]` groups lie
    below `start`, and `drawn[n][e]` among the first n of a cycle.
    """

    start: int
    cycle: list[int]
    drawn: list[list[int]]
    before: list[int]

    @classmethod
    def of(cls, start: int, ratios: list[float], before: list[int]) -> "_Turns":
        cycle, drawn = smooth_cycle(ratios), [[0] * len(ratios)]
        for env in cycle:
            drawn.append([count + (k == env) for k, count in enumerate(drawn[-1])])
        return cls(start, cycle, drawn, before)

    def env_at(self, counter: int) -> int:
        return self.cycle[(counter - self.start) % len(self.cycle)]

    def count(self, env: int, counter: int) -> int:
        """Groups of `env` below `counter`."""
        cycles, rest = divmod(counter - self.start, len(self.cycle))
        return self.before[env] + cycles * self.drawn[-1][env] + self.drawn[rest][env]


class TrainSource:
    """Train examples by counter: envs by smooth weighted round robin, reshuffled each epoch.

    `shares` are changes of the ratios, by rising start; before the first the config's apply.
    """

    def __init__(
        self, config: RunConfig, examples: dict[str, int], shares: Sequence[Shares] = ()
    ) -> None:
        envs = config.train.env
        self._seed = config.seed
        self._names = [env.name for env in envs]
        self._group_sizes = [config.train.size_of(env) for env in envs]
        self._examples = [examples[f"train/{name}"] for name in self._names]
        self._turns: list[_Turns] = []
        if not shares or shares[0].start > 0:
            shares = [Shares(0, {env.name: env.ratio for env in envs}), *shares]
        for share in shares:
            before = [self._drawn_of(env, share.start) for env in range(len(envs))]
            ratios = [share.ratios[name] for name in self._names]
            self._turns.append(_Turns.of(share.start, ratios, before))

    def _turns_at(self, counter: int) -> _Turns:
        return next(turns for turns in reversed(self._turns) if turns.start <= counter)

    def env_of(self, counter: int) -> str:
        """The env whose turn it is at `counter`."""
        return self._names[self._turns_at(counter).env_at(counter)]

    def work(self, group: str, draws: Mapping[str, int] | None = None) -> GroupWork:
        """The group named `group`: which env, which example. `draws` maps counters to examples
        that a curriculum chose; all others come by turn.
        """
        counter, _ = train_counter(group)
        env = self._turns_at(counter).env_at(counter)
        if draws and (drawn_example := draws.get(str(counter))) is not None:
            size = self._group_sizes[env]
            return GroupWork(group, "train", self._names[env], drawn_example, size)
        drawn = self._drawn_of(env, counter)
        size = self._examples[env]
        key = f"{self._seed}/{self._names[env]}/{drawn // size}"
        example = permute(drawn % size, size, key)
        return GroupWork(group, "train", self._names[env], example, self._group_sizes[env])

    def rollouts_below(self, counter: int) -> int:
        """Rollouts of all groups whose counter is below `counter`."""
        sizes = enumerate(self._group_sizes)
        return sum(self._drawn_of(env, counter) * size for env, size in sizes)

    def counter_for(self, rollouts: int) -> int:
        """The lowest counter below which there are at least `rollouts` rollouts."""
        low, high = 0, max(rollouts, 0) + 1
        while low < high:
            middle = (low + high) // 2
            if self.rollouts_below(middle) >= rollouts:
                high = middle
            else:
                low = middle + 1
        return low

    def _drawn_of(self, env: int, counter: int) -> int:
        return self._turns_at(counter).count(env, counter) if self._turns else 0


def eval_group(group: str) -> tuple[str, int]:
    """Epoch and example of an eval group's id."""
    epoch, _, example = group.removeprefix("eval/").rpartition("/")
    return epoch, int(example)


def eval_work(epoch: EvalEpoch, example: int) -> GroupWork:
    """The group of an eval epoch's `example`."""
    return GroupWork(f"eval/{epoch.epoch}/{example}", "eval", epoch.env, example, epoch.group_size)


def interleave(epochs: list[EvalEpoch], cursors: dict[str, int]) -> Iterator[GroupWork]:
    """The remaining groups of the epochs, the least advanced epoch first (A1, B1, A2, B2, …)."""
    places = {e.epoch: cursors.get(e.epoch, 0) for e in epochs}
    while True:
        open_epochs = [e for e in epochs if places[e.epoch] < e.num_examples]
        if not open_epochs:
            return
        epoch = min(open_epochs, key=lambda e: places[e.epoch])
        yield eval_work(epoch, places[epoch.epoch])
        places[epoch.epoch] += 1


def fired_evals(config: RunConfig, step: int) -> list[str]:
    """Names of the eval envs that are due at `step`: all at step 0, then each at its interval, and
    all at the last step, unless the config says otherwise. An evaluation has them all, once.
    """
    if step == 0:
        skips = config.eval.skip_first_step and config.trains
        return [] if skips else [env.name for env in config.eval.env]
    last = step == config.max_steps and config.eval.at_end
    return [
        env.name for env in config.eval.env if last or step % config.eval_interval(env.name) == 0
    ]
