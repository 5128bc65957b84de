"""schemathesis against the served OpenAPI: no 5xx, no undocumented status, replies as described."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from activities.contracts.rollouts import Gauges
from activities.storage import keys
from activities.storage.series import Series
from activities.storage.store import ArtifactStore
from api.app import create_app
from api.rollout_records import rollout_id
from tests.unit.api.conftest import Served, connection, put_checkpoint
from tests.unit.api.test_rollouts import batch, group

schemathesis = pytest.importorskip("schemathesis")

EXAMPLES = 10
"""Requests to one operation: as many that fit its description, and as many that do not."""
ENDS = ("stop", "cancel")
"""What ends a run: these have one of their own each."""
UNLIKELY = {"PATCH /v1/runs/{run_id}"}
"""Hardly any change of many keys at random gives a config that can work."""


@contextmanager
def in_a_thread(app: Any) -> Iterator[str]:
    """The app on a socket, served by a thread of its own."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


def leave_everything(served: Served, run_id: str, folder: Path) -> str:
    """Puts something of every kind that a run leaves into the store; returns a rollout's id."""
    store: ArtifactStore = served.store
    for step in (1, 2):
        metrics = {"loss": 0.5, "reward/all/mean": float("nan")}
        record = {"step": step, "time": time.time(), "metrics": metrics}
        store.put_json(keys.step_record(run_id, step), record)
    record = {"epoch": "2-1/e", "env": "e", "step": 2, "examples": 1, "reward_mean": 0.5}
    store.put_json(keys.eval_record(run_id, "2-1/e"), {**record, "versions": [2, 2]})
    group(served, run_id, "train/4", "e", [1.0, None])
    batch(served, run_id, 2, "train/4")
    put_checkpoint(store, run_id, 2, folder)
    sample = {"time": time.time(), "worker_inflight": 3, **asdict(Gauges(4))}
    Series(run_id, "host-1").add(sample).write(store)
    return rollout_id("train/4", 0)


def ask(operation: Any, mode: Any, known: dict[str, str], checks: list[Any]) -> set[int]:
    """Sends many requests of one mode to an operation, about half of them about what is `known`;
    returns the statuses that it answered with. Raises Unsatisfiable where none is of the mode.
    """
    told: set[int] = set()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), real=st.booleans())
    def one(case: Any, real: bool) -> None:
        if real:
            names = case.path_parameters or {}
            names.update({name: known[name] for name in names})
        response = case.call(timeout=30)
        told.add(response.status_code)
        case.validate_response(response, checks=checks)

    one()
    return told


def fuzz(url: str, about: dict[str, str]) -> dict[str, set[int]]:
    """Asks every operation; returns the statuses that each answered with. What `about` names like
    an operation is the run that this one ends.
    """
    from schemathesis.checks import not_a_server_error
    from schemathesis.generation import GenerationMode
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    checks = [
        not_a_server_error,
        status_code_conformance,
        content_type_conformance,
        response_schema_conformance,
    ]
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    answered: dict[str, set[int]] = {}
    for operation in (result.ok() for result in schema.get_all_operations()):
        ends = operation.path.rpartition("/")[2]
        known = {**about, "run_id": about.get(ends, about["run_id"])}
        told = ask(operation, GenerationMode.POSITIVE, known, checks)
        # An operation that is given nothing can be given nothing wrong.
        with suppress(Unsatisfiable):
            told |= ask(operation, GenerationMode.NEGATIVE, known, checks)
        answered[operation.label] = told
    return answered


@pytest.mark.timeout(300)
@pytest.mark.asyncio(loop_scope="session")
async def test_replies_are_as_documented(served: Served, tmp_path: Path) -> None:
    about = {}
    for name in ("run_id", *ENDS):
        about[name] = (await served.start("fuzzed"))["id"]
        await served.until(about[name], status="running")
    about["rid"] = leave_everything(served, about["run_id"], tmp_path)
    with in_a_thread(create_app(served.settings, connection(served.env))) as url:
        answered = await asyncio.to_thread(fuzz, url, about)
    done = {name for name, told in answered.items() if any(status < 300 for status in told)}
    assert answered.keys() - done <= UNLIKELY, "each was asked for something that it could do"
