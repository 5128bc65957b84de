"""What a delivered train group changes: the curriculum, the state of its algorithm, the sink.

Invariants: every delivered group counts once, in the order of delivery; a draw is kept for as long
as its group may be put back.
"""

from ratchet.activities.contracts.baselines import fold
from ratchet.activities.contracts.rollouts import GroupResult
from ratchet.configs.algorithm import RaeConfig
from ratchet.configs.run import RunConfig
from ratchet.workflows.protocol.state import RunState
from ratchet.workflows.rules.curriculum import Curriculum
from ratchet.workflows.rules.sinks import TrainSink
from ratchet.workflows.rules.sources import train_counter


class Arrivals:
    """Takes the train groups of one run until a batch is cut from them."""

    def __init__(
        self, config: RunConfig, state: RunState, sink: TrainSink, curriculum: Curriculum
    ) -> None:
        self._config = config
        self._state = state
        self.sink = sink
        self._curriculum = curriculum

    def on_group(self, group: GroupResult) -> None:
        """Takes a group that was delivered and not cancelled."""
        counter, _ = train_counter(group.group)
        example = self._curriculum.drawn(counter)
        if example is not None and group.errored < group.size:
            self._curriculum.observe(group.env, example, group.reward_mean)
        self._observe(group)
        kept = self.sink.add(group, admitted=self._curriculum.admits(group))
        if not kept:
            self._curriculum.forget(counter)
        self._state.rollouts += group.size
        self._state.train.ok_rollouts += group.size - group.errored

    def _observe(self, group: GroupResult) -> None:
        algorithm = self._config.algorithm(group.env)
        if isinstance(algorithm, RaeConfig) and group.observed:
            before = self._state.baselines.get(group.env, {})
            self._state.baselines[group.env] = fold(before, group.observed, algorithm.decay)

    def cut(self) -> list[GroupResult]:
        """The next batch, to be written."""
        return self.sink.cut()

    def on_written(self) -> None:
        """The batch that was cut last is written: none of its groups will be put back any more."""
        progress = self.sink.progress
        for group in progress.cut:
            self._curriculum.forget(train_counter(group.group)[0])
        progress.cut = []

    def metrics(self) -> dict[str, float]:
        """Numbers of curricula and algorithms for the record of a step; counts start anew."""
        baselines = {
            f"baseline/{env}/{agent}": value
            for env, agents in self._state.baselines.items()
            for agent, value in agents.items()
        }
        return {**self._curriculum.metrics(), **baselines}
