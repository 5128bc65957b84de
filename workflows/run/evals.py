"""The evals of a run: which are due, what has arrived of each, and their records.

Invariants: an eval that a step makes due is opened once, over any resume; an epoch is finalized
once, when all of its groups were delivered.
"""

from ratchet.activities.contracts.rollouts import FinalizeEvalInput, GroupResult
from ratchet.configs.run import RunConfig
from ratchet.workflows.protocol.activities import FINALIZE_EVAL
from ratchet.workflows.protocol.messages import RunInput
from ratchet.workflows.protocol.state import EvalEpoch, EvalProgress, RunState
from ratchet.workflows.rules.sinks import eval_arrival
from ratchet.workflows.rules.sources import eval_group, fired_evals
from ratchet.workflows.run.outages import Outages
from ratchet.workflows.run.status import RunLog

MAX_PENDING_EVALS = 4
"""Of one env; what is triggered beyond them is ignored."""


class Evals:
    """Acts on the evals of a run's state."""

    def __init__(
        self, arg: RunInput, config: RunConfig, state: RunState, mending: Outages, log: RunLog
    ) -> None:
        self._arg = arg
        self._config = config
        self._state = state
        self._outages = mending
        self._log = log

    def fire(self, step: int) -> None:
        """Opens what is due at `step`, unless that step has fired before."""
        if step > self._state.fired:
            self._state.fired = step
            self._open(fired_evals(self._config, step))

    def open_wished(self) -> None:
        """Opens what was asked for before the run had a version; what is open already will do."""
        state = self._state
        open_now = {p.epoch.env for p in state.evals if p.epoch.step == state.step}
        wished, state.wished_evals = state.wished_evals, []
        self._open([env for env in wished if env not in open_now])

    def on_trigger(self, named: list[str]) -> None:
        """Opens what a signal asks for: all envs, or those named."""
        state = self._state
        known = [env.name for env in self._config.eval.env]
        if unknown := [env for env in named if env not in known]:
            self._log.note(f"trigger_eval: no eval env {', '.join(unknown)}")
        envs = [env for env in known if env in named] if named else known
        if state.stop:
            self._log.note("trigger_eval: ignored, since the run is ending")
            return
        if state.version < 0:
            self._log.note("trigger_eval: kept until the run has a version to evaluate")
            asked = [env for env in envs if env not in state.wished_evals]
            state.wished_evals += asked
            return
        pending = [progress.epoch.env for progress in state.evals]
        full = [env for env in envs if pending.count(env) >= MAX_PENDING_EVALS]
        if full:
            self._log.note(f"trigger_eval: {', '.join(full)} already wait; ignored")
        self._open([env for env in envs if env not in full])

    def _open(self, envs: list[str]) -> None:
        state = self._state
        for env in envs:
            examples = self._config.eval_num_examples(env)
            epoch = EvalEpoch(
                epoch=f"{state.step}-{state.eval_count}/{env}",
                env=env,
                step=state.step,
                num_examples=min(examples, state.examples.get(f"eval/{env}", examples)),
                group_size=self._config.eval_group_size(env),
            )
            state.eval_count += 1
            state.evals.append(EvalProgress(epoch))

    def on_group(self, group: GroupResult) -> None:
        """Counts a delivered eval group; the last of its epoch has the epoch finalized."""
        state = self._state
        epoch, _ = eval_group(group.group)
        progress = next((p for p in state.evals if p.epoch.epoch == epoch), None)
        if progress is None:
            return
        state.eval_rollouts += group.size
        if eval_arrival(progress, group):
            state.evals.remove(progress)
            if not state.stop:
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
        self._state.last_eval[epoch.env] = {
            "step": float(result.step),
            "reward": result.reward_mean,
            "version": float(result.versions[1]),
        }
        self._log.publish()
