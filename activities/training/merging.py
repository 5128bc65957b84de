"""Merges an exported adapter into its base.

`python -m ratchet.activities.training.merging BASE ADAPTER OUT`: three folders, of which OUT does
not exist yet.

A process of its own, since clients load no torch. Invariant: the weights are W + (alpha / rank) B A
in float32 by peft, as a trainer exports merged weights, cast to the dtype of the base.
"""

import argparse
import json
import shutil
from pathlib import Path

from ratchet.activities.storage.keys import MODEL_CONFIG
from ratchet.activities.training.adapters import load_merged
from ratchet.activities.training.model import load_model, save

WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


def merge(base: Path, adapter: Path, out: Path) -> None:
    """Writes the whole model to `out`: merged weights, and the other files of the base."""
    about = json.loads((base / MODEL_CONFIG).read_text())
    model = load_merged(load_model(base), adapter)
    shutil.copytree(base, out, ignore=shutil.ignore_patterns(*WEIGHTS))
    save(model, out, about.get("dtype") or about.get("torch_dtype") or "float32")


def main() -> None:
    """Merges one adapter."""
    parser = argparse.ArgumentParser(description="Merge an adapter into its base.")
    for name in ("base", "adapter", "out"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    merge(options.base, options.adapter, options.out)


if __name__ == "__main__":
    main()
