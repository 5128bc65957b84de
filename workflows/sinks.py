"""Where groups end: batches for the trainer, epochs for evals. Pure; every group counts once."""

import hashlib
from collections.abc import Callable

from activities.contracts.rollouts import FilterTally, GroupResult, ShipBatchInput
from configs.run import RunConfig
from workflows.state import EvalProgress, TrainProgress


class TrainSink:
    """Collects finalized train groups until they fill a batch, in order of arrival."""

    def __init__(self, config: RunConfig, progress: TrainProgress) -> None:
        self._size = config.train.batch_size
        self._max_steps = config.max_steps
        self._max_lag = config.train.max_lag
        self._max_off_policy_steps = config.train.max_off_policy_steps
        self.progress = progress

    def add(self, group: GroupResult) -> None:
        """Takes a delivered group; one without survivors only leaves its count behind."""
        progress = self.progress
        progress.delivered += 1
        progress.lost += group.size - group.survivors
        if group.survivors == 0:
            progress.barren += 1
            progress.barren_filters = progress.barren_filters.plus(group.filters)
            progress.last_error = group.error
        else:
            progress.barren = 0
            progress.ready.append(group)

    def discard(self, rejected_labels: list[str]) -> list[GroupResult]:
        """Takes out groups that hold tokens sampled from refused weights."""
        return self._take_out(lambda group: bool(set(group.labels) & set(rejected_labels)))

    def sweep(self, step: int) -> list[GroupResult]:
        """Takes out groups that are too old for batch `step` or any later one."""
        freshest = step - 1 - self._max_off_policy_steps
        return self._take_out(lambda group: group.version_start < freshest)

    def _take_out(self, unfit: Callable[[GroupResult], bool]) -> list[GroupResult]:
        """Their examples are to be rolled out anew, so they leave no trace in the counts."""
        taken = [group for group in self.progress.ready if unfit(group)]
        for group in taken:
            self.progress.ready.remove(group)
            self.progress.lost -= group.size - group.survivors
        return taken

    @property
    def collected(self) -> int:
        """Rollouts waiting to be trained on."""
        return sum(group.survivors for group in self.progress.ready)

    def cut(self) -> list[GroupResult]:
        """The next batch: the shortest prefix of ready groups with batch_size rollouts."""
        assert self.collected >= self._size
        taken: list[GroupResult] = []
        while sum(group.survivors for group in taken) < self._size:
            taken.append(self.progress.ready.pop(0))
        self.progress.shipped_rollouts += sum(group.survivors for group in taken)
        self.progress.shipped_batches += 1
        return taken

    def on_empty(self) -> None:
        """The batch just cut had nothing to train on: its step needs another."""
        self.progress.shipped_batches -= 1
        self.progress.empty_batches += 1

    def rollouts_wanted(self, version: int) -> int:
        """Train rollouts that may be admitted in all while the policy is at `version`.

        Batch n ships when version >= n - 1 - max_lag, so rollouts are admitted for batches up to
        version + 1 + max_lag; those that were lost are made up for.
        """
        batches = min(self._max_steps, version + 1 + self._max_lag)
        progress = self.progress
        open_batches = max(batches - progress.shipped_batches, 0)
        return progress.shipped_rollouts + self._size * open_batches + progress.lost


def ship_input(
    run_id: str, step: int, groups: list[GroupResult], barren: FilterTally
) -> ShipBatchInput:
    """Names a batch by its groups and the hash over their hashes; `barren` is what the filters
    removed with whole groups since the last batch, for its metrics.
    """
    shas = "".join(group.ref.sha256 for group in groups if group.ref is not None)
    digest = hashlib.sha256(shas.encode()).hexdigest()
    return ShipBatchInput(run_id, step, [group.group for group in groups], digest, barren)


def eval_arrival(progress: EvalProgress, group: GroupResult) -> bool:
    """Counts a delivered eval group; True when its epoch is complete."""
    example = int(group.group.rpartition("/")[2])
    if example not in progress.arrived:
        progress.arrived.append(example)
        if group.ref is None:
            progress.missing.append(example)
    return len(progress.arrived) >= progress.epoch.num_examples
