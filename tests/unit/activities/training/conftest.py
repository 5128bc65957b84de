"""A tiny random policy folder, made once, and batches for it."""

import random
from pathlib import Path

import pytest
import torch

from ratchet.activities.storage.batch import Sample
from ratchet.activities.training.model import export
from ratchet.activities.training.policy import Recipe, build_model
from ratchet.activities.training.tokenizer import build_tokenizer

SMALL = Recipe(layers=1, hidden=32, heads=2, head_dim=16, feed_forward=64, max_positions=512)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Models this small only lose time to threads."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy") / "v0"
    export(build_model(SMALL, seed=3), build_tokenizer(SMALL.max_positions), folder)
    return folder


def make_sample(rng: random.Random, *, length: int | None = None, prompt: int = 4) -> Sample:
    total = length or rng.randint(prompt + 1, 24)
    sampled = total - prompt
    return Sample(
        group=f"train/{rng.randrange(100)}",
        rollout=rng.randrange(8),
        env="reverse-text",
        reward=rng.random(),
        temperature=1.0,
        token_ids=[rng.randrange(100) for _ in range(total)],
        loss_mask=[False] * prompt + [True] * sampled,
        logprobs=[0.0] * prompt + [-4.6 + 0.2 * rng.random() for _ in range(sampled)],
        advantages=[0.0] * prompt + [rng.choice([-0.5, 0.5])] * sampled,
        versions=[-1] * prompt + [0] * sampled,
    )


def make_batch(seed: int, size: int = 6) -> list[Sample]:
    rng = random.Random(seed)
    return [make_sample(rng) for _ in range(size)]
