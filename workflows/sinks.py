"""Where groups end: batches for the trainer, epochs for evals. Pure; every group counts once."""

import hashlib
import math

from activities.contracts.rollouts import GroupResult, ShipBatchInput
from configs.run import RunConfig
from workflows.state import EvalProgress, TrainProgress


class TrainSink:
    """Collects finalized train groups until they fill a batch, in order of arrival."""

    def __init__(self, config: RunConfig, progress: TrainProgress) -> None:
        self._size = config.train.batch_size
        self._group_size = config.train.group_size
        self._max_steps = config.max_steps
        self._max_lag = config.train.max_lag
        self.progress = progress

    def add(self, group: GroupResult) -> None:
        """Takes a delivered group; one without survivors only leaves its count behind."""
        progress = self.progress
        progress.delivered += 1
        progress.lost += group.size - group.survivors
        if group.survivors == 0:
            progress.barren += 1
            progress.last_error = group.error
        else:
            progress.barren = 0
            progress.ready.append(group)

    def discard(self, rejected_labels: list[str]) -> list[GroupResult]:
        """Takes out groups that hold tokens sampled from refused weights; their examples are to
        be rolled out anew, so they leave no trace in the counts.
        """
        refused = [g for g in self.progress.ready if set(g.labels) & set(rejected_labels)]
        for group in refused:
            self.progress.ready.remove(group)
            self.progress.lost -= group.size - group.survivors
        return refused

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

    def train_limit(self, version: int) -> int:
        """Train groups that may be admitted in all while the policy is at `version`.

        Batch n ships when version >= n - 1 - max_lag, so groups are admitted for batches up to
        version + 1 + max_lag; rollouts that were lost are made up for.
        """
        batches = min(self._max_steps, version + 1 + self._max_lag)
        progress = self.progress
        needed = progress.shipped_rollouts + self._size * (batches - progress.shipped_batches)
        return math.ceil((needed + progress.lost) / self._group_size)


def ship_input(run_id: str, step: int, groups: list[GroupResult]) -> ShipBatchInput:
    """Names a batch by its groups and the hash over their hashes."""
    shas = "".join(group.ref.sha256 for group in groups if group.ref is not None)
    digest = hashlib.sha256(shas.encode()).hexdigest()
    return ShipBatchInput(run_id, step, [group.group for group in groups], digest)


def eval_arrival(progress: EvalProgress, group: GroupResult) -> bool:
    """Counts a delivered eval group; True when its epoch is complete."""
    example = int(group.group.rpartition("/")[2])
    if example not in progress.arrived:
        progress.arrived.append(example)
        if group.ref is None:
            progress.missing.append(example)
    return len(progress.arrived) >= progress.epoch.num_examples
