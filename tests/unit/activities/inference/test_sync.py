"""Weight sync against a small HTTP engine: order of calls, losses, refusals and labels."""

import http.server
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from ratchet.activities.contracts import names
from ratchet.activities.contracts.training import SyncInput, SyncResult
from ratchet.activities.inference.activities import InferenceActivities
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.storage import keys

CANARY: dict[str, list[Any]] = {"token_ids": [5, 6, 7], "logprobs": [-1.5, -2.5]}


class Engine(http.server.ThreadingHTTPServer):
    """Answers as an engine does; `scores` are what successive canaries are scored with."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.calls: list[str] = []
        self.labels: list[str] = []
        self.scores: list[list[float]] = []
        self.model = "m-1"
        self.broken = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Engine

    def _answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        found = bool(self.server.model)
        self._answer(200 if found else 404, {"data": [{"id": self.server.model}]})

    def do_POST(self) -> None:
        engine = self.server
        path = self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        engine.calls.append(path)
        if path == engine.broken:
            self._answer(500, {"error": "out of luck"})
        elif path == "/inference/v1/generate":
            scores = zip(CANARY["token_ids"][1:], engine.scores.pop(0), strict=True)
            self._answer(
                200, {"prompt_logprobs": [None, *({str(t): {"logprob": s}} for t, s in scores)]}
            )
        else:
            if path == "/update_weight_version":
                engine.labels.append(json.loads(body)["new_version"])
            self._answer(200, {})

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as engine:
        thread = threading.Thread(target=engine.serve_forever, args=(0.05,))
        thread.start()
        yield engine
        engine.shutdown()
        thread.join()


class Sync:
    """The activity with weights in a store."""

    def __init__(self, home: Path, engine: Engine) -> None:
        weights = home / "weights"
        weights.mkdir()
        (weights / "canary.json").write_text(json.dumps(CANARY))
        ctx = WorkerContext(home=home, store_url=str(home / "store"), own_queue="own")
        ctx.store.put_json(keys.config("r"), {"max_steps": 1, "train": {"env": [{"id": "e"}]}})
        ref = ctx.store.put_folder("w", weights, attempt="a")
        self.activities = InferenceActivities(ctx)
        self.input = SyncInput("r", 7, ref, 0, 1, engine.url, "m-1", 12, 1e-4)

    async def run(self, attempt: int = 1) -> SyncResult:
        env = ActivityEnvironment()
        env.info = replace(env.info, attempt=attempt)
        return await env.run(self.activities.sync_weights, self.input)


async def test_push_then_canary(tmp_path: Path, engine: Engine) -> None:
    engine.scores = [[-1.5, -2.50001]]
    result = await Sync(tmp_path, engine).run()
    assert (result.label, result.rejected) == ("7.12a", [])
    assert result.max_diff == pytest.approx(1e-5)
    assert engine.calls == [
        "/pause",
        "/update_weight_version",
        "/collective_rpc",
        "/resume",
        "/inference/v1/generate",
    ]


async def test_second_try_passes_and_names_the_first(tmp_path: Path, engine: Engine) -> None:
    engine.scores = [[-1.5, -9.0], [-1.5, -2.5]]
    result = await Sync(tmp_path, engine).run()
    assert (result.label, result.rejected) == ("7.12b", ["7.12a"])
    assert engine.labels == ["7.12a", "7.12b"]


async def test_later_attempt_disowns_the_labels_of_earlier_ones(
    tmp_path: Path, engine: Engine
) -> None:
    engine.scores = [[-1.5, -2.5]]
    result = await Sync(tmp_path, engine).run(attempt=2)
    assert (result.label, result.rejected) == ("7.12c", ["7.12a", "7.12b"])


async def test_refusal_has_both_numbers(tmp_path: Path, engine: Engine) -> None:
    engine.scores = [[-1.5, -9.0], [-1.25, -2.5]]
    with pytest.raises(ApplicationError) as error:
        await Sync(tmp_path, engine).run()
    assert error.value.type == names.GATE_FAILED and error.value.non_retryable
    assert list(error.value.details) == ["7.12a", "7.12b"]
    assert "engine log-probability -1.250000, trainer -1.500000" in error.value.message


async def test_failed_reload_resumes_and_is_retried(tmp_path: Path, engine: Engine) -> None:
    engine.broken = "/collective_rpc"
    with pytest.raises(ApplicationError, match="out of luck") as error:
        await Sync(tmp_path, engine).run()
    assert not error.value.non_retryable
    assert engine.calls[-1] == "/resume"


@pytest.mark.parametrize(("model", "why"), [("m-2", "serves m-2 instead"), ("", "something else")])
async def test_another_server_is_not_pushed_to(
    tmp_path: Path, engine: Engine, model: str, why: str
) -> None:
    engine.model = model
    with pytest.raises(ApplicationError, match=why) as error:
        await Sync(tmp_path, engine).run()
    assert error.value.type == names.ENGINE_LOST and error.value.non_retryable
    assert engine.calls == []


async def test_nobody_there(tmp_path: Path, engine: Engine) -> None:
    sync = Sync(tmp_path, engine)
    sync.input = replace(sync.input, url="http://127.0.0.1:1")
    with pytest.raises(ApplicationError, match="nobody listens") as error:
        await sync.run()
    assert error.value.type == names.ENGINE_LOST and error.value.non_retryable
