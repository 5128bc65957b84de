"""Where each kind of artifact lies in the store. One function per kind; nothing else builds keys.

`run` is the id of an attempt (`names.attempt_id`). Gauges are about wall time and not about what is
trained, so that all attempts of a run share theirs.
"""

from ratchet.activities.contracts import names
from ratchet.activities.contracts.upgrades import CANARY, CHECKPOINT_STATE, TRAINER_STATE

RUN_STATE_FILE = CHECKPOINT_STATE.what
TRAINER_FILE = TRAINER_STATE.what
POLICY_FILE = "policy.json"
"""About version 0: {parameters, origin, base, license, renderer}. `base` is the model that it
descends from, as a config would name it, `license` that model's, or null; `renderer` is what 'auto'
resolves to.
"""
CANARY_FILE = CANARY.what
MODEL_CONFIG = "config.json"
"""Of a model in Hugging Face layout: its architecture."""
FINGERPRINTS_FILE = "fingerprints.json"
ADAPTER_FOLDER = "adapter"
"""Of weights and checkpoints of a run that trains an adapter: the adapter, as peft loads it. In a
folder of its own, since engines load every safetensors file that lies beside a model's config.
"""
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
OPTIMIZER_FOLDER = "optimizer"
"""Of a checkpoint by several ranks: what `OPTIMIZER_FILE` holds, in parts that each of them wrote.
"""
ADAPTER_FILE = f"{ADAPTER_FOLDER}/{ADAPTER_WEIGHTS}"
NOT_WEIGHTS = (OPTIMIZER_FILE, TRAINER_FILE, RUN_STATE_FILE)
"""Files of a checkpoint that its exported weights do not have."""
NOT_MODEL = (*NOT_WEIGHTS, POLICY_FILE, CANARY_FILE, FINGERPRINTS_FILE)
"""Files of weights or a checkpoint that are not part of a model in Hugging Face layout."""


RUNS = "runs"
"""The folder of attempts."""


def run_folder(run: str) -> str:
    """The folder of all artifacts of an attempt."""
    return f"{RUNS}/{run}"


def config(run: str, revision: int = 0) -> str:
    """The resolved config of a run; each change while it is running makes another revision."""
    return f"runs/{run}/config.json" if revision == 0 else f"runs/{run}/config.{revision}.json"


def lineage(run: str) -> str:
    """The source of a run that did not begin at step 0: {source, step, kind}."""
    return f"runs/{run}/lineage.json"


def rollout(run: str, group: str, index: int) -> str:
    """One finished rollout: its trace and its samples."""
    return f"{rollouts(run, group)}/{index:04d}.json"


def rollouts(run: str, group: str) -> str:
    """The folder of a group's rollouts."""
    return f"runs/{run}/rollouts/{group}"


def group(run: str, group: str) -> str:
    """One finalized group: samples with advantages."""
    return f"runs/{run}/groups/{group}.json"


def batch(run: str, step: int) -> str:
    """One shipped batch, as the trainer saw it (Parquet)."""
    return f"runs/{run}/batches/step-{step:08d}.parquet"


def step_groups(run: str, step: int, digest: str) -> str:
    """Ids of the groups assigned to a step, including those that filters emptied: {step, groups}.
    Retention keeps it; the `digest` is as in `batch_metrics`.
    """
    return f"runs/{run}/step_groups/step-{step:08d}-{digest[:16]}.json"


def token_logprobs(run: str, step: int) -> str:
    """The trainer's log-probability of every token of a step's batch (Parquet)."""
    return f"runs/{run}/token_logprobs/step-{step:08d}.parquet"


def weights(run: str, version: int) -> str:
    """Exported weights of a policy version, in Hugging Face layout, with the canary."""
    return f"runs/{run}/weights/v{version:08d}"


def checkpoint(run: str, step: int) -> str:
    """A checkpoint: weights, optimizer, and the run's durable state."""
    return f"runs/{run}/checkpoints/step-{step:08d}"


def checkpoints(run: str) -> str:
    """The folder of a run's checkpoints."""
    return f"runs/{run}/checkpoints"


def batch_metrics(run: str, step: int, digest: str) -> str:
    """Metrics of a batch: a part of the record of `step`.

    A batch that turned out to be empty leaves its step to another one, so that the `digest` of its
    groups belongs to the name.
    """
    return f"runs/{run}/metrics/parts/batch-{step:08d}-{digest[:16]}.json"


def train_metrics(run: str, step: int, digest: str) -> str:
    """The trainer's metrics of a step on the batch of hash `digest`: a part of its record."""
    return f"runs/{run}/metrics/parts/train-{step:08d}-{digest[:16]}.json"


def step_record(run: str, step: int) -> str:
    """Metrics of one training step."""
    return f"runs/{run}/metrics/step-{step:08d}.json"


def step_records(run: str) -> str:
    """The folder of a run's step metrics."""
    return f"runs/{run}/metrics"


def step_chunk(run: str, step: int) -> str:
    """The records of the hundred steps up to `step`, once more, as columns."""
    return f"{step_chunks(run)}/step-{step:08d}.json"


def step_chunks(run: str) -> str:
    """The folder of a run's packed step metrics."""
    return f"runs/{run}/metrics/chunks"


def eval_record(run: str, epoch: str) -> str:
    """Metrics of one eval epoch (one env at one step)."""
    return f"runs/{run}/evals/{epoch}.json"


def eval_records(run: str) -> str:
    """The folder of a run's eval metrics."""
    return f"runs/{run}/evals"


def live(run: str, source: str) -> str:
    """Latest gauges of one process, overwritten in place."""
    return f"{live_records(run)}/{source}.json"


def live_records(run: str) -> str:
    """The folder of a run's gauges."""
    return f"runs/{names.workflow_of(run)}/live"


def series(run: str, source: str, chunk: int) -> str:
    """Samples of one process over time, one a line; `chunk` is when they begin (Unix time, ms).

    Names sort by `chunk` first.
    """
    return f"{series_folder(run)}/{chunk:013d}-{source}.jsonl"


def series_folder(run: str) -> str:
    """The folder of a run's series."""
    return f"runs/{names.workflow_of(run)}/series"


def ended(run: str) -> str:
    """A run's last memo, and how it ended, overwritten in place: {state, started, closed, memo}."""
    return f"runs/{names.workflow_of(run)}/ended.json"


ENDED_UNTIL = "index/ended.json"
"""The moment up to which the ends of all runs are recorded: {until}."""
INDEXED_RUNS = "index/runs"
"""The folder of days, each with a folder per hour."""
ARCHIVED_RUNS = "index/archived"
"""Likewise, for archived runs."""
DELETED_RUNS = "index/deleted"
RUN_INDEX = "index/runs.json"
"""The moment up to which all runs are in the index: {until}."""


def indexed_run(hour: str, created_ms: int, run: str) -> str:
    """An empty file that adds a run to the list; `hour` is '<day>/<hour>' in UTC, and `created_ms`
    Unix time.
    """
    return f"{INDEXED_RUNS}/{hour}/{created_ms:013d}-{run}"


def archived_run(hour: str, created_ms: int, run: str) -> str:
    """The same for an archived run, which has no file of the other kind."""
    return f"{ARCHIVED_RUNS}/{hour}/{created_ms:013d}-{run}"


def deleted_run(deleted_ms: int, run: str) -> str:
    """An empty file that hides a run deleted at that moment (Unix time) until Temporal has dropped
    it.
    """
    return f"{DELETED_RUNS}/{deleted_ms:013d}-{run}"


NOTES = "notes"
"""The folder of notes; a run without one has no file."""


def note(run: str) -> str:
    """The user's note of a run, overwritten in place: {text}."""
    return f"{NOTES}/{run}.json"


IDEMPOTENCY = "idempotency"
"""The folder of days."""


def idempotency_claim(day: str, digest: str) -> str:
    """What an idempotency key was first used for; `digest` is that of key, request and caller."""
    return f"{IDEMPOTENCY}/{day}/{digest[:2]}/{digest}.claim.json"


def idempotency_reply(day: str, digest: str) -> str:
    """The reply to a request with an idempotency key."""
    return f"{IDEMPOTENCY}/{day}/{digest[:2]}/{digest}.reply.json"


def policy_cache(digest: str) -> str:
    """A warm-started default policy, by the hash of everything that determines it. Those directly
    below `cache/policies` are from builds that took no fingerprints.
    """
    return f"cache/policies/2/{digest}"


def load_time(digest: str) -> str:
    """How long an environment that loads slowly took, overwritten in place; `digest` is that of
    its id, args and path.
    """
    return f"cache/load_times/{digest}.json"
