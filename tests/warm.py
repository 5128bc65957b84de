"""The policy that a run starts from, made before the run asks for it."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from ratchet.activities.runtime.children import module_command
from ratchet.activities.storage import keys
from ratchet.activities.storage.store import ArtifactStore
from ratchet.activities.training.policy import digest, recipe_of
from ratchet.configs.model import DEFAULT_POLICY
from ratchet.configs.run import RunConfig


def make_policy(config: RunConfig, folder: Path) -> None:
    """Makes the policy that a run of `config` starts from, in a process of its own, in `folder`.
    Raises ValueError if `config` has a model of its own.
    """
    if config.model.name != DEFAULT_POLICY:
        raise ValueError(f"model.name: only {DEFAULT_POLICY} is made on first use")
    order = {"name": config.model.name, "env": config.model.warm_start_env, "seed": config.seed}
    with tempfile.TemporaryDirectory(prefix="ratchet-order-") as scratch:
        file = Path(scratch) / "order.json"
        file.write_text(json.dumps(order))
        command = module_command("ratchet.activities.training.prepare", "--order", str(file))
        subprocess.run([*command, "--out", str(folder)], check=True, stdout=sys.stderr)


def put_policy(store: ArtifactStore, config: RunConfig, folder: Path) -> None:
    """Puts what `make_policy` made where a run of `config` looks first."""
    env = config.model.warm_start_env
    cache = keys.policy_cache(digest(recipe_of(env), env, config.seed))
    store.put_folder(cache, folder, attempt="warm")
