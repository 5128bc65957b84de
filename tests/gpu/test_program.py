"""The program of `make gpu` on the CPU engine with a tiny model, and its parts."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from ratchet.activities.contracts.weights import Tolerance
from ratchet.activities.hosting.spec import ServerSpec
from ratchet.activities.inference.engine import READER
from ratchet.activities.storage.store import ArtifactStore
from tests import ROOT
from tests.gpu import compat
from tests.gpu.drained import Drained, Reply
from tests.gpu.one_gpu import SIZES, config_of, speed, to_samples


async def _never() -> bool:
    return False


SPEC = ServerSpec(
    name="engine 0",
    argv=["--enable-scale-out", "--worker-extension-cls", READER],
    address="http://engine",
    cwd=Path("/"),
    probe=_never,
    model="policy",
)


def engine(answers: Any, store: Path) -> Drained:
    client = httpx.AsyncClient(base_url="http://engine", transport=httpx.MockTransport(answers))
    return Drained(client, SPEC, ArtifactStore(str(store)), Tolerance(1e-4))


def test_an_old_engine_is_started_without_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.32.0+cpu")
    assert compat.started_as_it_can(SPEC) is SPEC
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.26.0")
    argv = compat.started_as_it_can(SPEC).argv
    assert argv == ["--worker-extension-cls", "tests.gpu.compat.Reader"]


async def test_a_reply_has_the_version_that_was_verified_last(tmp_path: Path) -> None:
    choice = {"token_ids": [5], "logprobs": {"content": [{"logprob": -1.5}]}}
    drained = engine(lambda request: httpx.Response(200, json={"choices": [choice]}), tmp_path)
    with pytest.raises(AssertionError, match="no gate has passed"):
        await drained.sample([1], 1, 0)
    drained.version = 3
    assert await drained.sample([1], 1, 0) == Reply(3, [5], [-1.5])

    def pushed_meanwhile(request: httpx.Request) -> httpx.Response:
        late.version = 4
        return httpx.Response(200, json={"choices": [choice]})

    late = replace(engine(pushed_meanwhile, tmp_path), version=3)
    with pytest.raises(AssertionError, match="while a request was open"):
        await late.sample([1], 1, 0)


async def test_it_is_drained_before_it_is_pushed_to(tmp_path: Path) -> None:
    open_requests = [3, 1, 0]
    asked: list[str] = []

    def answers(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        running = open_requests[min(len(asked), len(open_requests)) - 1]
        return httpx.Response(
            200,
            text=f"vllm:kv_cache_usage_perc 0\nvllm:num_requests_running {running}\n"
            "vllm:num_requests_waiting 0\nvllm:num_preemptions_total 0\n"
            'vllm:cache_config_info{num_gpu_blocks="1",block_size="16"} 1\n',
        )

    await engine(answers, tmp_path).drain()
    assert asked == ["/metrics"] * 3


def test_advantages_are_rewards_less_their_groups_mean() -> None:
    group = [Reply(7, [2, 4], [-1.0, -2.0]), Reply(7, [2, 3], [-1.0, -2.0])]
    one, other = to_samples([[9, 9]], [group], 3)
    assert (one.reward, other.reward) == (1.0, 0.5) and one.group == "train/3.0"
    assert one.advantages == [0.0, 0.0, 0.25, 0.25] and other.advantages == [0, 0, -0.25, -0.25]
    assert one.versions == [-1, -1, 7, 7] and one.logprobs == [0.0, 0.0, -1.0, -2.0]


def test_the_first_step_warms_up() -> None:
    steps = [{"perf/throughput": 1.0}, {"perf/throughput": 8.0, "perf/mfu": 0.2}]
    assert speed(steps) == {"tokens_per_s": 8.0, "mfu": 0.2, "train_s": None, "export_s": None}


@pytest.mark.parametrize("name", SIZES)
def test_its_configs_are_valid(name: str) -> None:
    run = config_of(SIZES[name], 20, Path("/model"), deterministic=True)
    assert run.trainer.deterministic and run.context == SIZES[name].length


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_program_on_the_cpu_engine(tmp_path: Path) -> None:
    argv = ["-m", "tests.gpu", "--size", "tiny", "--steps", "2", "--home", str(tmp_path)]
    done = subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    report = cast(dict[str, Any], json.loads(done.stdout.splitlines()[-1]))
    found = SimpleNamespace(**report)
    assert (found.steps, found.problems) == (2, []) and found.replay["difference"] is None
    assert [gate["version"] for gate in found.gates] == [0, 1, 2]
    assert all(
        gate["passed"] and gate["compared"] and not gate["unverified"] for gate in found.gates
    )
    assert found.peak_gib["measured"] > 0 < found.peak_gib["estimated"]
    assert min(found.pause_s, found.push_s, found.gate_s, found.engine_tokens_per_s) > 0
    assert found.deterministic["tokens_per_s"] > 0 < found.plain["tokens_per_s"]
    assert found.plain["mfu"] is None, "nobody knows the peak of a CPU"
