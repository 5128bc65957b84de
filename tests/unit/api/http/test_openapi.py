"""Every operation of the API under schemathesis and a client that is made of the document, with
doubles of what a run needs.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import uvicorn

from ratchet.activities.contracts.rollouts import Gauges
from ratchet.activities.storage import keys
from ratchet.activities.storage.series import Series
from ratchet.activities.storage.store import ArtifactStore
from ratchet.api.app import create_app
from ratchet.api.schemas import keys as api_keys
from ratchet.api.store.rollouts import rollout_id
from tests.fuzzing import AFTER, ENDS, fuzz, undone
from tests.generated import make_client, read_every_get
from tests.unit.api.conftest import Served, connection
from tests.unit.api.leaving import put_whole_checkpoint
from tests.unit.api.routes.test_rollouts import batch, group


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


def leave_everything(served: Served, run_id: str) -> str:
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
    put_whole_checkpoint(store, run_id, 2)
    sample = {"time": time.time(), "worker_inflight": 3, **asdict(Gauges(4))}
    Series(run_id, "rollout-host-1").add(sample).write(store)
    return rollout_id("train/4", 0)


@pytest.mark.asyncio(loop_scope="session")
async def test_a_client_that_is_made_of_the_document_reads_every_get(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(served.settings, connection(served.env))
    document = app.openapi()
    await asyncio.to_thread(make_client, document, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    run_id = (await served.start("made"))["id"]
    await served.until(run_id, status="running")
    about = {"run_id": run_id, "rid": leave_everything(served, run_id), "name": "config.json"}
    with in_a_thread(app) as url:
        read = await asyncio.to_thread(read_every_get, url, about)
    gets = {verbs["get"]["operationId"] for verbs in document["paths"].values() if "get" in verbs}
    assert read.keys() == gets and len(gets) >= 17
    assert read["get_run"].id == run_id and read["list_metrics"].data[0].step == 1


async def asked_about(served: Served) -> dict[str, str]:
    """What requests are about: a run with all that can be read of it, and one for each verb that
    ends a run or needs an end.
    """
    about: dict[str, str] = {}
    for name in ("run_id", *ENDS):
        about[name] = (await served.start("fuzzed"))["id"]
        await served.until(about[name], status="running")
    for name in AFTER:
        about[name] = (await served.start("ends"))["id"]
        await served.until(about[name], status="succeeded")
    about["rid"] = leave_everything(served, about["run_id"])
    about["name"] = "model.safetensors"
    return about


@pytest.mark.timeout(300)
@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.nightly
async def test_replies_are_as_documented(served: Served) -> None:
    about = await asked_about(served)
    with in_a_thread(create_app(served.settings, connection(served.env))) as url:
        answered = await asyncio.to_thread(fuzz, url, about)
    assert not undone(answered), "each was asked for something that it could do"


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.asyncio(loop_scope="session")
async def test_keys_and_malformed_headers_make_no_5xx(served: Served, tmp_path: Path) -> None:
    key = api_keys.add(tmp_path / "api_keys.json", "fuzz", ["read", "write"], 10_000_000)
    guarded = replace(served.settings, keys=api_keys.load_keys(None, tmp_path / "api_keys.json"))
    about = await asked_about(served)
    with in_a_thread(create_app(guarded, connection(served.env))) as url:
        answered = await asyncio.to_thread(fuzz, url, about, key=key, malformed=True, examples=30)
    print({name: sorted(result) for name, result in answered.items()})
    assert {401, 403} <= set().union(*answered.values())
    assert not undone(answered), "each was asked for something that it could do"
