"""Flags of engines: which are Ratchet's own in any spelling, and which are about speed alone."""

from pathlib import Path
from typing import Any

import pytest

from ratchet.activities.inference.engine import engine_argv
from ratchet.configs import engine_flags
from ratchet.configs.engine_flags import admitted, flag_of, is_flag, own_flags
from ratchet.configs.run import RunConfig


def config(**inference: Any) -> RunConfig:
    env = [{"id": "reverse-text"}]
    return RunConfig.model_validate({"max_steps": 1, "train": {"env": env}, "inference": inference})


@pytest.mark.parametrize("cpu", [True, False])
def test_every_flag_that_an_engine_is_started_with_is_known_as_ours(cpu: bool) -> None:
    argv = engine_argv(config(), weights=Path("/w"), bind="::", port=8, model="m", cpu=cpu)
    flags = [argument for argument in argv if argument.startswith("--")]
    assert "--load-format" in flags
    assert set(flags) <= {*engine_flags.OWN, *engine_flags.SHARED}


@pytest.mark.parametrize(
    ("arguments", "name", "remedy"),
    [
        (["--host", "0.0.0.0"], "--host", "remove it"),
        (["--host=0.0.0.0"], "--host", "remove it"),
        (["--ho=0.0.0.0"], "--host", "remove it"),
        (["--max_num_seqs", "7"], "--max-num-seqs", "inference.max_num_seqs"),
        (["--max-num-se", "7"], "--max-num-seqs", "inference.max_num_seqs"),
        (["--gpu_memory_util=0.9"], "--gpu-memory-utilization", "gpu_memory_utilization"),
        (["--device-memory-utilization=0.9"], "--device-memory", "gpu_memory_utilization"),
        (["--no-enable-prefix-caching"], "--enable-prefix-caching", "remove it"),
        (["--no-enable_prefix"], "--enable-prefix-caching", "remove it"),
        (["--dtype", "half"], "--dtype", "inference.dtype"),
        (["--seed=3"], "--seed", "set seed"),
        (["--config", "/tmp/x.yaml"], "--config", "the flags themselves"),
        (["--load-format", "pt"], "--load-format", "remove it"),
        (["--worker-extension-cls", "evil.M"], "--worker-extension-cls", "remove it"),
        (["--worker_ext=evil.M"], "--worker-extension-cls", "remove it"),
        (["--model", "evil/model"], "--model", "model.name"),
        (["evil/model"], "", "for the model"),
        (["--enforce-eager", "evil/model"], "", "for the model"),
        (["--block-size=32", "evil/model"], "", "for the model"),
        (["--", "evil/model"], "", "remove it"),
    ],
)
def test_flags_of_ratchet_are_refused_in_every_spelling(
    arguments: list[str], name: str, remedy: str
) -> None:
    message = next(own_flags(arguments))[1]
    assert name in message and remedy in message


@pytest.mark.parametrize(
    "arguments",
    [
        ["--block-size", "32"],
        ["--block_size=32"],
        ["-tp", "2"],
        ["-O3"],
        ["-q=fp8"],
        ["--enforce-eager"],
        ["--no-enable-chunked-prefill", "--disable-log-stats"],
        ["--cudagraph-capture-sizes", "1", "2", "4"],
        ["--max-logprobs", "-1"],
    ],
)
def test_flags_about_speed_are_let_through(arguments: list[str]) -> None:
    assert list(own_flags(arguments)) == []
    assert all(admitted(argument, ()) for argument in arguments)


@pytest.mark.parametrize(
    "argument",
    [
        "--middleware",
        "--trust-remote-code",
        "--trust_remote_code",
        "--trust-rem",
        "--scheduler-cls=evil.S",
        "--compilation-config.backend",
        "-cc.backend",
        "--hf-overrides",
        "--block",
        "-qfp8",
        "--logits-processors",
    ],
)
def test_other_flags_need_an_entry(argument: str) -> None:
    assert not admitted(argument, ())
    assert list(own_flags([argument])) == []
    assert admitted(argument, (flag_of(argument),))


def test_values_are_no_flags() -> None:
    assert [is_flag(text) for text in ("-1", "-0.5", "32", "-q", "--x", "{}")] == [
        False,
        False,
        False,
        True,
        True,
        False,
    ]
