"""Reads what Temporal recorded of a run into plain facts: activities, signals, memos.

Payloads are plain JSON here, whatever types the product has for them, so that a history is judged
by what was recorded and not by how the present code reads it. Times are Unix times.
"""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from temporalio.api.common.v1 import Payload
from temporalio.api.enums.v1 import EventType
from temporalio.api.history.v1 import HistoryEvent
from temporalio.client import Client, WorkflowHandle

from ratchet.workflows.protocol.messages import MEMO_KEY

AT_ONCE = 4

Outcome = Literal["open", "completed", "failed", "timed_out", "cancelled"]


@dataclass
class Activity:
    """One activity as scheduled by a workflow. `error` is the type of what it failed with."""

    workflow: str
    name: str
    queue: str
    input: dict[str, Any]
    scheduled_at: float
    outcome: Outcome = "open"
    result: Any = None
    attempt: int = 0
    started_at: float = 0.0
    ended_at: float = 0.0
    error: str = ""
    message: str = ""


@dataclass(frozen=True)
class Signal:
    """One signal as a workflow received it."""

    workflow: str
    name: str
    value: Any
    at: float


@dataclass
class Evidence:
    """All that Temporal has of a run. Lists are in the order of each execution's events, and
    executions of one workflow in the order of time.

    `refs` are all references in any payload, by key.
    """

    run_id: str
    activities: list[Activity] = field(default_factory=list)
    signals: list[Signal] = field(default_factory=list)
    memos: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    refs: dict[str, set[tuple[str, str]]] = field(default_factory=dict)
    started: dict[str, dict[str, Any]] = field(default_factory=dict)
    executions: int = 0

    def of(self, name: str) -> list[Activity]:
        """The activities called `name`."""
        return [activity for activity in self.activities if activity.name == name]

    def signals_named(self, name: str) -> list[Signal]:
        """The signals called `name`."""
        return [signal for signal in self.signals if signal.name == name]


def decode(payload: Payload) -> Any:
    """The JSON value of a payload; None for anything else."""
    return json.loads(payload.data) if payload.metadata["encoding"].startswith(b"json/") else None


def first(payloads: Any) -> Any:
    """The first value of a list of payloads, None if there is none."""
    return decode(payloads.payloads[0]) if payloads.payloads else None


async def signals_of(handle: WorkflowHandle[Any, Any]) -> list[tuple[str, Any]]:
    """Names and values of the signals that the latest execution of a workflow received."""
    found = []
    async for event in handle.fetch_history_events():
        if event.event_type == EventType.EVENT_TYPE_WORKFLOW_EXECUTION_SIGNALED:
            about = event.workflow_execution_signaled_event_attributes
            found.append((about.signal_name, first(about.input)))
    return found


async def read(client: Client, run_id: str) -> Evidence:
    """The evidence of a run that has ended."""
    query = f"WorkflowId = '{run_id}' OR WorkflowId STARTS_WITH '{run_id}/'"
    found = [(w.start_time, w.id, w.run_id) async for w in client.list_workflows(query)]
    gate = asyncio.Semaphore(AT_ONCE)

    async def events(workflow_id: str, execution: str) -> list[HistoryEvent]:
        async with gate:
            handle = client.get_workflow_handle(workflow_id, run_id=execution)
            return [event async for event in handle.fetch_history_events()]

    evidence = Evidence(run_id, executions=len(found))
    order = sorted(found)
    for place in range(0, len(order), AT_ONCE):
        part = order[place : place + AT_ONCE]
        histories = await asyncio.gather(*(events(name, execution) for _, name, execution in part))
        for (_, name, _), own in zip(part, histories, strict=True):
            take_in(evidence, name, own)
    return evidence


def take_in(evidence: Evidence, workflow: str, events: list[HistoryEvent]) -> None:
    """Adds one execution's history."""
    own: dict[int, Activity] = {}
    for event in events:
        at = event.event_time.ToMicroseconds() / 1e6
        kind = EventType.Name(event.event_type).removeprefix("EVENT_TYPE_")
        match kind:
            case "WORKFLOW_EXECUTION_STARTED":
                started = event.workflow_execution_started_event_attributes
                value = first(started.input)
                evidence.started.setdefault(workflow, value or {})
                _collect(evidence, value)
            case "WORKFLOW_EXECUTION_SIGNALED":
                about = event.workflow_execution_signaled_event_attributes
                value = first(about.input)
                evidence.signals.append(Signal(workflow, about.signal_name, value, at))
                _collect(evidence, value)
            case "WORKFLOW_PROPERTIES_MODIFIED":
                fields = event.workflow_properties_modified_event_attributes.upserted_memo.fields
                if workflow == evidence.run_id and MEMO_KEY in fields:
                    evidence.memos.append((at, decode(fields[MEMO_KEY])))
            case "ACTIVITY_TASK_SCHEDULED":
                scheduled = event.activity_task_scheduled_event_attributes
                value = first(scheduled.input)
                own[event.event_id] = Activity(
                    workflow,
                    scheduled.activity_type.name,
                    scheduled.task_queue.name,
                    value if isinstance(value, dict) else {},
                    at,
                )
                evidence.activities.append(own[event.event_id])
                _collect(evidence, value)
            case "ACTIVITY_TASK_STARTED":
                begun = event.activity_task_started_event_attributes
                activity = own[begun.scheduled_event_id]
                activity.started_at, activity.attempt = at, begun.attempt
            case (
                "ACTIVITY_TASK_COMPLETED"
                | "ACTIVITY_TASK_FAILED"
                | "ACTIVITY_TASK_TIMED_OUT"
                | "ACTIVITY_TASK_CANCELED"
            ):
                _end(evidence, own, kind.removeprefix("ACTIVITY_TASK_"), event, at)


def _end(
    evidence: Evidence, own: dict[int, Activity], how: str, event: HistoryEvent, at: float
) -> None:
    match how:
        case "COMPLETED":
            done = event.activity_task_completed_event_attributes
            activity, activity_outcome = own[done.scheduled_event_id], "completed"
            activity.result = first(done.result)
            _collect(evidence, activity.result)
        case "FAILED":
            failed = event.activity_task_failed_event_attributes
            activity, activity_outcome = own[failed.scheduled_event_id], "failed"
            activity.error = failed.failure.application_failure_info.type
            activity.message = failed.failure.message
        case "TIMED_OUT":
            late = event.activity_task_timed_out_event_attributes
            activity, activity_outcome = own[late.scheduled_event_id], "timed_out"
            activity.message = late.failure.message
        case _:
            cancelled = event.activity_task_canceled_event_attributes
            activity, activity_outcome = own[cancelled.scheduled_event_id], "cancelled"
    activity.outcome, activity.ended_at = activity_outcome, at  # type: ignore[assignment]


def references(value: Any) -> Iterator[tuple[str, str, str]]:
    """Every artifact reference in a JSON value: key, sha256, path."""
    if isinstance(value, dict):
        if {"key", "sha256", "size", "path"} <= value.keys():
            yield value["key"], value["sha256"], value["path"]
        else:
            for below in value.values():
                yield from references(below)
    elif isinstance(value, list):
        for below in value:
            yield from references(below)


def _collect(evidence: Evidence, value: Any) -> None:
    for key, sha256, path in references(value):
        evidence.refs.setdefault(key, set()).add((sha256, path))
