"""Preflight of the sections `model` and `trainer`: does what they name exist, and can a run use it?

Reads files only; imports neither torch nor transformers.
"""

import importlib.util
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ratchet.activities.contracts.checks import CheckProblem
from ratchet.activities.contracts.names import WARM_START_ENVS
from ratchet.activities.envs import rendering
from ratchet.activities.runtime import machine
from ratchet.activities.storage import policies
from ratchet.activities.storage.keys import MODEL_CONFIG
from ratchet.activities.storage.store import ArtifactStore, CorruptArtifact
from ratchet.activities.training import adapters, disk, memory, smollm2
from ratchet.activities.training.custom_loss import module_file
from ratchet.activities.training.model import CANARY_TOKENS
from ratchet.activities.training.policy import Recipe, recipe_of
from ratchet.activities.training.tokenizer import IM_END, IM_START
from ratchet.configs.model import DEFAULT_POLICY, HUB_NAME, SMOLLM2, version_named
from ratchet.configs.pointers import key_of
from ratchet.configs.run import RunConfig

HUB_TIMEOUT_S = 8.0
RANKS_POINTER = "/trainer/ranks"
OFFLOAD_POINTER = "/trainer/offload_optimizer"
MEMORY_POINTER = "/trainer/micro_batch_tokens"
ENGINE_POINTER = "/inference/gpu_memory_utilization"
DISK_POINTER = "/retention/weights"
WEIGHTS = "*.safetensors"


def check_model(config: RunConfig, *, restored: bool = False) -> list[CheckProblem]:
    """Everything wrong with model and trainer of a run, but for another run's version; blocks for
    about HUB_TIMEOUT_S at most. An estimate of memory ends no run that is `restored`, nor does a
    machine without the GPU that it had: it has trained before.
    """
    problems = _check_model(config) + _check_gate(config)
    if config.trains:
        problems += _check_trainer(config)
    estimated = (MEMORY_POINTER, ENGINE_POINTER, OFFLOAD_POINTER)
    return [p for p in problems if not (restored and p.pointer in estimated)]


def check_version(config: RunConfig, store: ArtifactStore) -> list[CheckProblem]:
    """The problems of another run's version that a run begins with; none for any other model."""
    if (version := version_named(config.model.name)) is None:
        return []
    try:
        held = policies.find(store, *version)
        model = policies.model_of(store, held, store.require(held.keys[0]))
        about = json.loads(store.read_file(model, MODEL_CONFIG))
    except (policies.NoVersion, CorruptArtifact, FileNotFoundError) as error:
        return [_problem(str(error))]
    return _check_about(config, about, config.model.name)


def _check_gate(config: RunConfig) -> list[CheckProblem]:
    """An engine holds a sequence of the canary and one token more."""
    if config.trainer.seq_len > CANARY_TOKENS:
        return []
    message = (
        f"{config.trainer.seq_len} is too short: engines prove their weights on sequences of "
        f"{CANARY_TOKENS} tokens; set it to {CANARY_TOKENS + 1} or more"
    )
    return [_problem(message, "/trainer/seq_len")]


def shape_of(config: RunConfig, store: ArtifactStore) -> memory.Shape | None:
    """The sizes of a model that has passed the checks; None for a model of an unknown kind."""
    name = config.model.name
    if name == DEFAULT_POLICY:
        return recipe_of(config.model.warm_start_env).shape
    if name == SMOLLM2:
        return smollm2.SHAPE
    if (version := version_named(name)) is not None:
        held = policies.find(store, *version)
        model = policies.model_of(store, held, store.require(held.keys[0]))
        return memory.Shape.read(json.loads(store.read_file(model, MODEL_CONFIG)))
    file = Path(name).expanduser() / MODEL_CONFIG if _is_path(name) else _config_of_hub(config)
    return memory.Shape.read(_read_json(file))


def estimates(config: RunConfig, shape: memory.Shape) -> dict[str, dict[str, int]]:
    """The memory and the store's disk space that a run will take, in bytes by part."""
    _, gpu = memory_for_trainer(config)
    trainer = {"trainer memory": memory.trainer_parts(shape, config, gpu=gpu)}
    if gpu and config.trainer.offload_optimizer:
        trainer["trainer memory beside the GPU"] = memory.host_parts(shape, config)
    return {
        **(trainer if config.trains else {}),
        "engine memory": memory.engine_parts(shape, config, gpu=gpu),
        "disk": disk.disk_parts(shape, config),
    }


def check_disk(config: RunConfig, shape: memory.Shape, store: ArtifactStore) -> list[CheckProblem]:
    """A problem if the run keeps more at once than the store has free, where it has a limit."""
    free = store.free_bytes()
    message = None if free is None else disk.problem(shape, config, free=free, where=store.url)
    return [] if message is None else [_problem(message, DISK_POINTER)]


def _check_ranks(config: RunConfig) -> list[CheckProblem]:
    """Each of several ranks has a GPU of the machine to itself, or a core."""
    ranks = config.trainer.ranks
    if ranks == 1:
        return []
    gpus = [] if machine.cpu_torch() else machine.gpus()
    there = len(gpus) or machine.cores()
    if ranks <= there:
        return []
    message = (
        f"{ranks} ranks need a {'GPU' if gpus else 'CPU core'} each, and the trainer's machine has "
        f"{there}; set it to {there} or less"
    )
    return [_problem(message, RANKS_POINTER)]


def _check_offload(config: RunConfig) -> list[CheckProblem]:
    """Moments are moved out of a GPU's memory, into that of its machine."""
    if not config.trainer.offload_optimizer or memory_for_trainer(config)[1]:
        return []
    message = (
        "the trainer's machine has no GPU, so that the optimizer's moments are in its memory "
        "anyway; set it to false"
    )
    return [_problem(message, OFFLOAD_POINTER)]


def _check_trainer(config: RunConfig) -> list[CheckProblem]:
    problems = _check_ranks(config) + _check_offload(config)
    loss = config.trainer.loss
    if loss.type == "custom":
        # The module itself is imported by the trainer process alone.
        file = module_file(loss)
        top = loss.function.partition(":")[0].partition(".")[0]
        if file is not None and not file.is_file():
            message = f"there is no {str(file)!r} on the trainer's machine"
            problems.append(_problem(message, "/trainer/loss/path"))
        elif file is None and importlib.util.find_spec(top) is None:
            message = f"there is no module {top!r} on the trainer's machine; set `path`"
            problems.append(_problem(message, "/trainer/loss/function"))
    return problems


def _check_model(config: RunConfig) -> list[CheckProblem]:
    name = config.model.name
    if name == DEFAULT_POLICY:
        return _check_default(config)
    if name == SMOLLM2:
        return _check_smollm2(config)
    if version_named(name) is not None:
        return []
    if _is_path(name):
        return _check_folder(config, Path(name).expanduser())
    if not re.fullmatch(HUB_NAME, name):
        return [_problem(f"{name!r} is neither a folder nor a hub name ('owner/model')")]
    return _check_hub(config)


def _problem(message: str, pointer: str = "/model/name") -> CheckProblem:
    return CheckProblem(pointer, key_of(pointer), message)


def _is_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or Path(name).exists()


def _check_default(config: RunConfig) -> list[CheckProblem]:
    problems = _check_length(config, Recipe().max_positions)
    env = config.model.warm_start_env
    if env not in WARM_START_ENVS:
        known = ", ".join(repr(shipped) for shipped in WARM_START_ENVS)
        message = f"{DEFAULT_POLICY!r} cannot be warm-started on {env!r}; it knows {known}"
        problems.append(_problem(message, "/model/warm_start_env"))
    about = {"model_type": "qwen3", "num_hidden_layers": Recipe().layers}
    return problems + _check_adapter(config, about)


def _check_smollm2(config: RunConfig) -> list[CheckProblem]:
    problems = _check_length(config, smollm2.POSITIONS) + _check_memory(config, smollm2.SHAPE)
    about = {"model_type": "llama", "num_hidden_layers": smollm2.SHAPE.layers}
    problems += _check_adapter(config, about)
    folder = os.environ.get(smollm2.FOLDER)
    if folder and not Path(folder).is_dir():
        problems.append(_problem(f"{smollm2.FOLDER} names {folder!r}, which is no folder"))
    missing = [name for name in smollm2.READERS if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        message = f"{SMOLLM2!r} needs {names}: pip install 'ratchet-rl[smollm2]'"
        problems.append(_problem(message))
    return problems


def _check_folder(config: RunConfig, folder: Path) -> list[CheckProblem]:
    if not folder.is_dir():
        return [_problem(f"there is no folder {str(folder)!r} on the trainer's machine")]
    about = folder / MODEL_CONFIG
    if not about.is_file():
        return [_problem(f"{str(folder)!r} holds no model: config.json is missing")]
    problems = _check_config(config, about)
    if not any(folder.glob(WEIGHTS)):
        problems.append(_problem(f"{str(folder)!r} holds no weights (*.safetensors)"))
    problems += _check_tokenizer(config, folder)
    if not problems and (differs := rendering.problem_aside(config.model, folder)) is not None:
        problems.append(_problem(differs, "/model/renderer"))
    return problems


def _read_json(path: Path) -> dict[str, Any]:
    data = json.loads(path.read_text())
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    return data


def _check_config(config: RunConfig, path: Path) -> list[CheckProblem]:
    try:
        about = _read_json(path)
    except ValueError as error:
        return [_problem(f"{str(path)!r} cannot be read: {error}")]
    return _check_about(config, about, str(path))


def _check_about(config: RunConfig, about: dict[str, Any], where: str) -> list[CheckProblem]:
    architectures = about.get("architectures") or []
    if "model_type" not in about:
        return [_problem(f"{where!r} names no model_type")]
    if not any("CausalLM" in name or "ConditionalGeneration" in name for name in architectures):
        named = ", ".join(architectures) or "none"
        return [_problem(f"not a causal language model: {where!r} has architectures {named}")]
    longest = about.get("max_position_embeddings")
    problems = _check_length(config, longest) if isinstance(longest, int) else []
    problems += _check_memory(config, memory.Shape.read(about))
    return problems + _check_adapter(config, about)


def _check_adapter(config: RunConfig, about: Mapping[str, Any]) -> list[CheckProblem]:
    lora = config.trainer.lora
    if lora is None:
        return []
    if importlib.util.find_spec("peft") is None:
        message = "adapters need peft on the trainer's machine: pip install 'ratchet-rl[trainer]'"
        return [_problem(message, "/trainer/lora")]
    return adapters.check(lora, about)


def _memory_for(share: float) -> tuple[int, bool]:
    """Bytes of this machine's memory, or of that share of its GPU, and whether they are a GPU's."""
    gpu = None if machine.cpu_torch() else machine.gpu_memory()
    return (machine.memory(), False) if gpu is None else (int(gpu * share), True)


def memory_for_trainer(config: RunConfig) -> tuple[int, bool]:
    """Bytes that a trainer may take on this machine, and whether they are a GPU's."""
    # Engines and the trainer share every GPU.
    return _memory_for(1 - config.inference.gpu_memory_utilization)


def _check_memory(config: RunConfig, shape: memory.Shape | None) -> list[CheckProblem]:
    """Problems of memory; none for a model of an unknown kind, which cannot be estimated."""
    if shape is None:
        return []
    room, gpu = memory_for_trainer(config)
    engine_room, _ = _memory_for(config.inference.gpu_memory_utilization)
    found = {}
    if config.trains:
        found[MEMORY_POINTER] = memory.problem(shape, config, room=room, gpu=gpu)
        if gpu and config.trainer.offload_optimizer:
            found[OFFLOAD_POINTER] = memory.host_problem(shape, config, room=machine.memory())
    # Flags may share an engine out, or quantize it.
    if not config.inference.extra_args:
        found[ENGINE_POINTER] = memory.engine_problem(shape, config, room=engine_room, gpu=gpu)
        alone = not gpu and config.trains and not any(found.values())
        if alone and machine.has_all_roles():
            found[MEMORY_POINTER] = memory.together_problem(shape, config, room=room)
    return [_problem(message, pointer) for pointer, message in found.items() if message]


def _check_length(config: RunConfig, longest: int) -> list[CheckProblem]:
    if config.context <= longest:
        return []
    shown = config.context - config.trainer.seq_len
    what = f", with {shown} of the algorithm's demo_tokens," if shown else ""
    message = f"{config.trainer.seq_len}{what} is more than the model's {longest} positions"
    return [_problem(message, "/trainer/seq_len")]


def _check_tokenizer(config: RunConfig, folder: Path) -> list[CheckProblem]:
    files = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
    present = [file for file in files if file.is_file()]
    if not present:
        return [_problem(f"{str(folder)!r} holds no tokenizer (tokenizer.json)")]
    text = "".join(file.read_text() for file in present)
    missing = [token for token in (IM_START, IM_END) if token not in text]
    renderer = config.model.renderer
    if renderer == rendering.CHATML and missing:
        message = (
            f"the tokenizer of {str(folder)!r} lacks {' and '.join(missing)}, which the "
            f"renderer {rendering.CHATML!r} needs; set model.renderer to one made for it"
        )
        return [_problem(message)]
    if rendering.has_template(folder):
        return []
    if renderer == rendering.TEMPLATE or (renderer == rendering.AUTO and missing):
        why = rendering.NOTHING_KNOWN if renderer == rendering.AUTO else rendering.NO_TEMPLATE
        return [_problem(f"{str(folder)!r}: {why}", "/model/renderer")]
    chat = rendering.chat_problem(config, folder)
    return [] if chat is None else [_problem(chat, "/eval/client")]


def _config_of_hub(config: RunConfig) -> Path:
    from huggingface_hub import hf_hub_download

    model = config.model
    return Path(
        hf_hub_download(
            model.name, MODEL_CONFIG, revision=model.revision, etag_timeout=HUB_TIMEOUT_S
        )
    )


def _check_hub(config: RunConfig) -> list[CheckProblem]:
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    name = config.model.name
    try:
        path = _config_of_hub(config)
    except LocalEntryNotFoundError:
        return [
            _problem(
                f"{name!r} is no folder here, and the model hub ({constants.ENDPOINT}) cannot be "
                f"reached; give a folder, or {DEFAULT_POLICY!r}, which needs no download"
            )
        ]
    except HfHubHTTPError as error:
        return [_problem(f"the model hub has no usable {name!r}: {str(error).splitlines()[0]}")]
    return _check_config(config, path)
