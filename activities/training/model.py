"""Causal language models in Hugging Face layout: load, untie, score, export.

Invariants:

- Embeddings are untied. Engines on a CPU reload tied embeddings silently wrong, so a tied model is
  untied at load, trained untied, and exported with its own `lm_head.weight`.
- Sequences are padded on the right and attention is causal, so real tokens never see padding and
  no attention mask is needed. Or they are packed, and attention splits the row into its sequences
  (`attention.py`).
- Weights are float32; `computing` lowers only what a pass computes in, and `export` what it writes.
- Log-probabilities are those of the sampling distribution: softmax(logits / temperature).
"""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.activities.contracts.upgrades import CANARY
from ratchet.activities.inference import fingerprints
from ratchet.activities.storage.keys import CANARY_FILE
from ratchet.configs.versions import SCHEMA

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ratchet.activities.training.attention import Layout
    from ratchet.activities.training.batching import MicroBatch
    from ratchet.activities.training.head import Head


def untie(model: Any) -> bool:
    """Gives the output layer a weight of its own; returns whether it shared one before.

    Raises ValueError for a model without an output embedding.
    """
    import torch

    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output embedding to untie")
    shared = head.weight is embedding.weight
    if shared:
        head.weight = torch.nn.Parameter(embedding.weight.detach().clone())
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        config.tie_word_embeddings = False
    return shared


SAFE = {"use_safetensors": True, "trust_remote_code": False}
"""Options to load any model that a user names: none of its code runs."""


def load_model(source: str | Path, revision: str | None = None) -> Any:
    """An untied causal language model with float32 weights, for files of any dtype.

    It stays in evaluation mode: the loss compares its probabilities with those of the engine, which
    has no dropout.

    `source` is a folder in Hugging Face layout, or a hub name of which `revision` is loaded. Raises
    the errors of transformers (OSError, ValueError) if there is no such model, or its weights are
    not safetensors.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        source, revision=revision or "main", dtype=torch.float32, **SAFE
    )
    untie(model)
    return model.eval()


def round_ties(model: Any) -> int:
    """Rounds each weight that lies halfway between two bfloat16 numbers as bfloat16 rounds it;
    returns how many there are.

    A pass or an engine in bfloat16 sees no difference. Left there, the smallest step takes such a
    weight to its other neighbour, 1/256 of its size away. An eighth of the weights of a checkpoint
    in float16 are ties, 7 % of those of a quantized SmolLM2, none of one in bfloat16.
    """
    import torch

    count = 0
    for parameter in model.parameters():
        ties = parameter.detach().view(torch.int32).bitwise_and(0xFFFF) == 0x8000
        parameter.data[ties] = parameter.data[ties].to(torch.bfloat16).float()
        count += int(ties.sum())
    return count


def computing(device: str, dtype: str) -> torch.autocast:
    """A context in which forward passes compute in `dtype`, from float32 weights."""
    import torch

    return torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16")


def token_scores(
    model: Any,
    token_ids: Tensor,
    temperature: Tensor,
    positions: Tensor | None = None,
    layout: Layout | None = None,
    head: Head | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token given those before it, and the entropy there, in nats.

    token_ids [B, T] int64; temperature [B, 1] or [B, T], above 0. `positions` [B, T] and `layout`
    describe a packed row, for a model that takes them. `head` is the model in two parts, if it can
    be split: then logits of more than one block are never held at once. Returns logprobs [B, T],
    with gradient, and entropy [B, T], without. The first token of a sequence, which nothing
    predicts, gets ln(1/V) and ln V, the values of a uniform guess.
    """
    import torch

    if layout is not None and layout.own is not None:
        assert positions is not None
        return _shared_scores(model, token_ids, temperature, positions, layout, head)
    packed = {} if layout is None else {"position_ids": positions, "layout": layout}
    # A token has the temperature of its own sequence, also where the row moves on to the next.
    scale = temperature if temperature.shape[1] == 1 else temperature[:, 1:]
    targets = token_ids[:, 1:]
    if head is not None and head.worth(targets.numel()):
        hidden = head.body(input_ids=token_ids, use_cache=False, **packed).last_hidden_state
        rows, scales = hidden[:, :-1].flatten(0, 1), scale.expand(targets.shape).flatten()
        scores = head.scores(rows, targets.flatten(), scales)
        chosen, entropy = (values.view(targets.shape) for values in scores)
        first = math.log(head.linear.weight.shape[0])
    else:
        logits = model(input_ids=token_ids, use_cache=False, **packed).logits[:, :-1].float()
        log_probs = _log_probs(logits, scale)
        chosen = log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        entropy = _entropy(log_probs)
        first = math.log(logits.shape[-1])
    if positions is not None:
        starts = positions[:, 1:] == 0
        chosen = chosen.masked_fill(starts, -first)
        entropy = entropy.masked_fill(starts, first)
    return (
        torch.nn.functional.pad(chosen, (1, 0), value=-first),
        torch.nn.functional.pad(entropy, (1, 0), value=first),
    )


def _log_probs(logits: Tensor, temperature: Tensor) -> Tensor:
    """Log-probabilities [..., V] at the temperature of each place."""
    import torch

    # Dividing by 1 changes no bit, but takes as long as the softmax.
    plain = bool((temperature == 1).all())
    return torch.log_softmax(logits if plain else logits / temperature.unsqueeze(-1), dim=-1)


def _entropy(log_probs: Tensor) -> Tensor:
    log_probs = log_probs.detach()
    return -(log_probs.exp() * log_probs).sum(-1)


def _shared_scores(
    model: Any,
    token_ids: Tensor,
    temperature: Tensor,
    positions: Tensor,
    layout: Layout,
    head: Head | None,
) -> tuple[Tensor, Tensor]:
    """`token_scores` of a packed row whose sequences share prefixes.

    Sequences that share a prefix have the same temperature.
    """
    import torch

    look_up = torch.nn.functional.embedding
    own, of, before = layout.own, layout.of, layout.before
    assert own is not None and of is not None and before is not None
    ids, places, scale = token_ids[:, own], positions[:, own], temperature[0, own]
    given: dict[str, Any] = {"input_ids": ids, "position_ids": places, "layout": layout}
    # A look-up sums the gradients of several tokens that follow one in a fixed order.
    if head is not None and head.worth(ids.numel()):
        hidden = head.body(**given, use_cache=False).last_hidden_state[0]
        chosen, entropy = head.scores(look_up(before, hidden), ids[0], scale[before])
        vocab = head.linear.weight.shape[0]
    else:
        log_probs = _log_probs(model(**given, use_cache=False).logits[0].float(), scale)
        vocab = log_probs.shape[-1]
        chosen = look_up(before * vocab + ids[0], log_probs.view(-1, 1)).squeeze(-1)
        entropy = _entropy(log_probs)[before]
    first, starts = math.log(vocab), places[0] == 0
    chosen, entropy = chosen.masked_fill(starts, -first), entropy.masked_fill(starts, first)
    return look_up(of, chosen.unsqueeze(-1)).squeeze(-1)[None], entropy[of][None]


def score_batch(model: Any, batch: MicroBatch, head: Head | None = None) -> tuple[Tensor, Tensor]:
    """`token_scores` of a micro-batch."""
    return token_scores(
        model, batch.token_ids, batch.temperature, batch.positions, batch.layout, head
    )


def probe(model: Any) -> Tensor:
    """One row of tokens whose scores test whether a change of the model's form keeps its bits."""
    import torch

    vocab = model.config.get_text_config().vocab_size
    return torch.tensor([[token % vocab for token in (11, 5, 7, 3)]], device=model.device)


CANARY_TOKENS = 24
"""The length of each of its sequences: an engine scores all of one and samples one token more."""


def canary_tokens(vocab_size: int) -> list[list[int]]:
    """Fixed token sequences that cover the whole vocabulary."""
    length, count = CANARY_TOKENS, 6
    steps = [(7 + 31 * n + 5 * n * n) % vocab_size for n in range(count * length)]
    return [steps[at : at + length] for at in range(0, len(steps), length)]


def _scores(model: Any, sequences: list[list[int]], device: Any) -> Tensor:
    import torch

    with torch.no_grad():
        ids = torch.tensor(sequences, device=device)
        logprobs, _ = token_scores(model, ids, torch.ones(1, 1, device=device))
    return logprobs[:, 1:]


def canary_sequences(model: Any, tokenizer: Any) -> list[list[int]]:
    """The canary's token sequences for a model."""
    return canary_tokens(min(model.config.get_text_config().vocab_size, len(tokenizer)))


def canary(model: Any, sequences: list[list[int]]) -> list[dict[str, list[Any]]]:
    """The canary's sequences with a model's log-probabilities of their tokens."""
    return scored(sequences, _scores(model, sequences, model.device))


def scored(sequences: list[list[int]], scores: Tensor) -> list[dict[str, list[Any]]]:
    """The canary's sequences: `logprobs[k]` is of `token_ids[k + 1]`, in nats at temperature 1."""
    return [
        {"token_ids": ids, "logprobs": logprobs}
        for ids, logprobs in zip(sequences, scores.tolist(), strict=True)
    ]


def write_canary(
    folder: Path, sequences: list[dict[str, list[Any]]], noise: dict[str, Any]
) -> None:
    """Writes the canary to `folder` atomically."""
    record = {SCHEMA: CANARY.current, "sequences": sequences, "noise": noise}
    part = folder / f".{CANARY_FILE}.part"
    part.write_text(json.dumps(record))
    part.replace(folder / CANARY_FILE)


def kernel_noise(model: Any, sequences: list[list[int]]) -> dict[str, dict[str, float]]:
    """The largest and the mean difference of log-probabilities, in nats, between the model as it is
    and the same model with weights and activations in each dtype that engines may use, and with
    another attention kernel.
    """
    import torch

    exact = _scores(model, sequences, model.device)
    attention = model.config._attn_implementation
    model.set_attn_implementation("eager")
    noise = {}
    for dtype in (torch.float32, torch.bfloat16):
        # Only parameters: positions are computed from buffers, which keep their dtype.
        lowered = {name: value.to(dtype) for name, value in model.named_parameters()}
        forward = functools.partial(torch.func.functional_call, model, lowered, ())
        scores = _scores(lambda **inputs: forward(inputs), sequences, model.device)  # noqa: B023
        apart = (scores - exact).abs()
        noise[str(dtype).removeprefix("torch.")] = {
            "largest": apart.max().item(),
            "mean": apart.mean().item(),
        }
    model.set_attn_implementation(attention)
    return noise


def export(
    model: Any,
    tokenizer: Any,
    folder: Path,
    dtype: str = "float32",
    *,
    served: Sequence[str] = (),
    noise: bool = False,
) -> None:
    """Writes to `folder`: weights in `dtype`, config, tokenizer, the weights' fingerprints in
    `dtype` and in those that they may be `served` in, and last the canary.

    Replaces an earlier export; the canary exists only if everything else does. With `noise` it
    holds the noise of the model's kernels.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CANARY_FILE).unlink(missing_ok=True)
    save(model, folder, dtype)
    tokenizer.save_pretrained(folder)
    fingerprints.write(
        folder, fingerprints.take(model.state_dict().items(), dict.fromkeys([dtype, *served]))
    )
    sequences = canary_sequences(model, tokenizer)
    known = canary(model, sequences)
    write_canary(folder, known, kernel_noise(model, sequences) if noise else {})


def save(model: Any, folder: Path, dtype: str) -> None:
    """Writes weights in `dtype`, and the config, to `folder`."""
    import torch

    if dtype == "float32":
        model.save_pretrained(folder)
        return
    wanted = getattr(torch, dtype)
    state = {
        name: tensor.to(wanted) if tensor.is_floating_point() else tensor
        for name, tensor in model.state_dict().items()
    }
    model.save_pretrained(folder, state_dict=state)
    # transformers would write the dtype of the model, not that of the file.
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.save_pretrained(folder)


def parameter_count(model: Any) -> int:
    """Parameters of the (untied) model."""
    return sum(parameter.numel() for parameter in model.parameters())
