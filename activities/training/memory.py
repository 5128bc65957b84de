"""Estimates the memory that a trainer and an engine take, by part, from a model's config alone.

Pure: needs neither torch nor weights. Sizes are in bytes. The model is a decoder like Llama and
Qwen: grouped-query attention, gated feed-forward, two norms a layer, untied embeddings.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ratchet.activities.contracts import names
from ratchet.configs.run import RunConfig
from ratchet.configs.trainer import ALL_LINEAR, LoraConfig

GIB = 2**30
LIBRARIES = 450 * 2**20
"""Python, torch and transformers, once imported."""
LAUNCHER = 250 * 2**20
"""Python and torch in the process that starts several ranks."""
ENGINE_LIBRARIES = 1800 * 2**20
"""Python, torch and vLLM in the two processes of an engine on a CPU."""
BYTES = {"float32": 4, "bfloat16": 2}
BLOCK_LOGITS = {"cpu": 2**24, "cuda": 2**27}
"""Logits held at once, 64 MiB on a CPU and 512 MiB on a GPU in float32. A GPU needs more rows at
once for the speed of one multiplication."""
BFLOAT16_KERNELS = 400 * 2**20
"""What a CPU with AVX512-BF16 holds in addition for any model, as measured with models of 30 and
86 million parameters."""
KEPT_BACK = 0.1
"""Share of a pass's memory that the allocator loses to fragments, as measured on three models."""
KEPT_BACK_BY_ADAPTERS = 0.5
"""The same on a CPU, where an adapter's small tensors lie between the large ones: 0.3 to 0.7, as
measured on three models, and less in some runs of one. To have each large tensor mapped by itself
saves a third of the peak, but steps take half as long again. A GPU's allocator keeps small ones in
blocks of their own."""
STEPPED = 3 * 4
"""Bytes that the step of a parameter takes on a GPU whose moments are brought there: two moments at
most, and one tensor of its size that the step computes."""
QK_NORMS = ("qwen3", "qwen3_moe", "olmo2", "gemma3_text")
"""Model types that normalise queries and keys."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder: widths in numbers, `heads` and `kv_heads` times the width of a head.

    `inner` is the width of the feed-forward that a token meets, `experts` how many of it there are.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    qk_norm: bool = False
    experts: int = 1
    met: int = 1

    @staticmethod
    def read(about: Mapping[str, Any]) -> "Shape | None":
        """From a Hugging Face config (its text part); None if it is no decoder of this kind."""
        about = about.get("text_config", about)
        try:
            hidden, heads = int(about["hidden_size"]), int(about["num_attention_heads"])
            width = int(about.get("head_dim") or hidden // heads)
            experts = int(about.get("num_experts") or about.get("num_local_experts") or 1)
            return Shape(
                layers=int(about["num_hidden_layers"]),
                hidden=hidden,
                heads=heads * width,
                kv_heads=int(about.get("num_key_value_heads") or heads) * width,
                inner=int(about.get("moe_intermediate_size") or about["intermediate_size"]),
                vocab=int(about["vocab_size"]),
                qk_norm=about.get("model_type") in QK_NORMS,
                experts=experts,
                met=int(about.get("num_experts_per_tok") or 1),
            )
        except (KeyError, TypeError, ValueError):
            return None

    @property
    def matrices(self) -> int:
        """Parameters of the layers' matrices."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.experts * self.hidden * self.inner)

    @property
    def parameters(self) -> int:
        """All parameters, with an output head of its own."""
        return self.matrices + 2 * self.vocab * self.hidden + (2 * self.layers + 1) * self.hidden

    @property
    def largest(self) -> int:
        """Values of the largest parameter: embedding, head, or a matrix of a feed-forward, where
        experts have two of each in one.
        """
        layer = self.inner * (2 * self.experts if self.experts > 1 else 1)
        return self.hidden * max(self.vocab, layer)


def _adapter(shape: Shape, lora: LoraConfig) -> tuple[int, int]:
    """Parameters of an adapter with what is trained whole beside it, and of the layers that it
    changes. Targets of other names count as all linear layers of a token's way would.
    """
    sizes = {
        "q_proj": (shape.hidden, shape.heads),
        "k_proj": (shape.hidden, shape.kv_heads),
        "v_proj": (shape.hidden, shape.kv_heads),
        "o_proj": (shape.heads, shape.hidden),
        "gate_proj": (shape.hidden, shape.inner),
        "up_proj": (shape.hidden, shape.inner),
        "down_proj": (shape.inner, shape.hidden),
    }
    whole = shape.vocab * shape.hidden
    saved = whole * len({"lm_head", "embed_tokens"} & set(lora.modules_to_save))
    names = list(sizes)
    if lora.targets != ALL_LINEAR and {*lora.targets} <= {*sizes, "lm_head"}:
        names = [name for name in names if name in lora.targets]
    added = shape.layers * sum(lora.rank * sum(sizes[name]) for name in names)
    changed = shape.layers * sum(wide * high for wide, high in (sizes[name] for name in names))
    if lora.targets != ALL_LINEAR and "lm_head" in lora.targets:
        added, changed = added + lora.rank * (shape.hidden + shape.vocab), changed + whole
    return added + saved, changed


def adapter_size(shape: Shape, lora: LoraConfig) -> int:
    """Parameters of an adapter with what is trained whole beside it."""
    return _adapter(shape, lora)[0]


def _layer(shape: Shape, low: int, attended: int) -> int:
    """What one layer keeps of a token for its backward pass, where products have `low` bytes each,
    and queries, keys and values as attention takes them have `attended`.

    A norm keeps its input and what it normalised, in float32, and its output as the products take
    it; attention its queries, keys, values, output and that output as a row; the feed-forward four
    times its width.
    """
    norms = 2 * shape.hidden * (4 + 4 + low)
    attention = attended * 2 * (shape.heads + shape.kv_heads) + low * shape.heads
    if shape.qk_norm:
        attention += (shape.heads + shape.kv_heads) * (4 + 4)
    return norms + attention + 4 * shape.met * shape.inner * low


def trainer_parts(shape: Shape, config: RunConfig, *, gpu: bool) -> dict[str, int]:
    """Bytes of each part at the peak of a training step: of one rank, which has a GPU to itself, or
    of all ranks, which share a machine without one. `loading` is what the peak before the first
    step has beyond that: each of several GPUs takes all weights, before they are sharded. On a CPU
    ranks map them from one file.
    """
    ranks, parts = config.trainer.ranks, _rank_parts(shape, config, gpu=gpu)
    if gpu and ranks > 1:
        parts["loading"] = max(4 * shape.parameters - sum(parts.values()), 0)
    if gpu or ranks == 1:
        return parts
    return {**{name: ranks * size for name, size in parts.items()}, "launcher": LAUNCHER}


def host_parts(shape: Shape, config: RunConfig) -> dict[str, int]:
    """Bytes of each part in a machine's memory of a trainer on its GPUs that offloads its moments,
    of all ranks together.
    """
    ranks = config.trainer.ranks
    plain = _with(config, offload_optimizer=False)
    moments = trainer_parts(shape, plain, gpu=True)["moments"]
    launcher = {"launcher": LAUNCHER} if ranks > 1 else {}
    return {"libraries": ranks * LIBRARIES, "moments": ranks * moments, **launcher}


def host_problem(shape: Shape, config: RunConfig, *, room: int) -> str | None:
    """Why the moments of a trainer that offloads them do not fit into `room` bytes of its machine,
    and what would help; None if they fit.
    """
    parts = host_parts(shape, config)
    if sum(parts.values()) <= room:
        return None
    return (
        f"beside its GPU a trainer that offloads its moments takes some "
        f"{sum(parts.values()) / GIB:.1f} GiB ({shown(parts)}), and the machine has "
        f"{room / GIB:.1f} GiB; set it to false, train an adapter (trainer.lora), or take a "
        "machine with more memory"
    )


def _gathered(shape: Shape, trained: bool) -> tuple[int, int]:
    """Bytes of weights that a rank holds whole while a layer computes: embedding, head, that layer
    and the next; and at the end of the backward pass: embedding and head with their gradients, if
    they have any, as they are and put together for the sum over ranks.
    """
    ends, layer = 4 * 2 * shape.vocab * shape.hidden, 4 * shape.matrices // shape.layers
    return ends + 2 * layer, ends * (3 if trained else 1)


def _rank_parts(shape: Shape, config: RunConfig, *, gpu: bool) -> dict[str, int]:
    """Bytes of each part of one rank, when the last layer's forward is done. The merged weights of
    an adapter, the gradients that ranks sum last, and the moments of a parameter that are brought
    for its step, are made when activations are gone, and count beyond these.
    """
    trainer, ranks = config.trainer, config.trainer.ranks
    low = 2 if trainer.compute_dtype == "bfloat16" else 4
    count = trained = shape.parameters
    changed, whole_logits, orthogonal = 0, False, shape.matrices
    if (lora := trainer.lora) is not None:
        trained, changed = _adapter(shape, lora)
        count += trained
        whole_logits = "lm_head" in {*lora.targets, *lora.modules_to_save}
        orthogonal = trained
    offloaded = gpu and trainer.offload_optimizer
    moments = {"adamw": 2 * trained, "sgd": trained, "signsgd": 0}
    moments["muon"] = 2 * trained - orthogonal
    if trainer.optim.type == "sgd" and trainer.optim.momentum == 0:
        moments["sgd"] = 0
    tokens, samples = trainer.micro_batch_tokens, config.train.batch_size
    if samples is not None:
        tokens = min(tokens, samples * trainer.seq_len)
    layer = _layer(shape, low, attended=low if gpu else 4)
    kept = 4 * shape.hidden * shape.layers + layer
    per_token = kept if trainer.activation_checkpointing else shape.layers * layer
    block = max(BLOCK_LOGITS["cuda" if gpu else "cpu"] // shape.vocab, 1)
    rows = tokens if whole_logits else min(tokens, block)
    activations = tokens * (per_token + 3 * 4 * shape.hidden)
    head = 3 * 4 * rows * shape.vocab
    if lora is None or whole_logits:
        head += 4 * shape.vocab * shape.hidden
    kept_back = KEPT_BACK if lora is None or gpu else KEPT_BACK_BY_ADAPTERS
    libraries = LIBRARIES + (BFLOAT16_KERNELS if low == 2 else 0)
    stepped = STEPPED * min(shape.largest, trained) // ranks
    brought = max(stepped - activations - head, 0)
    gathered = {}
    if ranks > 1:
        computing, at_end = _gathered(shape, lora is None or whole_logits)
        gathered["gathered weights"] = max(computing, at_end - activations - head)
    return {
        "libraries": 0 if gpu else libraries,
        "weights": 4 * count // ranks,
        **gathered,
        "gradients": 4 * trained // ranks,
        "moments": brought if offloaded else 4 * moments[trainer.optim.type] // ranks,
        "lowered weights": 0 if low == 4 else 2 * (count - shape.vocab * shape.hidden),
        "merged weights": max(4 * changed // ranks - activations - head, 0),
        "activations": activations,
        "head": head,
        "allocator": int(kept_back * (activations + head)),
    }


def engine_parts(shape: Shape, config: RunConfig, *, gpu: bool) -> dict[str, int]:
    """Bytes of each part of an engine. On a GPU the least: its KV cache takes what weights leave of
    the engine's share, and must hold one context.
    """
    low = BYTES[config.inference.dtype]
    context = 2 * low * shape.layers * shape.kv_heads * config.context
    return {
        "libraries": 0 if gpu else ENGINE_LIBRARIES,
        "weights": low * shape.parameters,
        "KV cache": context if gpu else int(config.inference.kv_cache_gib * GIB),
    }


def engine_problem(shape: Shape, config: RunConfig, *, room: int, gpu: bool) -> str | None:
    """Why an engine does not fit into `room` bytes, and what would help; None if it fits."""
    parts = engine_parts(shape, config, gpu=gpu)
    if sum(parts.values()) <= room:
        return None
    keys = "inference.gpu_memory_utilization" if gpu else "inference.kv_cache_gib"
    help = f"{'raise' if gpu else 'lower'} {keys}"
    if config.inference.dtype == "float32":
        help += ' or set inference.dtype = "bfloat16"'
    return (
        f"an engine takes some {sum(parts.values()) / GIB:.1f} GiB ({shown(parts)}), and on a "
        f"machine like the trainer's there are {room / GIB:.1f} GiB for it; {help}, or take a "
        "smaller model or a machine with more memory"
    )


def together_problem(shape: Shape, config: RunConfig, *, room: int) -> str | None:
    """Why trainer and engines of a run, each of which fits by itself, do not fit together into
    `room` bytes of a machine without a GPU, and what would help; None if they fit.
    """
    trainer = sum(trainer_parts(shape, config, gpu=False).values())
    engine = sum(engine_parts(shape, config, gpu=False).values())
    count = config.inference.engines
    if trainer + count * engine <= room:
        return None
    sizes = _remedies(shape, config, gpu=False)
    left = room - count * engine
    fitting = {text: size for text, size in sizes.items() if size <= left}
    help = [f"set {_sizes(fitting)} for the trainer"] if fitting else []
    help += ["lower inference.kv_cache_gib"] + (["take fewer engines"] if count > 1 else [])
    what = "an engine" if count == 1 else f"{count} engines"
    return (
        f"a trainer takes some {trainer / GIB:.1f} GiB and {what} {count * engine / GIB:.1f} GiB, "
        f"and the machine that they share has {room / GIB:.1f} GiB; {', '.join(help)}, or run "
        "trainer and engines on different machines"
    )


def _with(config: RunConfig, **trainer: Any) -> RunConfig:
    """The config with other values of keys of its trainer."""
    section = config.trainer.model_copy(update=trainer)
    return config.model_copy(update={"trainer": section})


def _remedies(shape: Shape, config: RunConfig, *, gpu: bool) -> dict[str, int]:
    """What a trainer takes with each setting that makes it take less."""

    def needed(**changes: Any) -> int:
        return sum(trainer_parts(shape, _with(config, **changes), gpu=gpu).values())

    fewer = min(config.trainer.micro_batch_tokens, config.trainer.seq_len)
    remedies: dict[str, dict[str, Any]] = {
        "trainer.activation_checkpointing = true": {"activation_checkpointing": True},
        f"trainer.micro_batch_tokens = {fewer}": {"micro_batch_tokens": fewer},
        f"both trainer.activation_checkpointing = true and trainer.micro_batch_tokens = {fewer}": {
            "activation_checkpointing": True,
            "micro_batch_tokens": fewer,
        },
    }
    if gpu and config.trainer.keeps_moments and not config.trainer.offload_optimizer:
        keys = {"activation_checkpointing": True, "micro_batch_tokens": fewer}
        unset = {key: value for key, value in keys.items() if getattr(config.trainer, key) != value}
        remedies["trainer.offload_optimizer = true"] = {"offload_optimizer": True}
        if unset:
            named = ", ".join(f"trainer.{key} = {json.dumps(unset[key])}" for key in unset)
            text = f"all of {named} and trainer.offload_optimizer = true"
            remedies[text] = {**unset, "offload_optimizer": True}
    return {text: needed(**changes) for text, changes in remedies.items()}


def _sizes(sizes: Mapping[str, int]) -> str:
    return " or ".join(f"{text} ({size / GIB:.1f} GiB)" for text, size in sizes.items())


def problem(shape: Shape, config: RunConfig, *, room: int, gpu: bool) -> str | None:
    """Why a trainer does not fit into `room` bytes, and what would; None if it fits."""
    parts = trainer_parts(shape, config, gpu=gpu)
    if sum(parts.values()) <= room:
        return None
    sizes = _remedies(shape, config, gpu=gpu)
    fitting = {text: size for text, size in sizes.items() if size <= room}
    help = (
        f"set {_sizes(fitting)}"
        if fitting
        else (
            f"even with the smallest settings it takes {min(sizes.values()) / GIB:.1f} GiB: "
            "take a smaller model, a shorter trainer.seq_len or a machine with more memory"
        )
    )
    return (
        f"a trainer takes some {sum(parts.values()) / GIB:.1f} GiB ({shown(parts)}), and there are "
        f"{room / GIB:.1f} GiB for it; {help}"
    )


def exhausted(shape: Shape | None, config: RunConfig, said: str, *, room: int, gpu: bool) -> str:
    """What to do about a trainer that ran out of memory, in words; `said` is how that was reported,
    `shape` None for a model of an unknown kind.
    """
    begin = f"{names.OUT_OF_MEMORY} ({said}); it has {room / GIB:.1f} GiB"
    last = "take a shorter trainer.seq_len, a smaller model or a machine with more memory"
    if shape is None:
        return f"{begin}: set trainer.activation_checkpointing = true or a smaller " + (
            f"trainer.micro_batch_tokens (now {config.trainer.micro_batch_tokens}), or {last}"
        )
    parts = trainer_parts(shape, config, gpu=gpu)
    needed = sum(parts.values())
    less = {t: size for t, size in _remedies(shape, config, gpu=gpu).items() if size < needed}
    help = f"set {_sizes(less)}, or {last}" if less else last
    return f"{begin} and takes some {needed / GIB:.1f} GiB ({shown(parts)}): {help}"


def shown(parts: Mapping[str, int]) -> str:
    """The parts in words, the largest first."""
    large = sorted((name for name in parts if parts[name]), key=lambda name: -parts[name])
    return ", ".join(f"{name} {parts[name] / GIB:.1f}" for name in large)
