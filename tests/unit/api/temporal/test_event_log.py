"""What recorded histories of real runs tell: whole, in order, once, and readable."""

import gzip
from typing import Any

import pytest
from temporalio.api.history.v1 import HistoryEvent
from temporalio.client import WorkflowHistory

from ratchet.activities.contracts.controls import verb_of
from ratchet.activities.contracts.health import HEALTH_REPORT, Finding, HealthReport
from ratchet.activities.contracts.names import FINALIZE_EVAL
from ratchet.activities.contracts.wire import WIRE
from ratchet.api.temporal.event_log import EventBuilder, LoggedEvent, parse_cursor
from ratchet.api.temporal.histories import _decode
from ratchet.workflows.protocol.messages import MEMO_KEY
from tests import ROOT

HISTORIES = ROOT / "tests" / "workflow" / "histories"
EXECUTION = "00000000-0000-0000-0000-000000000000"


def history(name: str) -> WorkflowHistory:
    raw = gzip.decompress((HISTORIES / f"{name}.json.gz").read_bytes()).decode()
    return WorkflowHistory.from_json("run", raw)


async def logged(name: str) -> tuple[list[LoggedEvent], EventBuilder]:
    builder = EventBuilder(EXECUTION, _decode)
    found: list[LoggedEvent] = []
    for event in history(name).events:
        found += await builder.take(event)
    return found, builder


async def finalized(name: str) -> list[str]:
    """Epochs of the evals that an execution finalized, by its activities alone."""
    asked, epochs = {}, []
    for event in history(name).events:
        scheduled = event.activity_task_scheduled_event_attributes
        if scheduled.activity_type.name == FINALIZE_EVAL:
            asked[event.event_id] = (await _decode(scheduled.input.payloads[0]))["epoch"]
        done = event.activity_task_completed_event_attributes.scheduled_event_id
        if done in asked:
            epochs.append(asked[done])
    return epochs


NAMES = sorted(
    str(path.relative_to(HISTORIES)).removesuffix(".json.gz")
    for path in HISTORIES.glob("*/run*.json.gz")
)


@pytest.mark.parametrize("name", NAMES)
async def test_events_rise_and_their_ids_lead_back_to_their_places(name: str) -> None:
    found, builder = await logged(name)
    places = [event.place for event in found]
    assert places == sorted(set(places))
    # There is nothing to report of an execution in the middle of a long eval.
    assert found or (builder.predecessor and builder.successor)
    assert [parse_cursor(event.id) for event in found] == [(EXECUTION, place) for place in places]
    steps = [event.data["step"] for event in found if event.type == "run.step"]
    assert steps == sorted(set(steps))
    assert builder.ended
    assert bool(builder.successor) != (bool(found) and found[-1].type == "run.ended")


async def test_a_run_is_reported_from_its_creation_to_its_end() -> None:
    found, _ = await logged("plain/run")
    assert (found[0].type, found[-1].type) == ("run.created", "run.ended")
    steps = [event.data["step"] for event in found if event.type == "run.step"]
    assert steps == list(range(1, steps[-1] + 1))
    trained = [e for e in found if e.type == "work.done" and e.source == "train_step"]
    assert len(trained) == len(steps)
    assert all(e.data["started_at"] <= e.data["finished_at"] for e in trained)
    assert not [e for e in found if e.type in ("run.config", "run.metadata", "run.trouble")]


async def test_a_lost_engine_is_seen_going_and_coming_back() -> None:
    found, _ = await logged("killed_engine/run")
    engine = [(e.type, e.data["epoch"], e.level) for e in found if e.source == "engine"]
    down = engine.index(("server.down", 1, "warning"))
    assert ("server.up", 2, "info") in engine[down:]


async def test_a_change_is_reported() -> None:
    found, _ = await logged("changed_config/run")
    assert [e.data["changes"] for e in found if e.type == "run.config"]


@pytest.mark.parametrize("name", sorted({name.rpartition("/")[0] for name in NAMES}))
async def test_every_eval_is_reported_from_its_beginning_to_its_end_and_each_once(
    name: str,
) -> None:
    begun: list[str] = []
    ended: list[str] = []
    executions = [one for one in NAMES if one.rpartition("/")[0] == name]
    for execution in executions:
        found, builder = await logged(execution)
        if not builder.predecessor:
            # Another attempt begins them anew.
            begun = []
        for event in found:
            if event.type == "run.status" and event.data["status"] == "starting":
                # What a pause interrupted begins anew.
                begun = []
            elif event.type == "run.eval_started":
                begun.append(event.data["epoch"])
            elif event.type == "run.eval":
                assert event.data["epoch"] in begun
                ended.append(event.data["epoch"])
        assert len(begun) == len(set(begun))
    wanted = [epoch for one in executions for epoch in await finalized(one)]
    assert ended == wanted, "and though the result is that of the eval before"


async def test_an_eval_has_the_time_that_it_took() -> None:
    found, _ = await logged("plain/run")
    spans = [(e.type, e.data["epoch"], e.data["step"]) for e in found if "run.eval" in e.type]
    first, last = "0-0/reverse-text", "3-1/reverse-text"
    assert spans == [
        (kind, epoch, step)
        for epoch, step in ((first, 0), (last, 3))
        for kind in ("run.eval_started", "run.eval")
    ]


@pytest.mark.parametrize(
    ("signal", "value", "said"),
    [
        ("trigger_eval", ["reverse-text"], {"envs": ["reverse-text"]}),
        ("trigger_eval", "reverse-text", {"envs": ["reverse-text"]}),
        ("trigger_eval", '{"env": "a", "reason": "a jump"}', {"envs": ["a"], "reason": "a jump"}),
        ("pause", "cancel", {"mode": "cancel"}),
        ("pause", "the GPUs are needed", {"mode": "drain", "reason": "the GPUs are needed"}),
        ("stop", "token=" + "x" * 300, {"reason": "token=[hidden]"}),
        ("checkpoint", None, {}),
    ],
)
async def test_a_request_is_recorded_as_the_run_reads_it(
    signal: str, value: Any, said: dict[str, Any]
) -> None:
    heard = HistoryEvent(event_id=1)
    attrs = heard.workflow_execution_signaled_event_attributes
    attrs.signal_name = signal
    attrs.input.payloads.extend(await WIRE.encode([value]))
    (event,) = await EventBuilder(EXECUTION, _decode).take(heard)
    verb = verb_of(signal)
    assert verb is not None
    reason = f": {said['reason']}" if "reason" in said else ""
    assert event.message == f"{verb.event}{reason}"
    assert event.data == {"asked": signal, **said}


async def test_what_begins_to_be_the_matter_is_an_event() -> None:
    """As whoever records steps signals it; a rule of a later build is left out."""
    found: list[LoggedEvent] = []
    builder = EventBuilder(EXECUTION, _decode)
    for finding in (Finding("env_failing", "40 % fail", "reverse"), Finding("unheard-of", "?")):
        heard = HistoryEvent(event_id=len(found) + 1)
        signal = heard.workflow_execution_signaled_event_attributes
        signal.signal_name = HEALTH_REPORT
        signal.input.payloads.extend(await WIRE.encode([HealthReport(7, finding)]))
        found += await builder.take(heard)
    (event,) = found
    assert (event.type, event.level) == ("run.health", "warning")
    assert event.message == "An environment fails: 40 % fail"
    assert event.data == {
        "step": 7,
        "rule": "env_failing",
        "subject": "reverse",
        "help": "docs/reading-a-run.md#env-failing",
    }


async def test_drift_and_a_failing_eval_name_their_rule() -> None:
    few = {"step": 4, "reward": 0.5, "failed": 1, "of": 16, "rollouts": 16, "error": "no"}
    many = {**few, "step": 8, "failed": 16, "reward": None}
    found: list[LoggedEvent] = []
    builder = EventBuilder(EXECUTION, _decode)
    for memo in ({"eval": {"e": few}}, {"eval": {"e": many}, "alarm": "mismatch KL 0.5"}):
        heard = HistoryEvent(event_id=len(found) + 1)
        fields = heard.workflow_properties_modified_event_attributes.upserted_memo.fields
        fields[MEMO_KEY].CopyFrom((await WIRE.encode([memo]))[0])
        found += await builder.take(heard)
    some, failing, drift = found
    assert (some.type, some.level) == ("run.eval", "warning") and "rule" not in some.data
    page = "docs/reading-a-run.md"
    assert failing.type == "run.eval" and failing.data["error"] == "no"
    assert failing.data["rule"] == "env_failing" and failing.data["subject"] == "e"
    assert failing.data["help"] == f"{page}#env-failing"
    assert drift.type == "run.alarm" and drift.data["reason"] == "mismatch KL 0.5"
    assert (drift.data["rule"], drift.data["help"]) == ("mismatch", f"{page}#mismatch")
