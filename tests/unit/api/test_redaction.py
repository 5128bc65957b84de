"""What the API shows of histories and documents of older builds, which hold secrets as they were
said; newer ones are redacted when they are written.
"""

from datetime import UTC, datetime

from ratchet.activities.contracts.redact import HIDDEN
from ratchet.api.services.run_view import run_object
from ratchet.api.store.rollouts import items_of
from ratchet.api.temporal.client import Execution
from ratchet.api.temporal.event_log import EventBuilder

SAID = "refused: password=hunter2"


def test_what_a_run_says_of_itself_is_shown_without_secrets() -> None:
    memo = {
        "error": {"code": "BadInput", "message": SAID},
        "end_reason": SAID,
        "paused_because": SAID,
        "alarm": SAID,
        "waiting_for": {"name": SAID},
    }
    for state, kept, reason in (("running", memo, ""), ("failed", memo, ""), ("failed", {}, SAID)):
        result = Execution("r", "TrainingRun", state, datetime.now(UTC), None, kept)
        shown = run_object(result, ui="", namespace="default", reason=reason).model_dump_json()
        assert "hunter2" not in shown and f"refused: password={HIDDEN}" in shown


async def _no_payload(_: object) -> None:
    return None


def test_events_hold_no_secrets() -> None:
    builder = EventBuilder("e", _no_payload)
    builder._on_memo({"alarm": SAID, "trouble": SAID, "waiting_for": {"name": SAID}})
    builder._on_memo({"error": {"code": "x", "message": SAID}, "end_reason": SAID})
    builder._on_end("failed", SAID)
    events = builder._events
    assert len(events) >= 4
    assert "hunter2" not in str(events) and HIDDEN in str(events[-1].data["error"])


def test_errors_of_rollouts_hold_no_secrets() -> None:
    member = {"rollout": 0, "error": {"type": "ProviderError", "message": SAID}}
    result = {"group": "train/1", "kind": "train", "env": "e", "example": 1, "rollouts": [member]}
    (item,) = items_of(result, "r")
    assert item.error == {"type": "ProviderError", "message": f"refused: password={HIDDEN}"}
