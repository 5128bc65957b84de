"""What single events of a history tell: results, reasons, changes, how long a server was lost."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from temporalio.api.common.v1 import Payload, Payloads
from temporalio.api.enums.v1 import WorkflowTaskFailedCause
from temporalio.api.history.v1 import HistoryEvent

from ratchet.api.temporal.event_log import EventBuilder, LoggedEvent
from ratchet.api.temporal.histories import _decode
from ratchet.workflows.protocol.messages import MEMO_KEY

BEGAN = datetime(2026, 1, 1, 12, tzinfo=UTC)


class History:
    """A history that grows, and what its builder tells of each event."""

    def __init__(self) -> None:
        self.builder = EventBuilder("00000000-0000-0000-0000-000000000000", _decode)
        self.number = 0

    def _event(self, at: float) -> HistoryEvent:
        self.number += 1
        event = HistoryEvent(event_id=self.number)
        event.event_time.FromDatetime(BEGAN + timedelta(seconds=at))
        return event

    async def memo(self, at: float = 0, **said: Any) -> list[LoggedEvent]:
        event = self._event(at)
        fields = event.workflow_properties_modified_event_attributes.upserted_memo.fields
        fields[MEMO_KEY].CopyFrom(_payload(said))
        return await self.builder.take(event)

    async def report(self, at: float, state: str, epoch: int, **known: Any) -> LoggedEvent:
        event, value = self._event(at), {"role": "trainer", "index": 0, "state": state}
        signal = event.workflow_execution_signaled_event_attributes
        signal.signal_name = "host_report"
        signal.input.CopyFrom(Payloads(payloads=[_payload({**value, "epoch": epoch, **known})]))
        (reported,) = await self.builder.take(event)
        return reported

    async def failed_task(self, cause: int) -> list[LoggedEvent]:
        event = self._event(0)
        event.workflow_task_failed_event_attributes.cause = cause  # type: ignore[assignment]
        return await self.builder.take(event)


def _payload(value: Any) -> Payload:
    return Payload(metadata={"encoding": b"json/plain"}, data=json.dumps(value).encode())


def clock(seconds: float) -> str:
    return (BEGAN + timedelta(seconds=seconds)).isoformat()


async def test_an_eval_is_reported_with_what_came_of_it() -> None:
    history = History()
    result = {"step": 5.0, "reward": 0.4375, "version": 6.0, "versions": [5, 6], "rollouts": 16}
    (reported,) = await history.memo(eval={"easy": {**result, "epoch": "5-2/easy"}})
    assert reported.message == (
        "eval of easy at step 5: reward 0.438 over 16 rollouts, policy v5 to v6"
    )
    assert reported.data["epoch"] == "5-2/easy" and reported.level == "info"
    none = {**result, "reward": None, "failed": 16, "of": 16, "error": "TaskError: boom"}
    (reported,) = await history.memo(eval={"easy": none})
    assert (
        reported.message
        == (
            "eval of easy at step 5 has no reward, policy v5 to v6; "
            "16 of 16 failed: TaskError: boom"
        )
        and reported.level == "warning"
    )
    (reported,) = await history.memo(
        eval={"easy": {"step": 7.0, "reward": 0.5, "failed": 1, "of": 16, "error": "boom"}}
    )
    assert reported.message == "eval of easy at step 7: reward 0.500; 1 of 16 failed: boom"
    (reported,) = await history.memo(eval={"easy": {"step": 6.0, "reward": 0.5}})
    assert reported.message == "eval of easy at step 6: reward 0.500", "as builds before tell it"


async def test_a_change_of_the_config_is_reported_from_old_to_new() -> None:
    history = History()
    await history.memo(config_revision=0)
    diff = {"max_steps": [40, 80], "dispatch.tasks_per_minute": [None, 600]}
    (reported,) = await history.memo(
        config_changes={"max_steps": 80}, config_diff=diff, config_pending={"max_steps": 80}
    )
    assert reported.type == "run.config" and reported.data["diff"] == diff
    assert reported.message == (
        "the config was changed: max_steps 40 → 80 from the next step on, "
        "dispatch.tasks_per_minute null → 600"
    )
    (reported,) = await history.memo(config_changes={"max_steps": 80}, config_revision=1)
    assert reported.message == "the changes took effect: the config is at revision 1"


async def test_a_pause_is_reported_with_its_reason() -> None:
    history = History()
    await history.memo(status="running")
    reported = await history.memo(status="paused", pause_reason="a look at the rewards")
    assert [e.type for e in reported] == ["run.status"]
    assert reported[0].message == "status: paused (a look at the rewards)"
    assert reported[0].data["reason"] == "a look at the rewards"


async def test_what_is_normal_in_temporal_is_no_error() -> None:
    causes, history = WorkflowTaskFailedCause, History()
    assert await history.failed_task(causes.WORKFLOW_TASK_FAILED_CAUSE_UNHANDLED_COMMAND) == []
    (reported,) = await history.failed_task(
        causes.WORKFLOW_TASK_FAILED_CAUSE_WORKFLOW_WORKER_UNHANDLED_FAILURE
    )
    assert reported.type == "run.stuck" and reported.level == "error"


async def test_a_server_that_comes_back_says_once_how_long_there_was_none() -> None:
    history = History()
    assert "lost_at" not in (await history.report(0, "starting", 1)).data
    assert "back_after_s" not in (await history.report(5, "up", 1)).data
    # Its worker was killed: only the next one reported the loss.
    starting = await history.report(60, "starting", 2, seen_at=clock(31))
    assert starting.data["lost_at"] == "2026-01-01T12:00:31.000Z"
    assert starting.message.endswith("the previous one was last seen at 12:00:31 UTC")
    up = await history.report(65, "up", 2)
    assert up.message == "trainer 0 (epoch 2) is up, back after 34 s"
    assert up.data["back_after_s"] == 34.0 and up.data["lost_at"] == starting.data["lost_at"]
    assert "back_after_s" not in (await history.report(66, "up", 2)).data


async def test_a_loss_begins_when_it_was_first_reported() -> None:
    history = History()
    await history.report(0, "up", 1)
    down = await history.report(10, "down", 1, detail="killed")
    assert down.data["lost_at"] == "2026-01-01T12:00:10.000Z"
    again = await history.report(12, "starting", 2, seen_at=clock(11))
    assert again.data["lost_at"] == down.data["lost_at"]
    assert (await history.report(30, "up", 2)).data["back_after_s"] == 20.0


@pytest.mark.parametrize("seen_at", ["", "yesterday", 7, None, "2026-01-01T12:00:31"])
async def test_a_missing_time_reports_no_loss(seen_at: Any) -> None:
    history = History()
    starting = await history.report(60, "starting", 2, seen_at=seen_at)
    assert "lost_at" not in starting.data
