"""The events of a run, derived from Temporal's history of its workflow. Pure but for `decode`.

An event's id is '<execution>.<history event>.<k>'. A history never changes and only grows at its
end, so ids are stable and ordered, and survive every restart of the API. Most events come from
changes of the run's memo; activities that took time, signals and servers come from the history
itself.
"""

import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Literal

from temporalio.api.common.v1 import Payload, Payloads
from temporalio.api.enums.v1 import WorkflowTaskFailedCause
from temporalio.api.failure.v1 import Failure
from temporalio.api.history.v1 import HistoryEvent

from ratchet.activities.contracts import names
from ratchet.activities.contracts.controls import CONTROLS, Verb, plain, verb_of
from ratchet.activities.contracts.health import HEALTH_REPORT, RULES, Finding, eval_failing
from ratchet.activities.contracts.redact import redacted, redacted_all
from ratchet.activities.contracts.wire import decoded
from ratchet.api.http.audit import record_of
from ratchet.workflows.protocol.messages import DISPATCH, MEMO_KEY
from ratchet.workflows.protocol.state import RunState

Level = Literal["info", "warning", "error"]
Decode = Callable[[Payload], Awaitable[Any]]

WORK = frozenset(
    {
        names.PREPARE_POLICY,
        names.RESTORE_RUN,
        names.LOAD_TRAINER,
        names.SHIP_BATCH,
        names.TRAIN_STEP,
        names.SYNC_WEIGHTS,
        names.SAVE_CHECKPOINT,
        names.FINALIZE_EVAL,
    }
)
"""Activities whose completion is an event; failures of any activity are."""

HARMLESS = (
    WorkflowTaskFailedCause.WORKFLOW_TASK_FAILED_CAUSE_UNHANDLED_COMMAND,
    WorkflowTaskFailedCause.WORKFLOW_TASK_FAILED_CAUSE_RESET_STICKY_TASK_QUEUE,
)
"""Why Temporal repeats a workflow task in normal operation: a signal arrived while the last one was
being closed, or a worker evicted its cache.
"""

CURSOR = re.compile(
    r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.([0-9]{1,9})\.([0-9]{1,9})", re.ASCII
)


@dataclass(frozen=True)
class LoggedEvent:
    """One event. `place` (history event, k) orders the events of one execution."""

    execution: str
    place: tuple[int, int]
    type: str
    time: datetime
    message: str
    level: Level = "info"
    source: str = "run"
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Its cursor."""
        return f"{self.execution}.{self.place[0]}.{self.place[1]}"

    def as_json(self) -> dict[str, Any]:
        """The event as the API shows it."""
        return {
            "id": self.id,
            "object": "event",
            "type": self.type,
            "created_at": _iso(self.time),
            "level": self.level,
            "source": self.source,
            "message": self.message,
            "data": self.data,
        }

    @cached_property
    def sse(self) -> bytes:
        """Its wire form, which is built once for all watchers."""
        data = json.dumps(self.as_json(), separators=(",", ":"))
        return f"id: {self.id}\nevent: {self.type}\ndata: {data}\n\n".encode()


def parse_cursor(text: str) -> tuple[str, tuple[int, int]]:
    """Execution and place of an event's id; raises ValueError."""
    match = CURSOR.fullmatch(text)
    if match is None:
        raise ValueError("not an event's id")
    return match[1], (int(match[2]), int(match[3]))


def _dict(value: Any) -> dict[str, Any]:
    """A value that anyone may have sent, if it is an object; else an empty one."""
    return value if isinstance(value, dict) else {}


def _cause(failure: Failure) -> str:
    while failure.HasField("cause"):
        failure = failure.cause
    return redacted(failure.message or "no reason stated", 500)


def _said(value: Any) -> str:
    """A value of a config, for a message."""
    return value if isinstance(value, str) else json.dumps(value)


def _eval_line(env: str, result: dict[str, Any]) -> str:
    """The result of an eval; what older builds do not report is left out."""
    text, failed = f"eval of {env} at step {result['step']:.0f}", result.get("failed")
    reward = result.get("reward")
    text += " has no reward" if reward is None else f": reward {reward:.3f}"
    if (scored := (result.get("rollouts") or 0) - (failed or 0)) > 0:
        text += f" over {scored} rollouts"
    if "version" in result:
        versions = dict.fromkeys(result.get("versions") or [result["version"]])
        text += f", policy v{' to v'.join(f'{version:.0f}' for version in versions)}"
    if failed:
        text += f"; {failed} of {result['of']} failed: {result['error']}"
    return text


@dataclass
class _Begun:
    """An activity that was scheduled and has not ended."""

    name: str
    summary: str
    started: datetime
    attempt: int = 1
    retried: str = ""
    epoch: str = ""
    """Epoch of the eval that it finalizes."""


class EventBuilder:
    """Reads the history of one execution in order and derives its events."""

    def __init__(self, execution: str, decode: Decode) -> None:
        self._execution = execution
        self._decode = decode
        self._memo: dict[str, Any] = {}
        self._begun: dict[int, _Begun] = {}
        self._events: list[LoggedEvent] = []
        self._event: HistoryEvent = HistoryEvent()
        self._evals: set[str] = set()
        """Epochs of evals whose start was reported."""
        self._finalized: dict[str, str] = {}
        self._changed_by: dict[str, str] = {}
        """Epoch of the last eval of each env that was finalized."""
        self._lost: dict[tuple[str, Any], datetime] = {}
        """Since when a lost server has been missing, by role and index."""
        self.began: datetime | None = None
        self.predecessor = ""
        """Temporal's id of the execution that this one continues, if that continued as new."""
        self.successor = ""
        """Temporal's id of the execution that follows, once this one has continued as new."""
        self.ended = False

    async def take(self, event: HistoryEvent) -> list[LoggedEvent]:
        """The events that follow from the next event of the history, in order."""
        self._events, self._event = [], event
        kind = event.WhichOneof("attributes") or ""
        attrs: Any = getattr(event, kind, None)
        match kind.removesuffix("_event_attributes"):
            case "workflow_execution_started":
                await self._on_started(attrs)
            case "workflow_properties_modified" if MEMO_KEY in attrs.upserted_memo.fields:
                self._on_memo(await self._decode(attrs.upserted_memo.fields[MEMO_KEY]))
            case "workflow_execution_signaled":
                await self._on_signal(attrs)
            case "signal_external_workflow_execution_initiated":
                if attrs.signal_name == "control":
                    self._on_control(await self._first(attrs.input))
            case "start_child_workflow_execution_initiated":
                if attrs.workflow_type.name == DISPATCH:
                    self._on_control(_dict(await self._first(attrs.input)).get("control"))
            case "workflow_execution_cancel_requested":
                self._on_asked(CONTROLS["cancel"], attrs.identity, attrs.cause)
            case "workflow_execution_update_accepted":
                # A change is reported as soon as the memo has it.
                self._changed_by = record_of(attrs.accepted_request.meta.update_id)
            case "activity_task_scheduled":
                await self._on_scheduled(attrs)
            case "activity_task_started":
                if begun := self._begun.get(attrs.scheduled_event_id):
                    begun.started, begun.attempt = event.event_time.ToDatetime(UTC), attrs.attempt
                    begun.retried = _cause(attrs.last_failure) if attrs.attempt > 1 else ""
            case "activity_task_completed":
                self._on_done(attrs.scheduled_event_id)
            case "activity_task_failed":
                self._on_failed(attrs.scheduled_event_id, _cause(attrs.failure))
            case "activity_task_timed_out":
                self._on_failed(attrs.scheduled_event_id, f"timed out: {_cause(attrs.failure)}")
            case "activity_task_canceled":
                self._begun.pop(attrs.scheduled_event_id, None)
            case "workflow_task_failed" if attrs.cause not in HARMLESS:
                text = f"a workflow task failed and is retried: {_cause(attrs.failure)}"
                self._emit("run.stuck", text, level="error", source="orchestrator")
            case "workflow_execution_continued_as_new":
                self.successor, self.ended = attrs.new_execution_run_id, True
            case "workflow_execution_completed":
                self._on_end(str(self._memo.get("status") or "succeeded"), "")
            case "workflow_execution_failed":
                self._on_end("failed", _cause(attrs.failure))
            case "workflow_execution_timed_out":
                self._on_end("failed", "the workflow timed out in Temporal")
            case "workflow_execution_canceled":
                self._on_end("cancelled", "")
            case "workflow_execution_terminated":
                said = f"terminated in Temporal: {redacted(attrs.reason, 300)}"
                self._on_end("failed", said)
        return self._events

    async def _first(self, input: Payloads) -> Any:
        """The value of the first of some payloads; None without any."""
        return await self._decode(input.payloads[0]) if input.payloads else None

    def _emit(
        self,
        kind: str,
        message: str,
        *,
        level: Level = "info",
        source: str = "run",
        data: dict[str, Any] | None = None,
    ) -> None:
        self._events.append(
            LoggedEvent(
                self._execution,
                (self._event.event_id, len(self._events)),
                kind,
                self._event.event_time.ToDatetime(UTC),
                redacted(message, 4000),
                level,
                source,
                redacted_all(data or {}),
            )
        )

    # -- the run ----------------------------------------------------------------------------

    async def _on_started(self, attrs: Any) -> None:
        self.began = self._event.event_time.ToDatetime(UTC)
        payload = attrs.memo.fields.get(MEMO_KEY)
        memo = _dict(await self._decode(payload)) if payload is not None else {}
        if attrs.continued_execution_run_id:
            self.predecessor, self._memo = attrs.continued_execution_run_id, memo
            if document := _dict(await self._first(attrs.input)).get("state"):
                state: RunState = decoded(RunState, document)
                if any(each.state != "closed" for each in state.dispatch.generations):
                    # Evals under way began earlier; after a checkpoint or a pause they restart.
                    self._evals = {each.epoch.epoch for each in state.evals.open}
            return
        attempt = memo.get("attempt") or 1
        text = "the run was created" if attempt == 1 else f"the run is resumed: attempt {attempt}"
        data = {"attempt": attempt, "lineage": memo.get("lineage")}
        data |= _dict(memo.get("asked"))
        if reason := memo.get("resumed_because"):
            data["reason"], text = reason, f"{text}: {reason}"
        self._emit("run.created" if attempt == 1 else "run.resumed", text, data=data)
        # The initial memo makes no events, except for its status.
        self._memo = {**memo, "status": None, "waiting_for": None}
        self._on_memo(memo)

    def _on_memo(self, memo: Any) -> None:
        if not isinstance(memo, dict):
            return
        before, self._memo = self._memo, memo

        def changed(key: str) -> bool:
            # Absent and empty mean the same.
            return (memo.get(key) or None) != (before.get(key) or None)

        if changed("step") and memo.get("step"):
            data = {key: memo.get(key) for key in ("step", "policy_version", "reward")}
            reward = memo.get("reward")
            said = f" with reward {reward:.3f}" if isinstance(reward, int | float) else ""
            self._emit("run.step", f"step {memo['step']} is done{said}", data=data)
        for env, result in (memo.get("eval") or {}).items():
            # A result may repeat that of an earlier eval of the same step.
            same = result == (before.get("eval") or {}).get(env)
            step = self._finalized.get(env, "").partition("-")[0]
            if not same or step == f"{result['step']:.0f}":
                epoch = self._finalized.pop(env, None)
                data = {"env": env, **result, **({"epoch": epoch} if epoch else {})}
                reported = (result.get(key) for key in ("failed", "of", "error"))
                for finding in eval_failing(env, *reported):
                    data |= finding.pointer
                level: Level = "warning" if result.get("failed") else "info"
                self._emit("run.eval", _eval_line(env, result), level=level, data=data)
        if changed("checkpoint") and memo.get("checkpoint"):
            saved = memo["checkpoint"]
            text = f"checkpoint of step {saved.get('step')} is committed"
            self._emit("run.checkpoint", text, source="trainer", data=saved)
        if changed("config_changes") or changed("config_revision"):
            self._on_config(memo, before)
        if "metadata" in before and changed("metadata"):
            self._emit("run.metadata", "the metadata was changed", data=memo.get("metadata") or {})
        trouble = memo.get("paused_because") or memo.get("trouble")
        if trouble and trouble != (before.get("paused_because") or before.get("trouble")):
            text = f"the run paused itself: {redacted(str(trouble), 300)}"
            self._emit("run.trouble", text, level="warning", data={"reason": text})
        if (alarm := memo.get("alarm")) and not before.get("alarm"):
            data = {"reason": alarm, **Finding("mismatch", alarm).pointer}
            self._emit("run.alarm", f"drift: {alarm}", level="warning", data=data)
        for text in memo.get("warnings") or ():
            if text not in (before.get("warnings") or ()):
                data = {"reason": text, "step": memo.get("step") or 0}
                self._emit("run.warning", text, level="warning", data=data)
        if changed("status"):
            status, reason = memo.get("status"), memo.get("pause_reason")
            data = {"status": status, "from": before.get("status")}
            data |= {"reason": reason} if reason else {}
            text = f"status: {status}{f' ({redacted(reason, 300)})' if reason else ''}"
            self._emit("run.status", text, data=data)
        waiting = memo.get("waiting_for") or {}
        if waiting.get("name") and waiting != before.get("waiting_for"):
            self._emit("run.waiting", f"waiting for {waiting['name']}", data=waiting)

    def _on_config(self, memo: dict[str, Any], before: dict[str, Any]) -> None:
        """A requested change, or the revision that came of it."""
        revision, changes = memo.get("config_revision") or 0, memo.get("config_changes") or {}
        diff = _dict(memo.get("config_diff"))
        data = {"revision": revision, "changes": changes, "diff": diff, **self._changed_by}
        self._changed_by = {}
        text = "the config was changed"
        if diff:
            waits = diff.keys() & _dict(memo.get("config_pending")).keys()
            said = ", ".join(
                f"{key} {_said(old)} → {_said(new)}"
                + (" from the next step on" if key in waits else "")
                for key, (old, new) in diff.items()
            )
            text = f"the config was changed: {said}"
        elif revision != (before.get("config_revision") or 0):
            text = f"the changes took effect: the config is at revision {revision}"
        self._emit("run.config", text, data=data)

    def _on_end(self, status: str, reason: str) -> None:
        self.ended = True
        reason = reason or str(self._memo.get("end_reason") or "")
        data: dict[str, Any] = {"status": status, "reason": reason}
        if self._memo.get("error"):
            data["error"] = self._memo["error"]
        level: Level = "error" if status == "failed" else "info"
        text = f"the run {'was ' if status == 'cancelled' else ''}{status}"
        self._emit("run.ended", f"{text}: {reason}" if reason else text, level=level, data=data)

    def _on_control(self, control: Any) -> None:
        """Dispatch receives an eval as soon as its groups may begin."""
        for reported in _dict(control).get("evals") or []:
            if reported["epoch"] not in self._evals:
                self._evals.add(reported["epoch"])
                data = {key: reported.get(key) for key in ("epoch", "env", "step")}
                text = f"eval of {reported['env']} at step {reported['step']} begins"
                self._emit("run.eval_started", text, data=data)

    # -- signals and servers ----------------------------------------------------------------

    async def _on_signal(self, attrs: Any) -> None:
        if attrs.signal_name == "host_report":
            self._on_report(await self._first(attrs.input))
        elif attrs.signal_name == HEALTH_REPORT:
            self._on_health(await self._first(attrs.input))
        elif verb := verb_of(attrs.signal_name):
            self._on_asked(verb, attrs.identity, plain(await self._first(attrs.input)))

    def _on_asked(self, verb: Verb, identity: str, value: Any = None) -> None:
        # Redacted before it is read: half a secret, as a long reason may end in, is not recognized.
        body, _ = verb.read(redacted_all(value))
        said = body.model_dump()
        if not (reason := said["reason"]):
            del said["reason"]
        data = {"asked": verb.asked, **said, **record_of(identity)}
        self._emit("run.asked", f"{verb.event}: {reason}" if reason else verb.event, data=data)

    def _on_report(self, report: Any) -> None:
        if not isinstance(report, dict) or "role" not in report:
            return
        state = str(report.get("state"))
        data = {key: report.get(key) for key in ("role", "index", "name", "epoch", "state")}
        where = f"{report['role']} {report.get('name') or report.get('index')}"
        text = f"{where} (epoch {report.get('epoch')}) is {state}"
        lost = state in ("down", "failed")
        if fault := self._fault_of(report, state):
            data |= fault
            if "back_after_s" in fault:
                text = f"{text}, back after {fault['back_after_s']:.0f} s"
            elif not lost:
                text = f"{text}; the previous one was last seen at {fault['lost_at'][11:19]} UTC"
        if lost and report.get("detail"):
            data["detail"] = redacted(str(report["detail"]), 10**6)[-1000:]
            text = f"{text}: {data['detail']}"
        level: Level = "error" if state == "failed" else "warning" if lost else "info"
        self._emit(f"server.{state}", text, level=level, source=str(report["role"]), data=data)

    def _fault_of(self, report: dict[str, Any], state: str) -> dict[str, Any]:
        """When a server was lost, and once it is up again how long it was missing; nothing if none
        was lost, for example when a pause closed it.
        """
        place, now = (str(report["role"]), report.get("index")), self._event.event_time
        moment = now.ToDatetime(UTC)
        if state == "up":
            lost_at = self._lost.pop(place, None)
            if lost_at is None:
                return {}
            seconds = max((moment - lost_at).total_seconds(), 0.0)
            return {"lost_at": _iso(lost_at), "back_after_s": round(seconds, 3)}
        seen_at = _moment(report.get("seen_at")) if state == "starting" else moment
        if seen_at is None:
            return {}
        lost_at = self._lost.setdefault(place, min(seen_at, moment))
        return {"lost_at": _iso(lost_at)}

    def _on_health(self, report: Any) -> None:
        finding, step = _dict(_dict(report).get("finding")), _dict(report).get("step")
        if (rule := RULES.get(str(finding.get("rule")))) is None:
            return
        found = Finding(finding["rule"], str(finding.get("message")), str(finding.get("subject")))
        data = {"step": step, **found.pointer}
        text = f"{rule.title}: {found.message}"
        self._emit("run.health", text, level=rule.level, data=data)

    # -- work -------------------------------------------------------------------------------

    async def _on_scheduled(self, attrs: Any) -> None:
        name, metadata = attrs.activity_type.name, self._event.user_metadata
        summary = await self._decode(metadata.summary) if metadata.HasField("summary") else ""
        finalized = await self._first(attrs.input) if name == names.FINALIZE_EVAL else None
        self._begun[self._event.event_id] = _Begun(
            name,
            str(summary),
            self._event.event_time.ToDatetime(UTC),
            epoch=str(_dict(finalized).get("epoch") or ""),
        )

    def _on_done(self, scheduled: int) -> None:
        begun = self._begun.pop(scheduled, None)
        if begun is None or (begun.name not in WORK and not begun.retried):
            return
        data = self._span(begun)
        if begun.epoch:
            data["epoch"] = begun.epoch
            self._finalized[begun.epoch.partition("/")[2]] = begun.epoch
        text = f"{begun.summary or begun.name} is done"
        if begun.retried:
            data["retried_after"] = begun.retried
            text = f"{text}, on try {begun.attempt} after: {begun.retried}"
        level: Level = "warning" if begun.retried else "info"
        self._emit("work.done", text, level=level, source=begun.name, data=data)

    def _on_failed(self, scheduled: int, cause: str) -> None:
        begun = self._begun.pop(scheduled, None)
        if begun is None:
            return
        text = f"{begun.summary or begun.name} failed: {cause}"
        data = {**self._span(begun), "error": cause}
        self._emit("work.failed", text, level="warning", source=begun.name, data=data)

    def _span(self, begun: _Begun) -> dict[str, Any]:
        return {
            "work": begun.name,
            "summary": begun.summary,
            "started_at": _iso(begun.started),
            "finished_at": _iso(self._event.event_time.ToDatetime(UTC)),
            "attempt": begun.attempt,
        }


def _moment(text: Any) -> datetime | None:
    """A time in UTC that a worker reported, if it is one."""
    try:
        moment = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return moment if moment is not None and moment.tzinfo is not None else None


def _iso(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
