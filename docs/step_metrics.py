"""The metrics of a trainer step: their names, units and meaning.

Placeholders of a name stand for one part of it: SCOPE ('all', or an env's name), ENV, FILTER,
CONDITION (a stop condition), PHASE (of a rollout), SUBSET ('all', or 'effective': rollouts that
train), KIND and NAME; NAME may contain '/'. STATISTIC stands for one of the named statistics.
Invariant: every metric of a step record has a row here.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

GROUPS = ("mean", "max", "min")
"""Statistics over groups, of each group's mean over its rollouts."""
ROLLOUTS = ("mean", "max", "min", "p10", "p90")
"""Statistics over rollouts, each of which counts once."""
TOKENS = ("mean", "median", "std", "min", "max")
"""Statistics over tokens."""
MEAN_MAX = ("mean", "max")


@dataclass(frozen=True)
class Metric:
    """One metric, or a family of them. `unit` is '' for a count and 'share' for one in [0, 1]."""

    name: str
    unit: str
    about: str
    statistics: tuple[str, ...] = ()

    def matches(self, key: str) -> bool:
        """Whether a key of a step record is one of these."""
        pattern = re.escape(self.name).replace("NAME", ".+")
        if self.statistics:
            pattern = pattern.replace("STATISTIC", f"({'|'.join(self.statistics)})")
        return bool(re.fullmatch(re.sub("[A-Z]{3,}", "[^/]+", pattern), key))


SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Batch": (
        Metric("reward/SCOPE/STATISTIC", "", "Reward of the batch's rollouts.", GROUPS),
        Metric("seq_len/SCOPE/STATISTIC", "tokens", "All tokens of a rollout.", GROUPS),
        Metric("decode_len/SCOPE/STATISTIC", "tokens", "Tokens that were sampled.", GROUPS),
        Metric("prefill_len/SCOPE/STATISTIC", "tokens", "All other tokens.", GROUPS),
        Metric("num_turns/SCOPE/STATISTIC", "", "Turns of a rollout.", GROUPS),
        Metric("is_truncated/SCOPE/STATISTIC", "share", "Rollouts cut off at a limit.", GROUPS),
        Metric("samples_per_rollout/SCOPE/STATISTIC", "", "Training samples.", GROUPS),
        Metric("timing/SCOPE/PHASE/STATISTIC", "s", "Time a rollout spent in a phase.", GROUPS),
        Metric("errored/SCOPE/mean", "share", "Rollouts of the batch's groups that failed."),
        Metric("solve_none/SCOPE", "share", "Groups without any reward."),
        Metric("solve_all/SCOPE", "share", "Groups in which every rollout earned 1."),
        Metric("effective_batch_size/SCOPE", "share", "All other groups."),
        Metric("zero_advantage/SCOPE", "share", "Rollouts with advantage 0."),
        Metric("stop_condition/SCOPE/CONDITION", "share", "Rollouts that it stopped."),
        Metric("metrics/ENV/NAME", "", "What the environment measures itself, on average."),
        Metric("batch/trainable", "share", "Rollouts of the batch that train."),
        Metric("batch/empty", "", "1 if no rollout of the batch trains."),
        Metric("batch/ENV", "share", "Groups of the batch that are of this env."),
        Metric(
            "train/SCOPE/SUBSET/NAME/STATISTIC",
            "",
            "reward, lengths, turns, truncation, samples and timing as above, over rollouts in "
            "place of groups; SCOPE 'agg' is all envs, SUBSET 'effective' the rollouts that train.",
            ROLLOUTS,
        ),
        Metric("train/SCOPE/SUBSET/stop_condition/CONDITION", "share", "Rollouts that it stopped."),
        Metric("train/SCOPE/SUBSET/solve_none", "share", "Groups without any reward."),
        Metric("train/SCOPE/SUBSET/solve_all", "share", "Groups in which every rollout earned 1."),
        Metric("train/SCOPE/SUBSET/effective_batch_size", "share", "All other groups."),
    ),
    "Filters": (
        Metric("filters/SCOPE/is_filtered", "share", "Rollouts that post-batch filters removed."),
        Metric("filters/SCOPE/FILTER", "share", "Rollouts that this post-batch filter hit."),
        Metric("pre_filters/all/dropped_rate", "share", "Rollouts that pre-batch filters removed."),
        Metric("pre_filters/all/FILTER/rate", "share", "Rollouts that this pre-batch filter hit."),
    ),
    "Staleness": (
        Metric(
            "staleness/STATISTIC",
            "versions",
            "From the oldest token of a group to the weights that train on it.",
            MEAN_MAX,
        ),
        Metric("off_policy/STATISTIC", "versions", "The same of each rollout.", MEAN_MAX),
        Metric("off_policy/in_flight/STATISTIC", "versions", "While it was sampled.", MEAN_MAX),
        Metric("off_policy/in_queue/STATISTIC", "versions", "After that.", MEAN_MAX),
        Metric("off_policy/dropped/in_flight", "", "Groups dropped for their age in flight."),
        Metric("off_policy/dropped/in_queue", "", "Groups dropped for their age in the queue."),
    ),
    "Arrivals since the step before": (
        Metric("arrivals/SCOPE/rollouts", "", "Rollouts that arrived, in a batch or not."),
        Metric("arrivals/SCOPE/groups", "", "Groups that arrived."),
        Metric("errors/SCOPE/rollouts", "", "Rollouts that failed."),
        Metric("errors/SCOPE/groups", "", "Groups in which every rollout failed."),
        Metric("errors/SCOPE/rate", "share", "Arrived rollouts that failed."),
        Metric("errors/SCOPE/by_type/KIND", "", "Rollouts that failed with this error."),
        Metric("dropped/SCOPE/groups", "", "Groups that gave nothing to train on."),
        Metric(
            "cancelled/ENV/KIND",
            "",
            "Cancelled groups, by reason: stale, overload, damaged, pause, or surplus (once the "
            "last batch is shipped).",
        ),
        Metric("dispatcher/cancelled/overload", "", "Groups cancelled as engines were overloaded."),
    ),
    "Progress": (
        Metric("progress/tokens", "tokens", "Tokens that the batch trains on."),
        Metric("progress/prefill_tokens", "tokens", "Those that were not sampled."),
        Metric("progress/decode_tokens", "tokens", "Those that were sampled."),
        Metric("progress/samples", "", "Samples that the batch trains on."),
        Metric("progress/problems", "", "Groups of the batch."),
        Metric("progress/rollouts", "", "Rollouts that have arrived since the run began."),
        Metric("progress/evals", "", "Evals, one for each env, since the run began."),
        Metric("progress/total_tokens", "tokens", "Since the run began."),
        Metric("progress/total_samples", "", "Since the run began."),
        Metric("progress/total_problems", "", "Since the run began."),
    ),
    "Time": (
        Metric("time/step", "s", "From one step to the next."),
        Metric("time/wait_for_batch", "s", "The trainer waits for rollouts, without time/scoring."),
        Metric(
            "time/scoring",
            "s",
            "The part of the trainer's wait in which the batch's slowest group was scored, by its "
            "teacher too.",
        ),
        Metric("time/ship_batch", "s", "The batch is written."),
        Metric("time/train", "s", "The trainer trains."),
        Metric("time/sync_weights", "s", "The engines take the weights."),
        Metric(
            "time/trainer",
            "s",
            "The trainer trains the batch, also before its step begins, while earlier weights are "
            "pushed.",
        ),
        Metric("time/push/prepare", "s", "The trained weights are committed to the store."),
        Metric("time/push/receive", "s", "The slowest engine's worker fetches and checks them."),
        Metric("time/push/load", "s", "The slowest engine loads them."),
        Metric("time/push/pause", "s", "The longest that an engine was paused for them."),
        Metric("time/push/verify", "s", "The slowest engine's gate."),
        Metric(
            "time/push/idle", "s", "The trainer waits for a push, though its next batch is there."
        ),
        Metric("weights/bytes", "bytes", "The weights of the version."),
        Metric("time/checkpoint", "s", "The checkpoint before this step."),
        Metric("seconds_train", "s", "The trainer process computes the step."),
        Metric("seconds_export", "s", "The trainer process exports the weights."),
        Metric("perf/throughput", "tokens/s", "Tokens trained on per second."),
        Metric(
            "perf/mfu",
            "share",
            "Model FLOPs of the step by the peak of the trainer's GPUs in bfloat16: 6 for each "
            "weight and token, 4 for a frozen one, and attention, as counted in PaLM, appendix B. "
            "Left out for devices whose peak is not known.",
        ),
        Metric("perf/peak_memory", "GiB", "The most that the trainer's device held."),
    ),
    "Trainer": (
        Metric("loss", "", "The loss of the batch."),
        Metric("loss_COMPONENT", "", "Where there are others than rl: of rl, ce, ref_kl each."),
        Metric("tokens", "tokens", "Sampled tokens of the batch."),
        Metric("tokens_COMPONENT", "tokens", "Tokens that the component learns from."),
        Metric("samples", "", "Samples of the batch."),
        Metric("micro_batches", "", "Forward and backward passes of the step."),
        Metric("lr", "", "The learning rate."),
        Metric("optim/lr", "", "The same."),
        Metric("grad_norm", "", "The gradient's norm before clipping."),
        Metric("optim/grad_norm", "", "The same."),
        Metric("config_revision", "", "The revision of the config that trained the step."),
        Metric("entropy", "nats", "The policy's entropy at sampled tokens, on average."),
        Metric("entropy/SCOPE/STATISTIC", "nats", "Its distribution.", TOKENS),
        Metric("mismatch_kl", "nats", "From the engines' log-probabilities to the trainer's."),
        Metric("mismatch_kl/SCOPE/STATISTIC", "nats", "Its distribution.", TOKENS),
        Metric("kl_ent_ratio/mean", "", "mismatch_kl over entropy."),
        Metric("nll_ce", "nats", "Negative log-likelihood of tokens that ce learns from."),
        Metric("nll/STATISTIC", "nats", "Its distribution.", TOKENS),
        Metric("ref_kl/STATISTIC", "nats", "Trainer's minus reference's log-probability.", TOKENS),
    ),
    "Trust region": (
        Metric("is_masked", "share", "Tokens of rl that its trust region drops."),
        Metric("is_masked/STATISTIC", "share", "Its distribution.", TOKENS),
        Metric("is_masked_low", "share", "Dropped since their ratio is too low."),
        Metric("is_masked_low/STATISTIC", "share", "Its distribution.", TOKENS),
        Metric("is_masked_high", "share", "Dropped since their ratio is too high."),
        Metric("is_masked_high/STATISTIC", "share", "Its distribution.", TOKENS),
        Metric("masked_mismatch_kl/STATISTIC", "nats", "Mismatch of dropped tokens.", TOKENS),
        Metric("unmasked_mismatch_kl/STATISTIC", "nats", "Mismatch of kept tokens.", TOKENS),
        Metric(
            "masked_advantage_positive/STATISTIC",
            "share",
            "Dropped tokens with advantage > 0.",
            TOKENS,
        ),
        Metric(
            "masked_advantage_negative/STATISTIC",
            "share",
            "Dropped tokens with advantage < 0.",
            TOKENS,
        ),
        Metric("ref_kl/is_masked/STATISTIC", "share", "The same of ref_kl.", TOKENS),
        Metric("ref_kl/is_masked_low/STATISTIC", "share", "The same of ref_kl.", TOKENS),
        Metric("ref_kl/is_masked_high/STATISTIC", "share", "The same of ref_kl.", TOKENS),
        Metric("ref_kl/mismatch_kl/STATISTIC", "nats", "Mismatch of ref_kl's tokens.", TOKENS),
        Metric("ref_kl/masked_mismatch_kl/STATISTIC", "nats", "Of its dropped tokens.", TOKENS),
        Metric("ref_kl/unmasked_mismatch_kl/STATISTIC", "nats", "Of its kept tokens.", TOKENS),
    ),
    "State of the run": (
        Metric("concurrency/max_inflight", "", "Permits."),
        Metric("concurrency/turnover", "", "Turnovers of the permits so far."),
        Metric("concurrency/capacity", "tokens", "KV cache of all engines."),
        Metric("concurrency/signal", "", "The engines' load: 0 clear to 2 overloaded."),
        Metric("curriculum/ENV/pool/POOL", "share", "Examples of the env in this pool."),
        Metric("curriculum/ENV/admitted", "", "Groups that the gates let through."),
        Metric("curriculum/ENV/rejected", "", "Groups that the gates kept out."),
        Metric("baseline/ENV/AGENT", "", "The baseline of an algorithm with state."),
    ),
}
"""All metrics, by section of the reference."""


def undescribed(keys: Iterable[str]) -> list[str]:
    """Those of the keys of a step record that have no row."""
    rows = [row for section in SECTIONS.values() for row in section]
    return [key for key in keys if not any(row.matches(key) for row in rows)]
