"""Which weights the engines should hold, and what is known about every push of them. Pure.

Invariants: an engine is verified at a version only after a push of that version's own bits passed
the gate in the engine's current epoch. The labels of an unverified push are rejected, however it
failed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ratchet.activities.contracts.refs import ArtifactRef
from ratchet.activities.contracts.training import PUSH_TRIES, PolicyResult, push_label
from ratchet.workflows.protocol.state import HostState, ServersState
from ratchet.workflows.rules.fleet import Fleet

KEPT_LABEL_VERSIONS = 100


@dataclass(frozen=True)
class Push:
    """Weights on their way to `engine`, as it was when they left; a `serving` engine had traffic
    before.
    """

    engine: HostState
    version: int
    weights: ArtifactRef
    serving: bool

    @property
    def labels(self) -> list[str]:
        """The labels of tokens that the engine samples from these weights."""
        numbers = range(PUSH_TRIES)
        return [push_label(self.version, self.engine.pushes, number) for number in numbers]


class Pushes:
    """Acts on the weights of a run's state. `wake` is called when dispatch needs an update.

    `undecided` are the labels of pushes in progress: what is sampled under them may have to be
    discarded.
    """

    def __init__(self, part: ServersState, fleet: Fleet, wake: Callable[[], None]) -> None:
        self._part = part
        self._fleet = fleet
        self._wake = wake
        # Engines by index and epoch that still roll out, though they should get other weights.
        self._had_traffic: set[tuple[int, int]] = set()
        self._open: list[Push] = []
        self._seconds: dict[str, float] = {}

    @property
    def in_flight(self) -> int:
        """Pushes in progress."""
        return len(self._open)

    @property
    def to_serving(self) -> int:
        """Pushes in progress to engines that had traffic before."""
        return sum(push.serving for push in self._open)

    @property
    def undecided(self) -> frozenset[str]:
        """Labels that the gate has neither accepted nor refused."""
        return frozenset(label for push in self._open for label in push.labels)

    def begin(self, policy: PolicyResult) -> None:
        """Version 0 is ready."""
        self._part.policy_origin = policy.origin
        self._part.weights, self._part.target_version = policy.weights, 0

    def offer(self, version: int, weights: ArtifactRef) -> bool:
        """The engines should hold `weights` as `version`: the exact bits of the trainer's state. A
        trainer on other hardware than the previous one may have produced different bits from the
        same batch; True if so.
        """
        part, again = self._part, version == self._part.target_version
        if again:
            assert part.weights is not None
            if weights.sha256 == part.weights.sha256:
                return False
            for engine in self._fleet.of("engine"):
                if engine.verified >= 0:
                    self._had_traffic.add((engine.index, engine.epoch))
                engine.verified = -1
            self._wake()
        else:
            self._seconds = {}
        part.weights, part.target_version = weights, version
        return again

    def is_due(self, host: HostState) -> bool:
        """Whether an engine is up without the newest weights."""
        part = self._part
        return host.up and part.weights is not None and host.verified < part.target_version

    def start(self, host: HostState) -> Push:
        """The newest weights leave for an engine."""
        assert self._part.weights is not None
        # Numbered over all engines: a rejected label belongs to one push alone.
        host.pushes = 1 + max(engine.pushes for engine in self._fleet.of("engine"))
        serving = host.verified >= 0 or (host.index, host.epoch) in self._had_traffic
        push = Push(replace(host), self._part.target_version, self._part.weights, serving)
        self._open.append(push)
        return push

    def on_verified(self, host: HostState, push: Push, rejected: list[str]) -> None:
        """A push passed the gate, on a later try if labels of the first ones are `rejected`."""
        self._part.rejected_labels.extend(rejected)
        if host.epoch == push.engine.epoch and host.up and push.weights == self._part.weights:
            host.verified = push.version
            host.gate_failures = 0
        self._wake()

    def on_timed(self, seconds: dict[str, float]) -> None:
        """What the parts of a push took."""
        for part, value in seconds.items():
            self._seconds[part] = max(value, self._seconds.get(part, 0.0))

    def take_seconds(self) -> dict[str, float]:
        """By part the longest of the newest version's pushes since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def on_failed(self, host: HostState, push: Push, reason: str, *, refused: bool) -> None:
        """A push failed; `refused`: the gate did not let it pass."""
        engine = push.engine
        # However the push failed, what the engine samples under its labels is unverified.
        self._part.rejected_labels.extend(push.labels)
        self._fleet.mark_down("engine", engine.index, engine.epoch, reason)
        host.gate_failures += refused
        self._wake()

    def end(self, push: Push) -> None:
        """A push is over, verified or not."""
        self._open.remove(push)

    def forget_labels(self, version: int) -> None:
        """Drops rejected labels of versions so far below that no group has them."""
        self._part.rejected_labels = [
            label
            for label in self._part.rejected_labels
            if int(label.partition(".")[0]) > version - KEPT_LABEL_VERSIONS
        ]
