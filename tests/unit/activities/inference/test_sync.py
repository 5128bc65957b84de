"""Weight sync against a small HTTP engine: order of calls, losses, refusals and labels."""

import http.server
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from ratchet.activities.contracts import names
from ratchet.activities.contracts.training import SyncInput, SyncResult
from ratchet.activities.inference import fingerprints
from ratchet.activities.inference.activities import InferenceActivities
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.storage import keys
from ratchet.configs.run import RunConfig
from ratchet.configs.upgrades import config_document

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
        self.held: list[tuple[int, Any]] = []
        self.adapters: dict[str, str] = {}
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Engine

    def _answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        found = bool(self.server.model)
        served = [self.server.model, *self.server.adapters]
        self._answer(200 if found else 404, {"data": [{"id": name} for name in served]})

    def _load(self, body: dict[str, str]) -> None:
        """As vLLM answers: in plain words."""
        self.server.adapters[body["lora_name"]] = body["lora_path"]
        self.send_response(200)
        self.send_header("content-length", "7")
        self.end_headers()
        self.wfile.write(b"Success")

    def do_POST(self) -> None:
        engine = self.server
        path = self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        engine.calls.append(path)
        if path == engine.broken:
            self._answer(500, {"error": "out of luck"})
        elif path == "/collective_rpc" and engine.held and b"held_fingerprints" in body:
            self._answer(*engine.held.pop(0))
        elif path == "/v1/load_lora_adapter":
            self._load(json.loads(body))
        elif path == "/v1/unload_lora_adapter":
            del engine.adapters[json.loads(body)["lora_name"]]
            self._answer(200, "Success")
        elif path == "/inference/v1/generate":
            engine.asked.append(json.loads(body)["model"])
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

    def __init__(self, home: Path, engine: Engine, tensor: torch.Tensor | None = None) -> None:
        weights = home / "weights"
        weights.mkdir()
        if tensor is not None:
            fingerprints.write(weights, fingerprints.take([("a", tensor)], ["float32"]))
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
    assert result.unverified == (
        "verified by log-probabilities alone: these weights were exported without fingerprints"
    )
    assert engine.calls == [
        "/pause",
        "/update_weight_version",
        "/collective_rpc",
        "/resume",
        "/inference/v1/generate",
    ]
    seconds = result.seconds
    assert seconds.keys() == {"receive", "load", "pause", "verify"}
    assert min(seconds.values()) > 0 and seconds["load"] < seconds["pause"]


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


def _holding(tensor: torch.Tensor) -> tuple[int, Any]:
    """The answer of an engine that holds `tensor` as the only one."""
    row = ("a", [0, 2, 0, 4], 8, fingerprints.hexed(fingerprints.fingerprint(tensor)))
    answer = {"dtype": "float32", "next": None, "rows": [row], "unread": {}}
    return 200, {"results": [answer]}


async def test_bits_are_compared_though_log_probabilities_agree(
    tmp_path: Path, engine: Engine
) -> None:
    right, stale = torch.arange(8.0).reshape(2, 4), torch.zeros(2, 4)
    engine.scores = [[-1.5, -2.5]] * 2
    engine.held = [_holding(stale), _holding(right)]
    result = await Sync(tmp_path, engine, right).run()
    assert (result.label, result.rejected, result.unverified) == ("7.12b", ["7.12a"], "")
    assert engine.calls.count("/collective_rpc") == 4


async def test_refusal_names_tensor_rank_and_both_fingerprints(
    tmp_path: Path, engine: Engine
) -> None:
    right, stale = torch.arange(8.0).reshape(2, 4), torch.zeros(2, 4)
    engine.scores = [[-1.5, -2.5]] * 2
    engine.held = [_holding(stale)] * 2
    with pytest.raises(ApplicationError, match="1 wrong tensors") as error:
        await Sync(tmp_path, engine, right).run()
    wanted = fingerprints.hexed(fingerprints.fingerprint(right))
    assert f"a (rank 0): expected {wanted}, held {'0' * 16}" in error.value.message


async def test_engine_without_a_reader_is_verified_by_log_probabilities(
    tmp_path: Path, engine: Engine
) -> None:
    missing = "Call to collective_rpc method failed: Method 'held_fingerprints' is not implemented."
    engine.scores = [[-1.5, -2.5]]
    engine.held = [(500, {"error": {"message": missing}})]
    result = await Sync(tmp_path, engine, torch.ones(2, 4)).run()
    assert result.unverified.endswith("the engine was started without held_fingerprints")


@pytest.mark.parametrize("fixed", [None, 0.25])
async def test_noise_of_version_0_widens_a_tolerance_that_the_config_leaves_open(
    tmp_path: Path, engine: Engine, fixed: float | None
) -> None:
    sync = Sync(tmp_path, engine)
    inference = {"dtype": "bfloat16", "gate_tolerance": fixed}
    config = {"max_steps": 1, "train": {"env": [{"id": "e"}]}, "inference": inference}
    stored = config_document(RunConfig.model_validate(config))
    sync.activities.ctx.store.put_json(keys.config("noisy"), stored)
    first = tmp_path / "first"
    first.mkdir()
    canary = {
        "schema": 2,
        "sequences": [CANARY],
        "noise": {"bfloat16": {"largest": 0.2, "mean": 0.1}},
    }
    (first / "canary.json").write_text(json.dumps(canary))
    sync.activities.ctx.store.put_folder(keys.weights("noisy", 0), first, attempt="a")
    sync.input = replace(sync.input, run_id="noisy", tolerance=fixed or 0.1)
    engine.scores = [[-1.5, -2.0]] * 2
    if fixed is None:
        assert (await sync.run()).max_diff == 0.5
    else:
        with pytest.raises(ApplicationError, match="tolerance 2e-01"):
            await sync.run()


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


class AdapterSync(Sync):
    """The activity in a run that pushes adapters alone; version 0 has none."""

    def __init__(self, home: Path, engine: Engine, version: int = 7) -> None:
        super().__init__(home, engine)
        store = self.activities.ctx.store
        config = {
            "max_steps": 9,
            "train": {"env": [{"id": "e"}]},
            "trainer": {"lora": {"rank": 4}},
            "inference": {"transfer": "adapter"},
        }
        stored = config_document(RunConfig.model_validate(config))
        store.put_json(keys.config("adapted"), stored)
        folder = home / "version"
        folder.mkdir()
        (folder / "canary.json").write_text(json.dumps(CANARY))
        if version:
            (folder / "adapter").mkdir()
            (folder / "adapter" / "adapter_config.json").write_text("{}")
        ref = store.put_folder(keys.weights("adapted", version), folder, attempt="a")
        self.input = replace(self.input, run_id="adapted", version=version, weights=ref)


async def test_an_adapter_is_loaded_under_a_name_of_its_own_and_nothing_is_paused(
    tmp_path: Path, engine: Engine
) -> None:
    engine.scores = [[-1.5, -9.0], [-1.5, -2.5]]
    result = await AdapterSync(tmp_path, engine).run()
    assert (result.label, result.rejected, result.model) == ("7.12b", ["7.12a"], "m-1@7.12b")
    assert engine.calls == ["/v1/load_lora_adapter", "/inference/v1/generate"] * 2
    assert engine.asked == list(engine.adapters) == ["m-1@7.12a", "m-1@7.12b"]
    assert all(path.endswith("/adapter") for path in engine.adapters.values())
    assert engine.labels == [], "rollouts in flight keep the label that they have"
    assert result.seconds.keys() == {"receive", "load", "verify"}


async def test_version_0_of_an_adapter_is_the_engines_own_base(
    tmp_path: Path, engine: Engine
) -> None:
    engine.scores = [[-1.5, -2.5]]
    result = await AdapterSync(tmp_path, engine, version=0).run()
    assert (result.label, result.model, engine.adapters) == ("0.12a", "", {})
    assert engine.calls == [
        "/pause",
        "/update_weight_version",
        "/resume",
        "/inference/v1/generate",
    ]
    assert (engine.labels, engine.asked) == (["0.12a"], ["m-1"])


async def test_adapters_that_no_rollout_uses_are_unloaded_once_the_next_is_verified(
    tmp_path: Path, engine: Engine
) -> None:
    engine.scores = [[-1.5, -2.5]]
    engine.adapters = dict.fromkeys(["m-1@4.9a", "m-1@5.10b", "m-1@6.11a", "theirs"], "/a")
    sync = AdapterSync(tmp_path, engine)
    sync.input = replace(sync.input, model="m-1@6.11a", oldest=6)
    assert (await sync.run()).model == "m-1@7.12a"
    assert list(engine.adapters) == ["m-1@6.11a", "theirs", "m-1@7.12a"]
    assert engine.calls[-2:] == ["/v1/unload_lora_adapter"] * 2


async def test_a_refused_adapter_takes_no_other_one_away(tmp_path: Path, engine: Engine) -> None:
    engine.scores = [[-1.5, -9.0]] * 2
    engine.adapters = {"m-1@5.10b": "/a"}
    sync = AdapterSync(tmp_path, engine)
    sync.input = replace(sync.input, model="m-1@5.10b", oldest=6)
    with pytest.raises(ApplicationError) as error:
        await sync.run()
    assert error.value.type == names.GATE_FAILED
    assert "m-1@5.10b" in engine.adapters
