"""Where the time of a step goes: one history, cut into the gaps between its events.

Gaps are named by the events around them ('train_step scheduled > train_step started') and add up
to the whole wall clock of the execution, so the table says which hop costs most.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from temporalio.api.enums.v1 import EventType
from temporalio.client import Client


@dataclass
class Profile:
    """Events by name, and milliseconds by gap; `steps` are the trainer steps it saw."""

    steps: int = 0
    total_ms: float = 0.0
    events: Counter[str] = field(default_factory=Counter)
    gaps: Counter[str] = field(default_factory=Counter)


async def profile(client: Client, workflow_id: str, run_id: str | None = None) -> Profile:
    """Reads one history."""
    found = Profile()
    activities: dict[int, str] = {}
    before, at = "", 0.0
    async for event in client.get_workflow_handle(
        workflow_id, run_id=run_id
    ).fetch_history_events():
        name = _name(event, activities)
        moment = event.event_time.seconds * 1e3 + event.event_time.nanos / 1e6
        found.events[name] += 1
        found.steps += name == "train_step completed"
        if before:
            found.gaps[f"{before} > {name}"] += moment - at  # type: ignore[assignment]
            found.total_ms += moment - at
        before, at = name, moment
    return found


def _name(event: Any, activities: dict[int, str]) -> str:
    kind = EventType.Name(event.event_type).removeprefix("EVENT_TYPE_").lower()
    if kind == "activity_task_scheduled":
        scheduled = event.activity_task_scheduled_event_attributes
        activities[event.event_id] = scheduled.activity_type.name
        return f"{scheduled.activity_type.name} scheduled"
    if kind.startswith("activity_task_"):
        attributes = getattr(event, f"{kind}_event_attributes")
        started = getattr(attributes, "scheduled_event_id", 0)
        return f"{activities.get(started, '?')} {kind.removeprefix('activity_task_')}"
    if kind == "workflow_execution_signaled":
        return f"signal {event.workflow_execution_signaled_event_attributes.signal_name}"
    return kind.replace("workflow_task", "wft")


def table(found: Profile, per: int, rows: int = 14) -> str:
    """A text table of events and gaps, each divided by `per`."""
    lines = [f"  {found.total_ms / per:.1f} ms and {sum(found.events.values()) / per:.1f} events"]
    lines += [f"    {n / per:6.2f} x {name}" for name, n in found.events.most_common(rows)]
    lines += [f"    {ms / per:6.2f} ms  {name}" for name, ms in found.gaps.most_common(rows)]
    return "\n".join(lines)
