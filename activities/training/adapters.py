"""LoRA adapters (Hu et al., arXiv:2106.09685) on a policy, by peft: make, save, load, merge.

An adapted model is the same model: its targeted layers compute W x + (alpha / rank) B A x, and its
`modules_to_save` are separate copies. Invariants:

- Only the adapter has a gradient. The base weights never change a bit: `merged` restores them.
- Merged weights are W + (alpha / rank) B A in float32, whatever dtype a pass computes in.
- The files of an adapter are a function of its config and tensors, so two of them can be compared.

`python -m ratchet.activities.training.adapters` reads {lora, about} from standard input, where
`about` is a model's config, and prints what is wrong with the adapter, from shapes alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ratchet.activities.contracts.checks import CheckProblem
from ratchet.activities.inference import fingerprints
from ratchet.activities.inference.fingerprints import Fingerprints
from ratchet.activities.runtime.children import (
    as_parent,
    child_env,
    end_with_parent,
    module_command,
)
from ratchet.activities.storage.keys import (
    ADAPTER_CONFIG,
    ADAPTER_FOLDER,
    ADAPTER_WEIGHTS,
    CANARY_FILE,
    FINGERPRINTS_FILE,
)
from ratchet.activities.training.model import canary, canary_sequences, write_canary
from ratchet.activities.training.ranks import ALONE, Ranks, whole
from ratchet.configs.model import ModelConfig
from ratchet.configs.trainer import ALL_LINEAR, LoraConfig

NAME = "default"
"""peft's name for the only adapter of a model."""
CHECK_TIMEOUT_S = 120.0


def adapt(model: Any, lora: LoraConfig, base: ModelConfig) -> Any:
    """Adds an adapter to a model in place and returns peft's handle. A is drawn from torch's global
    generator, B is 0. Raises ValueError for layers that cannot be adapted.
    """
    import peft
    from peft.tuners.lora.layer import ParamWrapper

    names = [name for name, _ in model.named_modules()]
    # peft would also match 'q_norm' by 'norm'.
    whole = [name for wanted in lora.modules_to_save for name in _of(names, wanted)]
    adapter = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.targets if lora.targets == ALL_LINEAR else list(lora.targets),
        modules_to_save=whole or None,
        revision=base.revision,
    )
    handle = peft.get_peft_model(model, adapter)
    adapter.base_model_name_or_path = base.name
    for module in model.modules():
        if isinstance(module, ParamWrapper):
            raise ValueError(
                f"trainer.lora.targets = {lora.targets!r} includes the experts of a mixture, whose "
                "weights are no linear layers and cannot be merged; name the layers of attention"
            )
        # Autocast lowers the input; peft would first copy it to float32, and keep the copy as well.
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False
    model.eval()
    return handle


def write(handle: Any, folder: Path, ranks: Ranks = ALONE) -> None:
    """Writes the adapter to `folder`, as peft does, which loads it on the base. Several ranks call
    it alike; it is small, and gathered on each of them.
    """
    from peft import get_peft_model_state_dict

    tensors = get_peft_model_state_dict(handle, save_embedding_layers=False)
    kept = {name: whole(tensor.detach()).cpu().contiguous() for name, tensor in tensors.items()}
    ranks.at_first_do(lambda: _write(handle, kept, folder))


def _write(handle: Any, tensors: Mapping[str, Any], folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    about = {**handle.peft_config[NAME].to_dict(), "inference_mode": True}
    # peft keeps names as sets, whose order changes from process to process.
    plain = {key: sorted(v) if isinstance(v, set) else v for key, v in about.items()}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(plain, indent=2, sort_keys=True))
    save_file(dict(tensors), folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def export(
    model: Any, handle: Any, tokenizer: Any, folder: Path, base: Fingerprints, served: str
) -> None:
    """Writes a version that is the adapter alone: its files, the fingerprints of it and of its
    `base` as engines hold them in the dtype `served` and, last of all, the canary.

    Engines hold B times alpha / rank, cast before that. Replaces what an earlier export left.
    """
    from safetensors.torch import load_file

    (folder / CANARY_FILE).unlink(missing_ok=True)
    write(handle, folder / ADAPTER_FOLDER)
    tensors = load_file(folder / ADAPTER_FOLDER / ADAPTER_WEIGHTS)
    own = fingerprints.take(_as_served(tensors, handle, served), [served])
    # A base that an older build made may lack this dtype: then no bits are compared.
    known = [kind for kind in own.dtypes if kind in base.dtypes]
    dtypes = {kind: {**base.dtypes[kind], **own.dtypes[kind]} for kind in known}
    shapes = {**base.shapes, **own.shapes}
    fingerprints.write(folder, Fingerprints(shapes, dtypes))
    write_canary(folder, canary(model, canary_sequences(model, tokenizer)), {})


def _as_served(tensors: Mapping[str, Any], handle: Any, served: str) -> Iterator[tuple[str, Any]]:
    import torch

    config = handle.peft_config[NAME]
    scale, dtype = config.lora_alpha / config.r, getattr(torch, served)
    for name, tensor in tensors.items():
        cast = tensor.to(dtype)
        yield name, cast * scale if ".lora_B." in name else cast


def read(handle: Any, folder: Path) -> None:
    """Loads the tensors that `write` wrote; raises ValueError if they are of another adapter."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors.torch import load_file

    tensors = load_file(folder / ADAPTER_WEIGHTS)
    own = get_peft_model_state_dict(handle, save_embedding_layers=False)
    shapes = [{name: tuple(t.shape) for name, t in kind.items()} for kind in (tensors, own)]
    if shapes[0] != shapes[1]:
        name = sorted(set(shapes[0].items()) ^ set(shapes[1].items()))[0][0]
        raise ValueError(
            f"{folder / ADAPTER_WEIGHTS} holds another adapter than trainer.lora and the model "
            f"describe: they differ in {name!r}"
        )
    set_peft_model_state_dict(handle, tensors)


def load_merged(model: Any, folder: Path) -> Any:
    """A model with the adapter in `folder` merged into its weights."""
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(folder)).merge_and_unload().eval()


@contextlib.contextmanager
def merged(model: Any) -> Iterator[None]:
    """A context in which the model is a plain one with merged weights. They take memory in addition
    to the base weights.
    """
    import torch
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import ModulesToSaveWrapper

    adapted = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer | ModulesToSaveWrapper)
    }
    bases: list[tuple[Any, Any]] = []
    try:
        for name, module in adapted.items():
            if isinstance(module, ModulesToSaveWrapper):
                plain = module.modules_to_save[NAME]
            else:
                plain = module.get_base_layer()
                bases.append((plain.weight, plain.weight.data))
                with torch.no_grad():
                    plain.weight.data = plain.weight.data + module.get_delta_weight(NAME)
            model.set_submodule(name, plain)
        yield
    finally:
        for weight, data in bases:
            weight.data = data
        for name, module in adapted.items():
            model.set_submodule(name, module)


@contextlib.contextmanager
def merged_rows(model: Any, ranks: Ranks) -> Iterator[None]:
    """A context in which a model that is sharded over ranks computes with merged weights; each rank
    merges its own rows. They take memory in addition to the base weights.
    """
    import torch
    from peft.tuners.lora import LoraLayer

    bases: list[tuple[Any, Any, Any]] = []
    try:
        for layer in [m for m in model.modules() if isinstance(m, LoraLayer)]:
            factors = (whole(part[NAME].weight.detach()) for part in (layer.lora_B, layer.lora_A))
            with torch.no_grad():
                rows = layer.get_base_layer().weight.to_local()
                bases.append((layer, rows, rows.clone()))
                product = torch.matmul(*factors)
                delta = (product.T if layer.fan_in_fan_out else product) * layer.scaling[NAME]
                own = torch.chunk(delta, ranks.count)[ranks.rank : ranks.rank + 1]
                for part in own:
                    rows += part
            layer.merged_adapters.append(NAME)
        yield
    finally:
        for layer, rows, before in bases:
            rows.copy_(before)
            layer.merged_adapters.clear()


def plain_state(model: Any) -> dict[str, Any]:
    """The tensors of a model; those of an adapted model under their names without the adapter."""
    own = {}
    for name, tensor in model.state_dict().items():
        if ".lora_" in name or ".original_module." in name:
            continue
        plain = name.replace(".base_layer.", ".").replace(f".modules_to_save.{NAME}.", ".")
        own[plain] = tensor
    return own


@contextlib.contextmanager
def dropping(model: Any, lora: LoraConfig | None, seed: int) -> Iterator[None]:
    """A context in which the adapter drops a share of its inputs, chosen by `seed`."""
    if lora is None or not lora.dropout:
        yield
        return
    import torch

    torch.manual_seed(seed)
    layers = [m for name, m in model.named_modules() if name.endswith(f"lora_dropout.{NAME}")]
    try:
        for layer in layers:
            layer.train()
        yield
    finally:
        for layer in layers:
            layer.eval()


def identity(base: Path) -> str:
    """Identifies the base weights in a folder: hex sha256 over the fingerprints of all tensors.

    Raises ValueError for weights without fingerprints, which an older build exported.
    """
    file = base / FINGERPRINTS_FILE
    if not file.exists():
        raise ValueError(
            f"{base} has no {FINGERPRINTS_FILE}, by which an adapter names its base: an older "
            "build made that version 0; begin another run with the same model"
        )
    return hashlib.sha256(file.read_bytes()).hexdigest()


# -- before a run -----------------------------------------------------------------------------


def _named(names: Collection[str]) -> str:
    """The last parts of modules' names, by which a config names them."""
    return ", ".join(sorted({name.rpartition(".")[2] for name in names})) or "none"


def _of(names: Collection[str], wanted: str) -> list[str]:
    return [name for name in names if name == wanted or name.endswith(f".{wanted}")]


def problems(model: Any, lora: LoraConfig) -> dict[str, str]:
    """What is wrong with an adapter for a model, by key of `trainer.lora`."""
    import torch
    from transformers.pytorch_utils import Conv1D

    modules = {name: module for name, module in model.named_modules() if name}
    linear = [n for n, m in modules.items() if isinstance(m, torch.nn.Linear | Conv1D)]
    wanted = [] if lora.targets == ALL_LINEAR else lora.targets
    if unknown := [repr(name) for name in wanted if not _of(linear, name)]:
        there = f"the model's linear layers are {_named(linear)}"
        return {"targets": f"no linear layer is named {' or '.join(unknown)}; {there}"}
    with_weights = [n for n, m in modules.items() if next(m.parameters(), None) is not None]
    if unknown := [repr(name) for name in lora.modules_to_save if not _of(with_weights, name)]:
        there = f"the model's modules with weights are {_named(with_weights)}"
        return {"modules_to_save": f"no module is named {' or '.join(unknown)}; {there}"}
    try:
        adapt(model, lora, ModelConfig())
    except ValueError as error:
        return {"targets": f"peft cannot adapt this model: {error}"}
    return {}


def check(lora: LoraConfig, about: Mapping[str, Any]) -> list[CheckProblem]:
    """The problems of an adapter for a model with the config `about`. Runs a separate process,
    since this one does not load torch. Blocks.
    """
    done = subprocess.run(
        module_command("ratchet.activities.training.adapters"),
        input=json.dumps({"lora": lora.model_dump(mode="json"), "about": about}),
        capture_output=True,
        text=True,
        timeout=CHECK_TIMEOUT_S,
        env=child_env(as_parent()),
    )
    if done.returncode != 0:
        raise RuntimeError(f"checking the adapter ended with {done.returncode}: {done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    return [
        CheckProblem(pointer=f"/trainer/lora/{key}", key=f"trainer.lora.{key}", message=message)
        for key, message in found.items()
    ]


def main() -> None:
    """Checks one adapter."""
    end_with_parent()
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    asked = json.load(sys.stdin)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**asked["about"]))
    print(json.dumps(problems(model, LoraConfig.model_validate(asked["lora"]))))


if __name__ == "__main__":
    main()
