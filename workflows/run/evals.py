"""The evals of a run: which are due, what has arrived of each, and their records.

Invariants: an eval that a step makes due is opened once, over any resume; an epoch is finalized
once, when all of its groups were delivered.
"""

from typing import Any

from temporalio import workflow

from ratchet.activities.contracts.rollouts import EvalResult, FinalizeEvalInput, GroupResult
from ratchet.configs.env import ALL
from ratchet.workflows.protocol.activities import FINALIZE_EVAL
from ratchet.workflows.protocol.errors import RunFailed
from ratchet.workflows.protocol.state import EvalEpoch, EvalProgress
from ratchet.workflows.rules.sinks import eval_arrival
from ratchet.workflows.rules.sources import eval_group, fired_evals
from ratchet.workflows.run.context import Context

EVALUATES_AGAIN = "evaluates-again"
MAX_PENDING_EVALS = 4
"""Of one env; what is triggered beyond them is ignored."""


def _examples(asked: int, there: int | None) -> int:
    """Examples of an eval; a set that the preflight did not count has as many as asked for."""
    if asked == ALL:
        assert there is not None, "the size of the set is unknown"
        return there
    return asked if there is None else min(asked, there)


def _failures(result: EvalResult) -> dict[str, Any]:
    """What a result says of rollouts that have no reward; nothing where all have one."""
    failed = result.errored + result.cancelled
    if not failed:
        return {}
    return {"failed": failed, "of": result.rollouts, "error": result.error or "given up"}


def evals_to_finish(count: int) -> str:
    """What a run that has `count` open evals waits for."""
    return f"{count} eval{'s' if count > 1 else ''} to finish"


class Evals:
    """Acts on the evals of a run's state."""

    def __init__(self, context: Context) -> None:
        self._arg = context.arg
        self._config = context.config
        self._state = context.state
        self._part = context.state.evals
        self._outages = context.outages
        self._log = context.log
        self._news = context.news

    def fire(self, step: int) -> None:
        """Opens what is due at `step`, unless that step has fired before."""
        if step > self._part.fired:
            self._part.fired = step
            self._open(fired_evals(self._config, step))

    def open_requested(self) -> None:
        """Opens what was asked for before the run had a version; what is open already will do."""
        step = self._state.steps.step
        open_now = {p.epoch.env for p in self._part.open if p.epoch.step == step}
        requested, self._part.requested = self._part.requested, []
        self._open([env for env in requested if env not in open_now])

    def on_trigger(self, named: list[str]) -> None:
        """Opens what a signal asks for: all envs, or those named."""
        part = self._part
        known = [env.name for env in self._config.eval.env]
        if unknown := [env for env in named if env not in known]:
            self._log.warn(f"trigger_eval: no eval env {', '.join(unknown)}")
        envs = [env for env in known if env in named] if named else known
        if self._state.requests.stop:
            self._log.warn("trigger_eval: ignored, since the run is ending")
            return
        if self._state.steps.version < 0:
            self._log.note("trigger_eval: kept until the run has a version to evaluate")
            part.requested += [env for env in envs if env not in part.requested]
            return
        pending = [progress.epoch.env for progress in part.open]
        full = [env for env in envs if pending.count(env) >= MAX_PENDING_EVALS]
        if full:
            self._log.warn(f"trigger_eval: {', '.join(full)} ignored: already queued")
        self._open([env for env in envs if env not in full])

    def open_again(self) -> None:
        """Opens, for an evaluation that wakes, another eval of the envs whose last result has no
        reward: it may have paused for that, and has nothing to show without one.
        """
        if self._config.trains or self._config.when_all_fail != "pause":
            return
        open_now = {progress.epoch.env for progress in self._part.open}
        last = self._part.last.items()
        failed = [env for env, it in last if it["reward"] is None and env not in open_now]
        if failed and workflow.patched(EVALUATES_AGAIN):
            self._log.note(f"re-evaluating {', '.join(failed)}")
            self._open(failed)
            self._news.wake()

    def _open(self, envs: list[str]) -> None:
        part, step = self._part, self._state.steps.step
        known = self._state.lifecycle.examples
        for env in envs:
            asked, there = self._config.eval_num_examples(env), known.get(f"eval/{env}")
            if there is not None and asked > there:
                self._log.warn(
                    f"eval of {env}: {asked} examples requested, the set has {there}; all are used"
                )
            epoch = EvalEpoch(
                epoch=f"{step}-{part.count}/{env}",
                env=env,
                step=step,
                num_examples=_examples(asked, there),
                group_size=self._config.eval_group_size(env),
            )
            part.count += 1
            part.open.append(EvalProgress(epoch))

    def on_group(self, group: GroupResult) -> None:
        """Counts a delivered eval group; the last of its epoch has the epoch finalized."""
        part = self._part
        epoch, _ = eval_group(group.group)
        progress = next((p for p in part.open if p.epoch.epoch == epoch), None)
        if progress is None:
            return
        part.rollouts += group.size
        if eval_arrival(progress, group):
            part.open.remove(progress)
            if not self._state.requests.stop:
                part.finalizing.append(progress.epoch.step)
                self._log.in_background(self._finalize(progress))

    async def _finalize(self, progress: EvalProgress) -> None:
        epoch = progress.epoch
        arg = FinalizeEvalInput(
            self._arg.run_id,
            epoch.epoch,
            epoch.env,
            epoch.step,
            epoch.num_examples,
            epoch.group_size,
            sorted(progress.missing),
        )
        summary = f"eval of {epoch.env} at step {epoch.step}"
        result = await self._outages.perform(
            f"eval {epoch.epoch}", lambda: FINALIZE_EVAL(arg, self._arg.queues, summary)
        )
        first = epoch.env not in self._part.last
        self._part.last[epoch.env] = {
            "step": float(result.step),
            "reward": result.reward_mean,
            "version": float(result.versions[1]),
            "versions": list(result.versions),
            "rollouts": result.rollouts,
            "epoch": epoch.epoch,
            **_failures(result),
        }
        self._part.finalizing.remove(epoch.step)
        self._part.note(epoch.env, result.step, result.reward_mean)
        self._log.publish()
        policy = self._config.when_all_fail
        if first and result.alike and policy != "continue":
            text = f"the first eval of {epoch.env}: {result.rollouts} of {result.rollouts} failed"
            raise RunFailed(
                "rollouts",
                f"{text}: {result.error}",
                code="all_failed",
                final=policy == "end",
            )
