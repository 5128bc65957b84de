"""The gate's arithmetic, labels, and what an engine is started with."""

import json
import math
import os
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.activities.contracts.hosting import HostInput
from ratchet.activities.contracts.roles import ServerRole
from ratchet.activities.contracts.weights import Bits, Tolerance
from ratchet.activities.inference import devices, fingerprints
from ratchet.activities.inference.activities import push_label
from ratchet.activities.inference.devices import engine_threads
from ratchet.activities.inference.engine import (
    READER,
    adapted_kinds,
    engine_argv,
    engine_env,
    engine_spec,
    first_weights,
    served_name,
)
from ratchet.activities.inference.fingerprints import Fingerprints
from ratchet.activities.inference.gate import (
    Canary,
    Noise,
    Sequence,
    compare,
    engine_logprobs,
    measured_tolerance,
    parse_canary,
    read_expected,
)
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.storage import keys
from ratchet.configs.run import RunConfig
from ratchet.configs.trainer import LoraConfig
from ratchet.configs.upgrades import config_document

SEQUENCE = Sequence([5, 6, 7], [-1.5, -2.5])
CANARY = Canary([SEQUENCE], {})
NARROW = Tolerance(largest=1e-4)
NOISE = {"float32": Noise(2e-5, 4e-6), "bfloat16": Noise(0.4, 0.1)}


def _config(**inference: object) -> RunConfig:
    return RunConfig.model_validate(
        {"max_steps": 1, "train": {"env": [{"id": "reverse-text"}]}, "inference": inference}
    )


def test_answer_is_read_by_token() -> None:
    answer = {
        "prompt_logprobs": [
            None,
            {"6": {"logprob": -1.0, "rank": 2}, "9": {"logprob": -0.5, "rank": 1}},
            {"7": {"logprob": -2.5, "rank": 1}},
        ]
    }
    assert engine_logprobs(SEQUENCE, answer) == [-1.0, -2.5]
    verdict = compare(CANARY, [[-1.0, -2.5]], NARROW, Bits())
    assert (verdict.position, verdict.diff, verdict.mean) == (1, 0.5, 0.25)
    assert not verdict.passed
    assert str(verdict) == (
        "canary token 1: engine log-probability -1.000000, trainer -1.500000, "
        "difference 5.00e-01, tolerance 1e-04; mean difference 2.50e-01"
    )


def test_mean_difference_is_judged_where_it_has_a_tolerance() -> None:
    one_off, all_off = [-1.5, -3.5], [-2.1, -1.9]
    assert compare(CANARY, [one_off], Tolerance(mean=0.5), Bits()).passed
    verdict = compare(CANARY, [all_off], Tolerance(mean=0.5), Bits())
    assert not verdict.passed
    assert str(verdict).endswith("difference 6.00e-01; mean difference 6.00e-01, tolerance 5e-01")


def test_short_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="scored 0 of 3"):
        engine_logprobs(SEQUENCE, {"prompt_logprobs": None})


def test_nan_never_passes() -> None:
    for tolerance in (Tolerance(largest=1e9), Tolerance(mean=1e9)):
        verdict = compare(CANARY, [[-1.5, math.nan]], tolerance, Bits())
        assert verdict.position == 2
        assert not verdict.passed


def test_position_counts_tokens_of_all_sequences() -> None:
    canary = Canary([SEQUENCE, SEQUENCE], {})
    verdict = compare(canary, [[-1.5, -2.5], [-1.5, -2.0]], NARROW, Bits())
    assert (verdict.position, verdict.engine) == (5, -2.0)


def test_wrong_bits_never_pass_and_are_named_first() -> None:
    wrong = [f"layer.{n} (rank 0): expected a, held b" for n in range(5)]
    verdict = compare(CANARY, [[-1.5, -2.5]], NARROW, Bits(9, wrong))
    assert not verdict.passed
    assert str(verdict).startswith("5 wrong tensors: layer.0 (rank 0): expected a, held b; layer.1")
    assert "layer.3" not in str(verdict)


def test_what_is_not_compared_is_named() -> None:
    assert Bits(7).unverified == ""
    assert Bits(7, [], {"a.weight": "held by Fp8LinearMethod"}).unverified == (
        "1 of 8 tensors verified by log-probabilities alone: a.weight (held by Fp8LinearMethod)"
    )
    assert Bits(unread={"": "no fingerprints"}).unverified == (
        "verified by log-probabilities alone: no fingerprints"
    )


@pytest.mark.parametrize(
    ("compute", "served", "noise", "tolerance"),
    [
        ("float32", "float32", {"float32": Noise(2e-6, 1e-6)}, Tolerance(largest=1e-4)),
        ("float32", "float32", NOISE, Tolerance(largest=4e-4)),
        ("float32", "bfloat16", NOISE, Tolerance(mean=0.3)),
        ("bfloat16", "float32", NOISE, Tolerance(mean=0.3)),
        ("bfloat16", "bfloat16", {"bfloat16": Noise(1e-5, 1e-6)}, Tolerance(mean=1e-4)),
        ("float32", "bfloat16", {}, None),
    ],
)
def test_tolerance_is_a_few_times_the_noise_of_kernels(
    compute: str, served: str, noise: dict[str, Noise], tolerance: Tolerance | None
) -> None:
    config = _config(dtype=served).model_copy(deep=True)
    trainer = config.trainer.model_copy(update={"compute_dtype": compute})
    config = config.model_copy(update={"trainer": trainer})
    measured = measured_tolerance(config, noise)
    if tolerance is None:
        assert measured is None
    else:
        assert measured is not None
        assert measured.largest == pytest.approx(tolerance.largest)
        assert measured.mean == pytest.approx(tolerance.mean)


def test_canary_of_an_older_build_is_one_sequence_without_noise() -> None:
    old = json.dumps({"token_ids": [5, 6, 7], "logprobs": [-1.5, -2.5]})
    assert parse_canary(old, "canary.json") == CANARY


def test_noise_of_an_older_build_is_its_largest_and_an_estimated_mean() -> None:
    sequence = {"token_ids": [5, 6, 7], "logprobs": [-1.5, -2.5]}
    old = {"schema": 1, "sequences": [sequence], "noise": {"bfloat16": 0.4}}
    read = parse_canary(json.dumps(old), "canary.json")
    assert read == Canary([SEQUENCE], {"bfloat16": Noise(0.4, 0.1)})


@given(
    st.lists(
        st.tuples(st.floats(-50, 0), st.floats(-50, 0)),
        min_size=1,
        max_size=20,
    ),
    st.floats(1e-9, 50),
)
def test_passes_exactly_within_tolerance(pairs: list[tuple[float, float]], tol: float) -> None:
    sequence = Sequence(list(range(len(pairs) + 1)), [trainer for _, trainer in pairs])
    engine = [[engine for engine, _ in pairs]]
    canary = Canary([sequence], {})
    apart = [abs(a - b) for a, b in pairs]
    assert compare(canary, engine, Tolerance(largest=tol), Bits()).passed == (max(apart) <= tol)
    mean = sum(apart) / len(apart)
    assert compare(canary, engine, Tolerance(mean=tol), Bits()).passed == (mean <= tol)


@pytest.mark.parametrize(
    "canary", [{"token_ids": [1], "logprobs": []}, {"token_ids": [1, 2], "logprobs": [0.0, 0.0]}]
)
def test_malformed_canary_is_refused(tmp_path: Path, canary: dict[str, list[float]]) -> None:
    with pytest.raises(ValueError, match="cannot be verified"):
        read_expected(tmp_path)
    (tmp_path / "canary.json").write_text(json.dumps(canary))
    with pytest.raises(ValueError, match="log-probabilities"):
        read_expected(tmp_path)


def test_labels_are_unique_over_tries() -> None:
    labels = [push_label(7, 12, number) for number in range(26)]
    assert labels[:3] == ["7.12a", "7.12b", "7.12c"]
    assert labels[25] == "7.12z"
    assert len(set(labels)) == 26


def test_command_line_on_cpu_and_gpu() -> None:
    config = _config(kv_cache_gib=0.25, extra_args=["--max-num-seqs", "7"])
    argv = partial(engine_argv, config, weights=Path("/w"), bind="127.0.0.1", port=80, model="m")
    cpu = argv(cpu=True)
    assert cpu[cpu.index("--kv-cache-memory-bytes") + 1] == str(2**28)
    assert cpu[-2:] == ["--max-num-seqs", "7"]
    assert cpu[cpu.index("--worker-extension-cls") + 1] == READER
    gpu = argv(cpu=False)
    assert "--enforce-eager" not in gpu and "--gpu-memory-utilization" in gpu
    assert "VLLM_CPU_OMP_THREADS_BIND" not in engine_env(cpu=False)
    assert "VLLM_CPU_OMP_THREADS_BIND" in engine_env(cpu=True)


@pytest.mark.parametrize("cpu", [True, False])
def test_engines_on_a_cpu_get_a_share_of_its_cores(
    cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "on_cpu", lambda: cpu)
    config = _config(engines=3)

    def share(role: ServerRole) -> dict[str, str]:
        return devices.DEVICES.share(HostInput("r", role, 0, "q"), config)

    threads = str(engine_threads(len(os.sched_getaffinity(0)), 3))
    assert share("engine") == ({"OMP_NUM_THREADS": threads} if cpu else {})
    assert share("trainer") == {}


def test_threads_leave_room_for_the_trainer() -> None:
    assert [engine_threads(2, 1), engine_threads(2, 2), engine_threads(16, 3)] == [1, 1, 4]


def test_served_names_differ_by_run_engine_and_epoch() -> None:
    seen = {served_name(r, i, e) for r in ("a", "b") for i in range(2) for e in range(2)}
    assert len(seen) == 8


async def test_each_epoch_has_its_own_port_and_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path / "store"), own_queue="own")
    ctx.store.put_json(keys.config("r"), _config().model_dump(mode="json"))
    folder = ctx.scratch("w")
    (folder / "config.json").write_text("{}")
    weights = ctx.store.put_folder("w", folder, attempt="a")
    host = HostInput("r", "engine", 0, "q", weights=weights)
    one = await engine_spec(ctx, host, 1)
    monkeypatch.setenv("RATCHET_ADVERTISE_HOST", "10.1.2.3")
    two = await engine_spec(ctx, host, 2)
    assert one.address.startswith("http://127.0.0.1:") and "127.0.0.1" in one.argv
    assert two.address.startswith("http://10.1.2.3:") and "0.0.0.0" in two.argv
    assert one.address != two.address and one.model != two.model
    assert not await one.probe()


@pytest.mark.parametrize("precision", ["highest", "high"])
async def test_engines_multiply_as_the_trainer_does(tmp_path: Path, precision: str) -> None:
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path / "store"), own_queue="own")
    config = _config().model_dump(mode="json")
    config["trainer"]["matmul_precision"] = precision
    ctx.store.put_json(keys.config("r"), config)
    folder = ctx.scratch("w")
    (folder / "config.json").write_text("{}")
    weights = ctx.store.put_folder("w", folder, attempt="a")
    spec = await engine_spec(ctx, HostInput("r", "engine", 0, "q", weights=weights), 1)
    assert spec.env["VLLM_FLOAT32_MATMUL_PRECISION"] == precision


async def test_engine_whose_first_weights_were_pruned_starts_from_version_0(tmp_path: Path) -> None:
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path / "store"), own_queue="own")
    ctx.store.put_json(keys.config("r"), _config().model_dump(mode="json"))
    refs = {}
    for version in (0, 9):
        folder = ctx.scratch(f"w{version}")
        (folder / "config.json").write_text(f'{{"version": {version}}}')
        refs[version] = ctx.store.put_folder(keys.weights("r", version), folder, attempt="a")
    host = HostInput("r", "engine", 0, "q", weights=refs[9])
    assert first_weights(ctx.store, host) == refs[9]
    ctx.store.delete(refs[9])
    spec = await engine_spec(ctx, host, 1)
    served = Path(spec.argv[list(spec.argv).index("--model") + 1])
    assert (served / "config.json").read_text() == '{"version": 0}'


def _adapted(rank: int = 24, **inference: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "max_steps": 1,
            "train": {"env": [{"id": "reverse-text"}], "max_lag": 2, "max_off_policy_steps": 5},
            "trainer": {"lora": {"rank": rank}},
            "inference": inference,
        }
    )


SHAPES = {
    "model.embed_tokens.weight": [8, 4],
    "model.layers.0.self_attn.q_proj.weight": [4, 4],
    "model.layers.0.mlp.down_proj.weight": [4, 6],
    "model.layers.1.mlp.down_proj.weight": [4, 6],
    "model.layers.1.norm.weight": [4],
    "lm_head.weight": [8, 4],
}


def test_an_engine_holds_adapters_of_as_many_versions_as_may_be_in_flight(tmp_path: Path) -> None:
    fingerprints.write(tmp_path, Fingerprints(SHAPES, {}))
    argv = partial(engine_argv, weights=tmp_path, bind="b", port=80, model="m", cpu=True)
    own = ["--max-loras", "9"]
    found = argv(_adapted(transfer="auto", extra_args=own))
    first = found.index("--enable-lora")
    flags = ["--max-lora-rank", "32", "--max-loras", "4", "--max-cpu-loras", "7"]
    kinds = ["--lora-target-modules", "down_proj", "q_proj"]
    assert found[first:] == ["--enable-lora", *flags, *kinds, *own]
    assert "--enable-lora" not in argv(_adapted())
    named = LoraConfig(targets=["layers.0.mlp.up_proj", "q_proj"])
    assert adapted_kinds(named, tmp_path) == ["q_proj", "up_proj"]


@pytest.mark.parametrize(("transfer", "first"), [("store", 9), ("adapter", 0)])
async def test_an_engine_of_adapters_starts_from_their_base(
    tmp_path: Path, transfer: str, first: int
) -> None:
    ctx = WorkerContext(home=tmp_path, store_url=str(tmp_path / "store"), own_queue="own")
    ctx.store.put_json(keys.config("r"), config_document(_adapted(transfer=transfer)))
    for version in (0, 9):
        folder = ctx.scratch(f"w{version}")
        (folder / "config.json").write_text(f'{{"version": {version}}}')
        fingerprints.write(folder, Fingerprints(SHAPES, {}))
        ref = ctx.store.put_folder(keys.weights("r", version), folder, attempt="a")
    spec = await engine_spec(ctx, HostInput("r", "engine", 0, "q", weights=ref), 1)
    served = Path(spec.argv[list(spec.argv).index("--model") + 1])
    assert json.loads((served / "config.json").read_text())["version"] == first
    allowed = spec.env.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING")
    assert allowed == ("1" if transfer == "adapter" else None)
