"""What a run leaves of its policy, without any run: configs, weights, checkpoints, evals."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fastapi import FastAPI
from temporalio.envconfig import ClientConnectConfig

from ratchet.activities.contracts.names import Queues
from ratchet.activities.storage import configs, keys
from ratchet.activities.storage.store import ArtifactStore
from ratchet.api.app import create_app
from ratchet.api.settings import Settings
from ratchet.configs.load import validate
from tests.unit.api.conftest import config

NOWHERE = ClientConnectConfig(target_host="127.0.0.1:1")
ABOUT = {"parameters": 1234, "origin": "ratchet/smollm2-135m", "base": "ratchet/smollm2-135m"}
FILES = {
    "config.json": json.dumps({"model_type": "qwen3", "dtype": "float32"}),
    "tokenizer_config.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "canary.json": "{}",
    "fingerprints.json": "{}",
    "policy.json": json.dumps(ABOUT),
}
MODEL = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer_config.json"]
"""The files that make a model."""
ADAPTER = [keys.ADAPTER_CONFIG, keys.ADAPTER_WEIGHTS]
"""The files that make an adapter."""
BIG = 3 * 2**20 + 1
"""Bytes of weights: more than are read at once."""


def app_of(store: ArtifactStore, **settings: Any) -> FastAPI:
    """An API of a store, whose Temporal is away."""
    return create_app(Settings(store_url=store.url, queues=Queues(), **settings), NOWHERE)


@contextmanager
def _folder(weights: bytes, **more: str) -> Iterator[Path]:
    with TemporaryDirectory() as made:
        for name, text in {**FILES, **more}.items():
            (Path(made) / name).write_text(text)
        (Path(made) / "model.safetensors").write_bytes(weights)
        yield Path(made)


def weights_of(run: str, step: int) -> bytes:
    """The bytes of a version's tensors."""
    return f"{run} {step} ".encode().ljust(BIG, b".")


def put_weights(store: ArtifactStore, run: str, step: int) -> None:
    """Commits exported weights."""
    with _folder(weights_of(run, step)) as folder:
        store.put_folder(keys.weights(run, step), folder, attempt="t")


def put_whole_checkpoint(store: ArtifactStore, run: str, step: int) -> None:
    """Commits a checkpoint, which has more than a model has."""
    more = {name: "state" for name in keys.NOT_WEIGHTS}
    with _folder(weights_of(run, step), **more) as folder:
        store.put_folder(keys.checkpoint(run, step), folder, attempt="t")


def put_adapter(store: ArtifactStore, run: str, step: int) -> None:
    """Commits a version of a run that trains an adapter: merged weights and a checkpoint."""
    with _folder(weights_of(run, step)) as folder:
        (folder / keys.ADAPTER_FOLDER).mkdir()
        for name in ADAPTER:
            (folder / keys.ADAPTER_FOLDER / name).write_text(f"{name} of {run} {step}")
        store.put_folder(keys.weights(run, step), folder, attempt="t")
        for name in [*MODEL, *FILES]:
            (folder / name).unlink(missing_ok=True)
        for name in keys.NOT_WEIGHTS:
            (folder / name).write_text("state")
        store.put_folder(keys.checkpoint(run, step), folder, attempt="t")


def put_eval(
    store: ArtifactStore, run: str, env: str, step: int, mean: float | None, count: int = 1
) -> None:
    """Commits the record of an eval, the `count`-th of its step."""
    epoch = f"{step}-{count}/{env}"
    record = {"epoch": epoch, "env": env, "step": step, "rollouts": 8, "reward_mean": mean}
    store.put_json(keys.eval_record(run, epoch), record)


def leave(
    store: ArtifactStore,
    run: str,
    *,
    weights: Sequence[int] = (),
    checkpoints: Sequence[int] = (),
    steps: int = 0,
    **changes: Any,
) -> None:
    """Leaves a run of so many steps, of which versions are kept."""
    configs.save(store, run, validate(config(**changes)), attempt="t")
    for step in range(1, steps + 1):
        metrics = {"reward/all/mean": step / 100, "loss": -0.5, "config_revision": 0.0}
        store.put_json(keys.step_record(run, step), {"step": step, "time": 1.0, "metrics": metrics})
    for step in weights:
        put_weights(store, run, step)
    for step in checkpoints:
        put_whole_checkpoint(store, run, step)
