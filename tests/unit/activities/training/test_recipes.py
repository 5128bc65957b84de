"""A recipe fits into the GPU that its first lines and docs/hardware.md name, by the preflight's own
estimate. Nobody has run them: what they take is not measured.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from ratchet.activities.training import memory
from ratchet.activities.training.memory import GIB, Shape, host_parts, trainer_parts
from ratchet.configs.load import load
from ratchet.configs.run import RunConfig

ROWS = re.findall(
    r"^\|.* one GPU of (\d+) GB.*\| `ratchet runs create (configs/recipes/\S+)((?: \S+=\S+)*)`"
    r" on a stack with that GPU \| not run \|$",
    Path("docs/hardware.md").read_text(),
    re.MULTILINE,
)
SMALLEST = {"24": 23028, "48": 46068, "80": 81559, "141": 143771}
"""MiB that the driver shows of the smallest GPU of so many GB: A10, L40S, H100, H200."""
SPARE = 2 * GIB
"""What the CUDA contexts of trainer and engines take, and libraries' workspaces, none of which is
estimated.
"""
LIKE: dict[str, Any] = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
SIZES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": {
        "hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072,
        "num_attention_heads": 16,
    },
    "Qwen/Qwen3-1.7B": {
        "hidden_size": 2048, "num_hidden_layers": 28, "intermediate_size": 6144,
        "num_attention_heads": 16,
    },
    "Qwen/Qwen3-4B": {
        "hidden_size": 2560, "num_hidden_layers": 36, "intermediate_size": 9728,
        "num_attention_heads": 32,
    },
    "Qwen/Qwen3-8B": {
        "hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288,
        "num_attention_heads": 32,
    },
}  # fmt: skip
"""As the hub has it in each model's config.json."""


def shape_of(config: RunConfig) -> Shape:
    shape = Shape.read({"model_type": "qwen3", **LIKE, **SIZES[config.model.name]})
    assert shape is not None
    return shape


def test_every_recipe_has_a_row() -> None:
    there = {str(path) for path in Path("configs/recipes").glob("*.toml")}
    assert {path for _, path, _ in ROWS} == there
    trained = {(c.model.name, c.trainer.lora is not None) for c in map(load, sorted(there))}
    full = {(name, False) for name in SIZES if name != "Qwen/Qwen3-8B"}
    assert trained == full | {(name, True) for name in SIZES}


@pytest.mark.parametrize(("sold_as", "path", "overrides"), ROWS)
def test_trainer_and_engine_fit_into_the_gpu_that_is_named(
    sold_as: str, path: str, overrides: str
) -> None:
    config = load(path, overrides.split())
    share, size = config.inference.gpu_memory_utilization, SMALLEST[sold_as] * 2**20
    shape, room = shape_of(config), int((1 - share) * size) - SPARE
    assert memory.problem(shape, config, room=room, gpu=True) is None
    assert memory.engine_problem(shape, config, room=int(share * size), gpu=True) is None
    takes = sum(trainer_parts(shape, config, gpu=True).values()) / GIB
    about = Path(path).read_text().splitlines()[1]
    if not overrides:
        assert about == (
            f"# A GPU of {sold_as} GB: the trainer takes {takes:.0f} GiB by the preflight's "
            f"estimate, the engine {share:.0%} of the GPU.".replace("%", " %")
        )
    if config.trainer.offload_optimizer:
        assert sum(host_parts(shape, config).values()) < 40e9
        plain = load(path, [o for o in overrides.split() if "offload" not in o])
        assert memory.problem(shape, plain, room=room, gpu=True) is not None, "it is needed"
