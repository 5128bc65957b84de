"""Every operation of the API under schemathesis and a client that is made of the document, on the
whole real stack and a run that trains.
"""

from collections import Counter
from pathlib import Path

import httpx
import pytest

from ratchet.worker.stack import Addresses, Stack
from tests.e2e.driving import ENDED, get, launch, wait_until
from tests.fuzzing import AFTER, ENDS, fuzz, undone
from tests.generated import make_client, read_every_get

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.stack,
]

SMALL = ("train.batch_size=16", "train.group_size=4", "eval.num_examples=8")


def cancel_others(where: Addresses, known: set[str]) -> list[str]:
    """Cancels every run that is not `known`; returns the statuses that they had."""
    found = get(where, "/v1/runs", limit=100)
    assert not found["has_more"]
    others = [run for run in found["data"] if run["id"] not in known]
    for run in others:
        if run["status"] not in ENDED:
            httpx.post(f"{where.api}/v1/runs/{run['id']}/cancel", timeout=60)
    return [run["status"] for run in others]


def test_a_client_that_is_made_of_the_document_reads_every_get_of_a_live_run(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = stack.up()
    document = get(where, "/openapi.json")
    make_client(document, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    steps = ("max_steps=100000", "checkpoint.interval=2", "eval.interval=2")
    run_id = launch(where, "reverse_text", *steps, *SMALL)
    try:
        wait_until(where, run_id, lambda run: run["checkpoint"] and run["eval"])
        found = get(where, f"/v1/runs/{run_id}/rollouts")["data"]
        about = {"run_id": run_id, "rid": found[0]["id"], "name": "config.json"}
        read = read_every_get(where.api, about)
    finally:
        cancel_others(where, set())
    gets = {verbs["get"]["operationId"] for verbs in document["paths"].values() if "get" in verbs}
    assert read.keys() == gets and len(gets) >= 17
    assert read["get_run"].id == run_id and read["list_engines"].data


def test_replies_of_a_whole_stack_are_as_documented(stack: Stack) -> None:
    where = stack.up()
    steps = ("max_steps=100000", "checkpoint.interval=2", "eval.interval=2")
    about = {"run_id": launch(where, "reverse_text", *steps, *SMALL)}
    wait_until(where, about["run_id"], lambda run: run["checkpoint"] and run["eval"])
    for verb in ENDS:
        about[verb] = launch(where, "reverse_text", *steps, *SMALL)
    for verb in AFTER:
        about[verb] = launch(where, "reverse_text", *steps, *SMALL)
        httpx.post(f"{where.api}/v1/runs/{about[verb]}/cancel", timeout=60)
        wait_until(where, about[verb], lambda run: run["status"] == "cancelled")
    found = get(where, f"/v1/runs/{about['run_id']}/rollouts")["data"]
    known, begun = set(about.values()), Counter[str]()
    try:
        answered = fuzz(
            where.api,
            {**about, "rid": found[0]["id"], "name": "config.json"},
            after=lambda operation: begun.update(cancel_others(where, known)),
        )
    finally:
        cancel_others(where, set())
    print({name: sorted(result) for name, result in answered.items()}, begun)
    assert not undone(answered), "each was asked for something that it could do"
    assert begun, "no run was begun by a request"
    log = (Path(stack.home) / "logs" / "api.log").read_text()
    assert "Traceback" not in log
