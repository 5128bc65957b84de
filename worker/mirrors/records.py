"""Runs as the API shows them, as records: steps, evals with samples of replies, and gauges.

A table of samples has the first rollout of each example, so that tables of one eval's env can be
compared, and more of them only if that makes too few.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ratchet.api.client import Ratchet, Refused
from ratchet.api.schemas.metrics import EvalRecord, GaugeSample, LagSample, MetricsRow
from ratchet.api.schemas.rollouts import RolloutFull
from ratchet.worker.mirrors.state import Record, Sample

PROMPT_CHARS, REPLY_CHARS = 1000, 4000
"""Most characters of each text in a table."""
TIMES = ("time", "heard")
"""Fields that are points in time, not curves."""

log = logging.getLogger("ratchet.mirrors")


def step_record(row: MetricsRow) -> Record:
    """A step as a record; metrics that were not measured are left out."""
    values = {name: value for name, value in row.metrics.items() if value is not None}
    return Record(row.step, row.time, values)


def eval_record(result: EvalRecord, samples: Sequence[Sample] = ()) -> Record:
    """An eval as a record: its numbers as `eval/<env>/<name>`, nested ones by '/'."""
    extra: Mapping[str, Any] = result.model_extra or {}
    values = dict(_numbers(f"eval/{result.env}", extra))
    reported = extra.get("time")
    when = float(reported) if isinstance(reported, int | float) else None
    return Record(result.step or 0, when, values, eval=result.epoch, samples=tuple(samples))


def gauge_record(sample: GaugeSample | LagSample) -> Record:
    """Gauges of a worker at one moment, as `gauges/<worker>/<name>`; its step is Unix seconds."""
    values = dict(_numbers(f"gauges/{sample.source}", sample.model_dump()))
    return Record(int(sample.time), sample.time, values, source=sample.source)


def _numbers(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(f"{prefix}/{name}", value)
        elif isinstance(value, int | float) and not isinstance(value, bool) and name not in TIMES:
            yield f"{prefix}/{name}", float(value)


def read_samples(client: Ratchet, run_id: str, result: EvalRecord, most: int) -> list[Sample]:
    """At most `most` rollouts of an eval, by example. Those that the API refuses permanently, such
    as damaged files, are left out with a warning, so that they hold up no curve.

    Raises RatchetError if a retry may help.
    """
    if not most or result.env is None or result.step is None:
        return []
    first: list[str] = []
    further: list[str] = []
    try:
        for item in client.runs.rollouts(
            run_id, step=result.step, env=result.env, kind="eval", limit=100
        ):
            if item.group.startswith(f"eval/{result.epoch}/"):
                (further if item.index else first).append(item.id)
            if len(first) == most:
                break
    except Refused as refusal:
        _require_final(refusal, run_id, f"eval {result.epoch}")
    samples = []
    for rid in (first + further)[:most]:
        try:
            samples.append(_sample(client.runs.rollout(run_id, rid)))
        except Refused as refusal:
            _require_final(refusal, run_id, rid)
    return sorted(samples, key=lambda sample: sample.example)


def _require_final(refusal: Refused, run_id: str, what: str) -> None:
    if refusal.transient:
        raise refusal
    log.warning("run %s: no samples of %s: %s", run_id, what, refusal)


def _sample(rollout: RolloutFull) -> Sample:
    said = rollout.messages
    roles = [message.get("role") for message in said]
    asked = roles.index("assistant") if "assistant" in roles else len(said)
    return Sample(
        rollout.example,
        _cut("\n\n".join(map(_text, said[:asked])), PROMPT_CHARS),
        _cut("\n\n".join(map(_text, said[asked:])), REPLY_CHARS),
        rollout.reward,
    )


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    called = message.get("tool_calls")
    return f"{content}{json.dumps(called)}" if called else str(content)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
