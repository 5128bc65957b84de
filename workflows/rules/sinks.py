"""Where groups end: batches for the trainer, epochs for evals. Pure.

Invariants: every delivered group counts once, in the order of delivery; a draw is kept for as long
as its group may be requeued.
"""

import hashlib
from collections.abc import Callable

from ratchet.activities.contracts.rollouts import LOST, FilterTally, GroupResult, ShipBatchInput
from ratchet.configs.run import RunConfig
from ratchet.workflows.protocol.state import ArrivalsState, EvalProgress, TrainProgress
from ratchet.workflows.rules.curriculum import Curriculum
from ratchet.workflows.rules.sources import train_counter

FIRST_GROUPS = 8
"""If all rollouts of this many groups fail alike, more are expected to fail, too."""


def counted(config: RunConfig, group: GroupResult) -> int:
    """Rollouts with which a group fills a batch."""
    train = config.train
    by_trainable = train.backfill or train.token_batch_size is not None
    return group.trainable if by_trainable else group.survivors


class TrainSink:
    """Collects finalized train groups until they fill a batch, in order of arrival.

    A batch is full with `batch_size` rollouts or `token_batch_size` tokens. With `backfill` those
    that post-batch filters will remove do not count; only shipped tokens ever count.
    """

    def __init__(self, config: RunConfig, progress: TrainProgress) -> None:
        train = config.train
        self._rollouts, self._tokens = train.batch_size, train.token_batch_size
        self._config = config
        self._largest_group = config.largest_group
        self._context = config.context
        self._last_step = config.last_step
        self._max_lag = train.max_lag
        self._max_off_policy_steps = train.max_off_policy_steps
        self._ageless = {env.name for env in train.env if config.is_frozen(env.name)}
        self.progress = progress

    def _counted(self, group: GroupResult) -> int:
        """Rollouts with which the group fills a batch."""
        return counted(self._config, group)

    def add(self, group: GroupResult, *, admitted: bool = True) -> bool:
        """Adds a delivered group. If nothing of it counts, or a curriculum's gates did not admit
        it, only its counts remain: False.
        """
        progress, counted = self.progress, self._counted(group) if admitted else 0
        progress.delivered += 1
        progress.lost += group.size - counted
        if counted == 0:
            progress.empty_groups += 1
            progress.empty_filters = progress.empty_filters.plus(group.filters)
            why = "post-batch filters removed all its rollouts"
            why = why if admitted else "its curriculum's gates refused it"
            progress.last_error = group.error or f"group {group.group} does not count: {why}"
        else:
            progress.empty_groups = 0
            progress.ready.append(group)
            progress.counted_rollouts += counted
            progress.counted_tokens += group.tokens
        return counted > 0

    def discard(self, rejected_labels: list[str]) -> list[GroupResult]:
        """Removes groups with tokens sampled from refused weights."""
        return self._take_out(lambda group: bool(set(group.labels) & set(rejected_labels)))

    def sweep(self, step: int) -> list[GroupResult]:
        """Removes groups that are too old for batch `step` or any later one."""
        freshest = step - 1 - self._max_off_policy_steps
        return self._take_out(
            lambda group: group.version_start < freshest and group.env not in self._ageless
        )

    def take_out(self, groups: list[GroupResult]) -> list[GroupResult]:
        """Removes these groups."""
        return self._take_out(lambda group: group in groups)

    def _take_out(self, unfit: Callable[[GroupResult], bool]) -> list[GroupResult]:
        """Their examples are rolled out again, so they leave no trace in the counts."""
        taken = [group for group in self.progress.ready if unfit(group)]
        for group in taken:
            counted = self._counted(group)
            self.progress.ready.remove(group)
            self.progress.lost -= group.size - counted
            self.progress.counted_rollouts -= counted
            self.progress.counted_tokens -= group.tokens
        return taken

    @property
    def collected(self) -> int:
        """Rollouts waiting to be trained on."""
        return sum(self._counted(group) for group in self.progress.ready)

    @property
    def collected_tokens(self) -> int:
        """Tokens waiting to be trained on."""
        return sum(group.tokens for group in self.progress.ready)

    def full(self, undecided: frozenset[str] = frozenset()) -> bool:
        """Whether a batch can be cut of groups without tokens of `undecided` labels."""
        groups = self._decided(undecided)
        if self._tokens is not None:
            return sum(group.tokens for group in groups) >= self._tokens
        assert self._rollouts is not None
        return sum(self._counted(group) for group in groups) >= self._rollouts

    def _decided(self, undecided: frozenset[str]) -> list[GroupResult]:
        return [group for group in self.progress.ready if undecided.isdisjoint(group.labels)]

    def filled(self) -> str:
        """The progress of the next batch, in words."""
        if self._tokens is not None:
            return f"{self.collected_tokens} of {self._tokens} tokens"
        return f"{self.collected} of {self._rollouts}"

    def cut(self, undecided: frozenset[str] = frozenset()) -> list[GroupResult]:
        """The next batch: the first ready groups that fill it, but those with tokens of `undecided`
        labels, which stay.
        """
        assert self.full(undecided)
        progress, decided = self.progress, self._decided(undecided)
        taken: list[GroupResult] = []
        rollouts = tokens = 0
        while tokens < self._tokens if self._tokens else rollouts < (self._rollouts or 0):
            taken.append(decided[len(taken)])
            progress.ready.remove(taken[-1])
            rollouts += self._counted(taken[-1])
            tokens += taken[-1].tokens
        progress.shipped_rollouts += rollouts
        progress.shipped_batches += 1
        progress.cut = taken
        return taken

    def take_filters(self) -> FilterTally:
        """What filters removed with empty groups, for the metrics of the next batch."""
        tally, self.progress.empty_filters = self.progress.empty_filters, FilterTally()
        return tally

    def uncut(self, filters: FilterTally | None = None) -> None:
        """The batch that was being written is abandoned: its groups are ready again, before others,
        and `filters` are for the next.
        """
        progress = self.progress
        progress.empty_filters = (filters or FilterTally()).plus(progress.empty_filters)
        if progress.cut:
            progress.shipped_rollouts -= sum(self._counted(group) for group in progress.cut)
            progress.shipped_batches -= 1
            progress.ready, progress.cut = [*progress.cut, *progress.ready], []

    def on_empty(self, filters: FilterTally) -> None:
        """The batch just cut had nothing to train on: its step needs another."""
        progress = self.progress
        progress.empty_filters = filters.plus(progress.empty_filters)
        progress.shipped_batches -= 1
        progress.empty_batches += 1

    def on_shipped(self) -> None:
        """The batch just cut waits for the trainer."""
        self.progress.empty_batches = 0

    @property
    def empty_batches(self) -> float:
        """Consecutive groups with nothing to train on, counted in batches."""
        progress = self.progress
        rollouts = self._rollouts or self._wanted_for(self._tokens or 1)
        return progress.empty_groups * self._largest_group / max(rollouts, self._largest_group)

    def _wanted_for(self, tokens: int) -> int:
        """Rollouts that yield so many tokens, by the mean so far; before the first there is only a
        bound, since none is longer than the context.
        """
        progress = self.progress
        if not progress.counted_tokens:
            return max(-(-tokens // self._context), self._largest_group)
        return -(-tokens * progress.counted_rollouts // progress.counted_tokens)

    def rollouts_wanted(self, version: int) -> int:
        """Train rollouts that may be admitted in all while the policy is at `version`.

        Batch n ships when version >= n - 1 - max_lag, so rollouts are admitted for batches up to
        version + 1 + max_lag; lost ones are replaced. A token budget is converted to rollouts by
        the mean so far, which every arrival corrects.
        """
        due = version + 1 + self._max_lag
        batches = due if due < self._last_step else int(self._last_step)
        progress = self.progress
        open_batches = max(batches - progress.shipped_batches, 0)
        if self._tokens is None:
            assert self._rollouts is not None
            return progress.shipped_rollouts + self._rollouts * open_batches + progress.lost
        missing = self._tokens * open_batches - self.collected_tokens
        # What post-batch filters remove from a group is lost with it, so every group was counted.
        delivered = progress.shipped_rollouts + self.collected + progress.lost
        return delivered + (self._wanted_for(missing) if missing > 0 else 0)


class Arrivals:
    """Takes the train groups of one run until a batch is cut from them."""

    def __init__(
        self, config: RunConfig, part: ArrivalsState, sink: TrainSink, curriculum: Curriculum
    ) -> None:
        self._config = config
        self.part = part
        self.sink = sink
        self._curriculum = curriculum

    def on_group(self, group: GroupResult) -> None:
        """Adds a group that was delivered and not cancelled."""
        counter, _ = train_counter(group.group)
        example = self._curriculum.drawn(counter)
        if example is not None and group.errored < group.size:
            self._curriculum.observe(group.env, example, group.reward_mean)
        self._observe(group)
        kept = self.sink.add(group, admitted=self._curriculum.admits(group))
        if not kept:
            self._curriculum.forget(counter)
        self._count(group, kept)
        self.part.rollouts += group.size
        self.part.ok_rollouts += group.size - group.errored

    def _count(self, group: GroupResult, kept: bool) -> None:
        env, failed = group.env, group.errored == group.size
        found = {
            f"arrivals/{env}/rollouts": group.size,
            f"arrivals/{env}/groups": 1,
            f"errors/{env}/rollouts": group.errored,
            f"errors/{env}/groups": int(failed),
            f"dropped/{env}/groups": int(not kept),
        }
        # A group without a document was cancelled with all of its rollouts.
        types = group.errors or ({LOST: group.errored} if group.errored else {})
        found |= {f"errors/{env}/by_type/{kind}": count for kind, count in types.items()}
        for name, count in found.items():
            self.part.counts[name] = self.part.counts.get(name, 0) + count

    def all_failed(self) -> str:
        """The one type of error with which every rollout so far failed, once FIRST_GROUPS groups
        did; else ''. Cancelled groups do not count.
        """
        counts = self.part.counts
        groups = sum(counts.get(f"errors/{env.name}/groups", 0) for env in self._config.train.env)
        types = {name.rpartition("/by_type/")[2] for name in counts if "/by_type/" in name}
        enough = groups >= FIRST_GROUPS and self.part.ok_rollouts == 0
        return types.pop() if enough and len(types) == 1 and LOST not in types else ""

    def forgive(self) -> None:
        """A pause resets the count of failed groups."""
        self.part.counts = {}
        self.sink.progress.empty_groups = self.sink.progress.empty_batches = 0

    def _observe(self, group: GroupResult) -> None:
        if not group.observed:
            return
        before = self.part.baselines.get(group.env, {})
        after = self._config.algorithm(group.env).fold(before, group.observed)
        if after is not None:
            self.part.baselines[group.env] = after

    def cut(self, undecided: frozenset[str] = frozenset()) -> list[GroupResult]:
        """The next batch, to be written, without tokens of `undecided` labels."""
        return self.sink.cut(undecided)

    def on_written(self) -> None:
        """The batch cut last is written: none of its groups will be requeued any more."""
        progress = self.sink.progress
        for group in progress.cut:
            self._curriculum.forget(train_counter(group.group)[0])
        progress.cut = []

    def metrics(self) -> dict[str, float]:
        """Numbers of arrivals, curricula and algorithms for the record of a step; resets the
        counts.
        """
        baselines = {
            f"baseline/{env}/{agent}": value
            for env, agents in self.part.baselines.items()
            for agent, value in agents.items()
        }
        counts, self.part.counts = self.part.counts, {}
        return {**error_rates(counts), **self._curriculum.metrics(), **baselines}


def error_rates(counts: dict[str, int]) -> dict[str, float]:
    """Counts of groups as metrics, those of all envs together as 'all', with the share of the
    arrived rollouts that failed as 'errors/<scope>/rate'.
    """
    metrics = {name: float(count) for name, count in counts.items()}
    for name, count in counts.items():
        family, _, rest = name.split("/", 2)
        everywhere = f"{family}/all/{rest}"
        metrics[everywhere] = metrics.get(everywhere, 0.0) + count
    for name, arrived in [*metrics.items()]:
        if name.startswith("arrivals/") and name.endswith("/rollouts"):
            scope = name.split("/")[1]
            metrics[f"errors/{scope}/rate"] = metrics[f"errors/{scope}/rollouts"] / arrived
    return metrics


def ship_input(
    run_id: str, step: int, groups: list[GroupResult], empty: FilterTally
) -> ShipBatchInput:
    """Names a batch by its groups and the hash over their hashes; `empty` is what the filters
    removed with whole groups since the last batch, for its metrics.
    """
    shas = "".join(group.ref.sha256 for group in groups if group.ref is not None)
    digest = hashlib.sha256(shas.encode()).hexdigest()
    return ShipBatchInput(run_id, step, [group.group for group in groups], digest, empty)


def eval_arrival(progress: EvalProgress, group: GroupResult) -> bool:
    """Counts a delivered eval group; True when its epoch is complete."""
    example = int(group.group.rpartition("/")[2])
    if example not in progress.arrived:
        progress.arrived.append(example)
        if group.ref is None:
            progress.missing.append(example)
    return len(progress.arrived) >= progress.epoch.num_examples
