"""Small stand-ins for the run and its preflight: what the API must see, without any work.

A config's name chooses what they do: see `Preflight.run` and `TrainingRun.run`.
"""

from dataclasses import asdict, replace
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ApplicationError

from ratchet.activities.contracts.checks import CheckProblem, CheckResult
from ratchet.activities.contracts.names import attempt_of
from ratchet.workflows.protocol.messages import (
    CHANGE_CONFIG,
    MEMO_KEY,
    PREFLIGHT,
    TRAINING_RUN,
    PreflightInput,
    RunInput,
)
from ratchet.workflows.protocol.state import RunState

ESTIMATES = {"disk": {"versions": 5 << 20, "checkpoints": 3 << 20}}


@workflow.defn(name=PREFLIGHT)
class Preflight:
    @workflow.run
    async def run(self, arg: PreflightInput) -> CheckResult:
        match arg.config["name"]:
            case "bad-env":
                return CheckResult(
                    [CheckProblem("/train/env/0/id", "train.env.0.id", "no such environment")]
                )
            case "of-a-version" if not arg.restored:
                return CheckResult([CheckProblem("/model/name", "model.name", "was removed")])
            case "broken-preflight":
                raise ApplicationError("the disk is on fire", non_retryable=True)
        return CheckResult(examples={"train/reverse-text": 512}, estimates=ESTIMATES, cores=8)


@workflow.defn(name=TRAINING_RUN)
class TrainingRun:
    """Runs until asked to stop; its memo has every signal that it received."""

    @workflow.init
    def __init__(self, arg: RunInput) -> None:
        self.stopping = False
        envs = arg.config["train"]["env"] or arg.config["eval"]["env"]
        self.memo: dict[str, Any] = {
            "name": arg.config["name"],
            "envs": [env["name"] for env in envs],
            "created_at": arg.created_at,
            "max_steps": arg.config["max_steps"],
            "model": arg.config["model"]["name"],
            "metadata": arg.config["metadata"],
            "examples": arg.examples,
            "signals": [],
            "attempt": attempt_of(arg.run_id),
            "restore": asdict(arg.restore) if arg.restore else None,
            "lineage": workflow.memo_value(MEMO_KEY, {}, type_hint=dict).get("lineage"),
        }
        self.arg = arg

    def tell(self, **changes: Any) -> None:
        self.memo = {**self.memo, **changes}
        workflow.upsert_memo({MEMO_KEY: self.memo})

    @workflow.run
    async def run(self, arg: RunInput) -> None:
        match arg.config["name"]:
            case "fails":
                error = {"code": "GateFailed", "role": "inference", "message": "0.3 != 0.1"}
                self.tell(status="failed", error=error, end_reason="the weight gate failed")
                raise ApplicationError("the weight gate failed", non_retryable=True)
            case "crashes":
                self.tell(status="running", step=2)
                raise ApplicationError("a bug", non_retryable=True)
            case "crashes-once" if arg.restore is None:
                raise ApplicationError("a bug", non_retryable=True)
            case "unchecked":
                self.tell(status="queued")
                await workflow.wait_condition(lambda: False)
            case "goes-on" if arg.state is None:
                self.tell(status="running", step=1)
                workflow.continue_as_new(replace(arg, state=RunState()))
            case "rests":
                waits = {"name": "resume", "since": arg.created_at}
                why = "the disk is full"
                self.tell(status="paused", waiting_for=waits, paused_because=why, pause_reason=why)
                await workflow.wait_condition(lambda: self.stopping)
            case "warns":
                warned = [f"batch {n}: only 4 of 64 rollouts can train" for n in range(1, 6)]
                waits = {"name": "resume", "since": arg.created_at}
                self.tell(
                    status="paused", warnings=warned, waiting_for=waits, pause_reason="a look"
                )
                await workflow.wait_condition(lambda: self.stopping)
            case "ends":
                self.tell(status="succeeded", step=arg.config["max_steps"])
                return
        self.tell(
            status="running",
            step=3 if arg.restore is None else (arg.restore.step or 2),
            policy_version=3,
            started_at=arg.created_at,
            waiting_for={"name": "rollouts of batch 4", "since": arg.created_at},
            checkpoint={"step": 2},
            eval={"reverse-text": {"step": 0, "reward": 0.2}},
            restarts={"engine": 1},
        )
        await workflow.wait_condition(lambda: self.stopping)
        self.tell(status="succeeded", end_reason="stopped")

    @workflow.signal
    def stop(self, arg: Any = None, *rest: Any) -> None:
        self.stopping = True
        self.tell(signals=[*self.memo["signals"], ["stop", arg]], status="stopping")

    @workflow.update(name=CHANGE_CONFIG)
    def change_config(self, patch: dict[str, Any]) -> dict[str, Any]:
        if self.memo["name"] == "refuses":
            raise ApplicationError("not now")
        pairs = {**self.memo["metadata"], **(patch.get("metadata") or {})}
        metadata = {name: value for name, value in pairs.items() if value is not None}
        later = {"max_steps": patch["max_steps"]} if "max_steps" in patch else {}
        self.tell(config_changes=patch, metadata=metadata, config_pending=later)
        return patch

    @workflow.signal
    def pause(self, arg: Any = None, *rest: Any) -> None:
        reason = (arg or {}).get("reason") if isinstance(arg, dict) else None
        signals = [*self.memo["signals"], ["pause", arg]]
        self.tell(signals=signals, status="paused", pause_reason=reason)

    @workflow.signal
    def resume(self, arg: Any = None, *rest: Any) -> None:
        signals = [*self.memo["signals"], ["resume", arg]]
        self.tell(signals=signals, status="running", pause_reason=None)

    @workflow.signal
    def checkpoint(self, arg: Any = None, *rest: Any) -> None:
        self.tell(signals=[*self.memo["signals"], ["checkpoint", arg]], checkpoint={"step": 3})

    @workflow.signal
    def host_report(self, arg: Any = None) -> None:
        pass

    @workflow.signal
    def make_step(self, step: int) -> None:
        self.tell(step=step, policy_version=step, reward=step / 100)

    @workflow.signal
    def trigger_eval(self, arg: Any = None, *rest: Any) -> None:
        self.tell(signals=[*self.memo["signals"], ["trigger_eval", arg]])
