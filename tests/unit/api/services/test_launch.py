"""What a plan says of a config."""

import pytest

from ratchet.api.services.launch import plan_of
from ratchet.configs.run import RunConfig


@pytest.mark.parametrize(
    ("inference", "precision", "unverified"),
    [
        ({}, "highest", None),
        ({"extra_args": ["--block-size", "32"]}, "highest", None),
        (
            {"extra_args": ["--quantization=fp8"]},
            "highest",
            "quantized layers: --quantization makes engines hold other numbers",
        ),
        (
            {"extra_args": ["--block-size=32", "-q", "fp8"]},
            "highest",
            "quantized layers: --quantization makes engines hold other numbers",
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
