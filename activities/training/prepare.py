"""Makes the weights of version 0.

`python -m ratchet.activities.training.prepare --order FILE --out DIR`. The order is JSON: {name,
env, seed}. Optional are `revision` and `renderer`, as the config has them; `lowered`, whether the
trainer computes or engines serve in bfloat16; `recipe`, changes of the default policy's recipe; and
for another run's version its `folder`, base model (`base`) and `license`.
Progress goes to standard output, one JSON line each: {"progress": text}. The result is always an
untied model in Hugging Face layout with tokenizer, fingerprints, canary and `policy.json`
(`storage.keys`). If a model cannot be loaded, the process prints {"problem": text} and ends with
status 2.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, get_args

from ratchet.activities.envs.rendering import AUTO, resolve
from ratchet.activities.runtime.children import end_with_parent
from ratchet.activities.storage.keys import ADAPTER_FOLDER, POLICY_FILE
from ratchet.activities.training import smollm2
from ratchet.activities.training.policy import Recipe, build_model, digest, recipe_of, warm_start
from ratchet.activities.training.tokenizer import build_tokenizer
from ratchet.configs.model import DEFAULT_POLICY, LICENSES, SMOLLM2
from ratchet.configs.trainer import Dtype

PROBLEM = 2


def _say(**message: str) -> None:
    print(json.dumps(message), flush=True)


def _end(problem: str) -> NoReturn:
    _say(problem=problem)
    sys.exit(PROBLEM)


def make_default(recipe: Recipe, env: str, seed: int) -> tuple[Any, Any]:
    """Model and tokenizer of the default policy, warm-started."""
    import torch

    from ratchet.activities.envs import datasets

    torch.set_num_threads(recipe.threads)
    model = build_model(recipe, seed)
    tokenizer = build_tokenizer(recipe.max_positions)
    steps = recipe.clean_limit + recipe.cooldown + recipe.noisy_steps
    examples = datasets.demonstrations(env, steps * recipe.batch, seed)

    def progress(step: int, most: int, loss: float) -> None:
        if step % 10 == 0 or step == most:
            _say(progress=f"warm start on {env}: step {step} of at most {most}, loss {loss:.2f}")

    warm_start(model, tokenizer, examples, recipe, seed, progress)
    return model, tokenizer


def load_named(name: str, source: str, revision: str | None = None) -> tuple[Any, Any]:
    """Model and tokenizer from `source`, a folder or hub name, which the config calls `name`; ends
    the process if they cannot be loaded.
    """
    from transformers import AutoTokenizer

    from ratchet.activities.training.model import load_model

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=revision or "main", trust_remote_code=False
        )
        return load_model(source, revision), tokenizer
    except (OSError, ValueError, KeyError) as error:
        _end(f"model {name!r} cannot be loaded: {error}")


def descent(order: dict[str, Any]) -> dict[str, Any]:
    """{base, license} of the policy: for another run's version those of that run, for a folder
    those in its model card.
    """
    if "folder" in order:
        return {"base": order["base"], "license": order["license"]}
    from huggingface_hub import ModelCard

    name = order["name"]
    file = Path(name).expanduser() / "README.md"
    about = ModelCard.load(file, ignore_metadata_errors=True).data if file.is_file() else None
    base = getattr(about, "base_model", None)
    return {
        "base": base if isinstance(base, str) else name,
        "license": LICENSES.get(name) or getattr(about, "license", None),
    }


def agreeing_renderer(order: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """{'renderer': the one that agrees with the model's template}; {} if none does and the run
    names one. Raises ValueError if it names none.
    """
    try:
        return {"renderer": resolve(order.get("base", order["name"]), tokenizer, {})}
    except ValueError:
        if order.get("renderer", AUTO) == AUTO:
            raise
        return {}


def main() -> None:
    """Prepares one policy."""
    end_with_parent()
    parser = argparse.ArgumentParser(description="Make the weights a run starts from.")
    parser.add_argument("--order", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    order = json.loads(options.order.read_text())

    from ratchet.activities.training.adapters import load_merged
    from ratchet.activities.training.model import export, parameter_count, round_ties

    if order["name"] == DEFAULT_POLICY:
        recipe = replace(recipe_of(order["env"]), **order.get("recipe", {}))
        model, tokenizer = make_default(recipe, order["env"], order["seed"])
        key = digest(recipe, order["env"], order["seed"])
        origin = f"{DEFAULT_POLICY}, warm-started on {order['env']} (recipe {key[:12]})"
    elif order["name"] == SMOLLM2:
        try:
            model, tokenizer = smollm2.make(options.order.parent)
        except ValueError as error:
            _end(str(error))
        origin = f"{SMOLLM2}, from {smollm2.source()}"
    else:
        name, revision = order["name"], order.get("revision")
        model, tokenizer = load_named(name, order.get("folder", name), revision)
        # A version of a run with an adapter. An adapter in a user's own folder is not merged.
        if "folder" in order and (adapter := Path(order["folder"]) / ADAPTER_FOLDER).is_dir():
            model = load_merged(model, adapter)
        origin = f"{name} at {revision}" if revision else name
    count = parameter_count(model)
    # Runs of any dtype share a default policy, and it has no more ties than chance makes.
    lowered = order.get("lowered", False) and order["name"] != DEFAULT_POLICY
    if lowered and (ties := round_ties(model)):
        _say(progress=f"rounded {ties} of {count} weights, which lay between two of bfloat16")
    # Runs that start from it may choose any dtype for their engines.
    export(model, tokenizer, options.out, served=get_args(Dtype), noise=True)
    from_what = descent(order)
    about = {"parameters": count, "origin": origin, **from_what}
    try:
        about |= agreeing_renderer(order | from_what, tokenizer)
    except ValueError as error:
        _end(str(error))
    (options.out / POLICY_FILE).write_text(json.dumps(about))


if __name__ == "__main__":
    main()
