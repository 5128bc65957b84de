"""What a plan says of a config."""

import io

import pytest
from rich.console import Console

from ratchet.api.client.printing import plan_table
from ratchet.api.schemas.run import ResolvedConfig
from ratchet.api.services.launch import plan_of
from ratchet.configs.load import validate
from ratchet.configs.run import RunConfig


@pytest.mark.parametrize(
    ("inference", "precision", "unverified"),
    [
        ({}, "highest", None),
        ({"extra_args": ["--block-size", "32"]}, "highest", None),
        (
            {"extra_args": ["--quantization=fp8"]},
            "highest",
            "quantized layers: --quantization makes engines hold different numbers",
        ),
        (
            {"extra_args": ["--block-size=32", "-q", "fp8"]},
            "highest",
            "quantized layers: --quantization makes engines hold different numbers",
        ),
        ({}, "high", "float32 layers on CPUs: trainer.matmul_precision is 'high'"),
        ({"dtype": "bfloat16"}, "high", None),
    ],
)
def test_plan_names_what_the_gate_cannot_compare_by_bits(
    inference: dict[str, object], precision: str, unverified: str | None
) -> None:
    config = RunConfig.model_validate(
        {
            "max_steps": 1,
            "train": {"env": [{"id": "reverse-text"}]},
            "trainer": {"matmul_precision": precision},
            "inference": inference,
        }
    )
    assert plan_of(config).unverified == unverified


def test_a_run_without_an_end_is_planned_by_the_step() -> None:
    env = {"env": [{"id": "a"}]}
    plan = plan_of(validate({"max_steps": None, "train": env, "eval": env}))
    assert (plan.steps, plan.train_rollouts, plan.checkpoints) == (None, None, None)
    assert plan.rollouts_per_step == 128 and [e.count for e in plan.evals] == [None]
    disk = {"checkpoints": 3 << 20, "being written": 0, "versions": 5 << 20}
    answer = ResolvedConfig(config={"name": "r"}, plan=plan, estimates={"disk": disk})
    out = io.StringIO()
    Console(file=out, width=100).print(plan_table(answer))
    assert "8.0 MiB (versions 5.0 MiB, checkpoints 3.0 MiB)" in out.getvalue()
    assert "until it is stopped" in out.getvalue() and "None" not in out.getvalue()


@pytest.mark.parametrize(
    ("named", "lora", "shown"),
    [
        ("store", {}, "store"),
        ("auto", {}, "adapter"),
        ("adapter", {}, "adapter"),
        ("auto", None, "store: trainer.lora is not set, so that all weights train"),
        (
            "auto",
            {"modules_to_save": ["lm_head"]},
            "store: vLLM serves no adapter with trainer.lora.modules_to_save",
        ),
    ],
)
def test_the_plan_says_how_weights_get_to_engines(
    named: str, lora: dict[str, object] | None, shown: str
) -> None:
    env = {"env": [{"id": "a"}]}
    sections = {"trainer": {"lora": lora}, "inference": {"transfer": named}}
    assert plan_of(validate({"max_steps": 1, "train": env, **sections})).transfer == shown
