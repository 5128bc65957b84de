"""Records what the replay tests replay: the histories of every kind of run.

    python -m tests.workflow.record              every kind, into histories/<kind>/
    python -m tests.workflow.record plain stopped    only these

The kinds are played on a dev server of their own. A run's executions are found by following its
histories: continue-as-new to the next one, child starts to generations and hosts. Invariants:

- Every recorded execution is closed, so that a replay compares its every command.
- A kind whose histories do not show what makes it that kind is not recorded.
- Files are written only after all kinds were played; they name neither machine nor path.
"""

import asyncio
import base64
import gzip
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowHistory
from temporalio.runtime import LoggingConfig, Runtime, TelemetryConfig, TelemetryFilter
from temporalio.testing import WorkflowEnvironment

from ratchet.activities.contracts.names import Queues
from ratchet.activities.contracts.wire import WIRE
from ratchet.worker.client import register_search_attributes
from ratchet.worker.temporal_server import DYNAMIC_CONFIG
from ratchet.workflows.protocol.messages import DISPATCH, HOST, PREFLIGHT, TRAINING_RUN
from tests.workflow.kinds import KINDS, Kind
from tests.workflow.running import worker
from tests.workflow.stage import Handle, Stage

HISTORIES = Path(__file__).parent / "histories"
WORKFLOW_TYPES = (TRAINING_RUN, DISPATCH, HOST, PREFLIGHT)
LEFT_OUT = ("stackTrace", "requestId", "taskId")
"""Paths of this machine, and bookkeeping of its server; a replay reads none of them."""
QUIET = TelemetryFilter(core_level="ERROR", other_level="ERROR")
"""The faults that are played are not worth a warning."""
AT_ONCE = 4
PLAYED_WITHIN_S = 420.0
CLOSED_WITHIN_S = 60.0


def text_of(history: dict[str, Any]) -> str:
    """A history as text, one value a line, payloads decoded."""
    return "\n".join(_values(history))


def _values(node: Any, name: str = "") -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _values(value, key)
    elif isinstance(node, list):
        for value in node:
            yield from _values(value)
    elif name == "data":
        yield base64.b64decode(node).decode(errors="replace")
    else:
        yield str(node)


def missing(kind: Kind, histories: list[dict[str, Any]]) -> list[str]:
    """What the histories of `kind` do not show and should."""
    text = "\n".join(text_of(history) for history in histories)
    return [what for what in kind.shows if what not in text]


def _kept(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _kept(value) for key, value in node.items() if key not in LEFT_OUT}
    return [_kept(value) for value in node] if isinstance(node, list) else node


async def _histories(client: Client, root: Handle) -> list[WorkflowHistory]:
    """The histories of a workflow, of those it continued as, and of all their children."""
    found: list[WorkflowHistory] = []
    ahead = [(root.id, root.first_execution_run_id)]
    while ahead:
        workflow_id, run_id = ahead.pop(0)
        handle = client.get_workflow_handle(workflow_id, run_id=run_id)
        async with asyncio.timeout(CLOSED_WITHIN_S):
            # With `wait_new_event` the last event is the one that closes the execution.
            events = [e async for e in handle.fetch_history_events(wait_new_event=True)]
        found.append(WorkflowHistory(workflow_id, events))
        for event in events:
            if event.event_type == EventType.EVENT_TYPE_CHILD_WORKFLOW_EXECUTION_STARTED:
                child = event.child_workflow_execution_started_event_attributes
                ahead.append(
                    (child.workflow_execution.workflow_id, child.workflow_execution.run_id)
                )
        last = events[-1].workflow_execution_continued_as_new_event_attributes
        if last.new_execution_run_id:
            ahead.append((workflow_id, last.new_execution_run_id))
    return found


async def record(client: Client, kind: Kind) -> dict[str, bytes]:
    """Plays one kind; returns its files by name. Raises AssertionError if it does not show."""
    stage = Stage(client, Queues(*[f"queue-{kind.name}"] * 5), kind=kind.name)
    async with asyncio.timeout(PLAYED_WITHIN_S), worker(stage):
        await kind.play(stage)
        found = [h for root in stage.roots for h in await _histories(client, root)]
    histories = [_kept(history.to_json_dict()) for history in found]
    lacking = missing(kind, histories)
    assert not lacking, f"{kind.name} does not show {lacking}"
    assert "WORKER_UNHANDLED_FAILURE" not in str(histories), f"a task of {kind.name} failed"
    files: dict[str, bytes] = {}
    for history, content in zip(found, histories, strict=True):
        stem = history.workflow_id.removeprefix(kind.name).strip("/").replace("/", "-") or "run"
        again = sum(name.startswith(f"{stem}.") for name in files)
        name = f"{stem}.{again + 1}.json.gz" if again else f"{stem}.json.gz"
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        files[name] = gzip.compress(text.encode(), mtime=0)
    return files


def read(path: Path) -> dict[str, Any]:
    """A recorded history, as JSON."""
    content: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return content


def started(history: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a history's first event: the workflow's id, type and input."""
    first: dict[str, Any] = history["events"][0]["workflowExecutionStartedEventAttributes"]
    return first


def _write(recorded: dict[str, dict[str, bytes]]) -> None:
    for kind, files in recorded.items():
        folder = HISTORIES / kind
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)


async def main(wanted: list[str]) -> None:
    """Records the kinds named, or all; with all, folders of other kinds are removed."""
    known = [kind.name for kind in KINDS]
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"no kind {', '.join(unknown)}; kinds: {', '.join(known)}")
    recorded: dict[str, dict[str, bytes]] = {}
    turns = asyncio.Semaphore(AT_ONCE)

    async def take(kind: Kind) -> None:
        async with turns:
            began = time.monotonic()
            files = recorded[kind.name] = await record(client, kind)
            size = sum(map(len, files.values())) / 1000
            seconds = time.monotonic() - began
            print(
                f"{kind.name}: {len(files)} histories, {size:.0f} kB, {seconds:.0f} s", flush=True
            )

    extra = [word for setting in DYNAMIC_CONFIG for word in ("--dynamic-config-value", setting)]
    async with await WorkflowEnvironment.start_local(
        dev_server_existing_path=str(Path(sys.executable).parent / "temporal"),
        dev_server_extra_args=extra,
        dev_server_log_level="error",
        data_converter=WIRE,
        identity="recorder",
        runtime=Runtime(telemetry=TelemetryConfig(logging=LoggingConfig(filter=QUIET))),
    ) as environment:
        client = environment.client
        await register_search_attributes(client)
        async with asyncio.TaskGroup() as tasks:
            for kind in KINDS:
                if not wanted or kind.name in wanted:
                    tasks.create_task(take(kind))
    if not wanted:
        for folder in HISTORIES.iterdir():
            if folder.is_dir() and folder.name not in known:
                shutil.rmtree(folder)
    _write(recorded)


if __name__ == "__main__":
    for logger in ("temporalio.activity", "temporalio.workflow"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    asyncio.run(main(sys.argv[1:]))
    sys.stdout.flush()
    # The SDK's native runtime can crash while the interpreter is torn down (sdk-python #300).
    os._exit(0)
