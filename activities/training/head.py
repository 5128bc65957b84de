"""Log-probability and entropy of tokens from hidden states, one block of rows at a time.

Until the backward pass has ended, the logits of a whole micro-batch take four float32 numbers for
each token and word: 18.5 GiB at 8,192 tokens and 152k words. Here only the logits of one block of
rows exist at a time. The forward pass keeps hidden states and the logarithm of each row's
normaliser; the backward pass computes the logits of each block again.

Invariants:

- The rows of a block are a function of the shapes and the device, so a step always gives the same
  bits.
- The gradient of the head's weight is summed over blocks in float32.
- A model is split only if its logits are its head applied to its last hidden states (no capping,
  no scale): `split` tests that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ratchet.activities.training.memory import BLOCK_LOGITS
from ratchet.activities.training.model import probe


@dataclass(frozen=True)
class Head:
    """A model in two parts: `body` returns the last hidden states, `linear` their logits."""

    body: Any
    linear: torch.nn.Linear
    block_logits: int

    @property
    def block_rows(self) -> int:
        """Rows of hidden states whose logits make one block."""
        return max(self.block_logits // self.linear.weight.shape[0], 1)

    def worth(self, rows: int) -> bool:
        """Whether the logits of that many rows exceed one block."""
        return rows > self.block_rows

    def scores(self, hidden: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability (with gradient) and entropy (without) of each target, in nats, both [N].

        hidden [N, H], targets int64 [N]; temperature [N], above 0. Inside autocast, products are
        computed in its dtype, as the head itself would.
        """
        device = hidden.device.type
        dtype = (
            torch.get_autocast_dtype(device)
            if torch.is_autocast_enabled(device)
            else self.linear.weight.dtype
        )
        weight, bias = self.linear.weight, self.linear.bias
        scores: tuple[Tensor, Tensor] = _Scores.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, targets, temperature, dtype, self.block_rows
        )
        return scores


def split(model: Any) -> Head | None:
    """The model in two parts, or None if its logits are not those of its head alone."""
    linear, body = model.get_output_embeddings(), model.get_decoder()
    if not isinstance(linear, torch.nn.Linear) or body is None or body is model:
        return None
    ids = probe(model)
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        parts = linear(body(input_ids=ids, use_cache=False).last_hidden_state)
    same = whole.shape == parts.shape and bool(torch.allclose(whole, parts, rtol=1e-5, atol=1e-5))
    size = BLOCK_LOGITS.get(model.device.type, BLOCK_LOGITS["cuda"])
    return Head(body, linear, size) if same else None


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor) -> Tensor:
    """Logits float32 [R, V] of a block at the temperature of each row."""
    logits = torch.nn.functional.linear(rows, weight, bias).float()
    # Dividing by 1 changes no bit, but takes as long as the softmax.
    plain = bool((temperature == 1).all())
    return logits if plain else logits / temperature.unsqueeze(-1)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor,
        dtype: torch.dtype,
        size: int,
    ) -> tuple[Tensor, Tensor]:
        low_hidden, low_weight = hidden.to(dtype), weight.to(dtype)
        low_bias = None if bias is None else bias.to(dtype)
        chosen, entropy, norm = (hidden.new_empty(len(targets), dtype=torch.float32) for _ in "abc")
        for at in range(0, len(targets), size):
            block = slice(at, at + size)
            logits = _logits(low_hidden[block], low_weight, low_bias, temperature[block])
            norm[block] = torch.logsumexp(logits, dim=-1)
            logits -= norm[block].unsqueeze(-1)
            chosen[block] = logits.gather(-1, targets[block].unsqueeze(-1)).squeeze(-1)
            entropy[block] = -(logits.exp() * logits).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, norm)
        ctx.dtype, ctx.size = dtype, size
        ctx.mark_non_differentiable(entropy)
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, norm = ctx.saved_tensors
        low_hidden, low_weight = hidden.to(ctx.dtype), weight.to(ctx.dtype)
        low_bias = None if bias is None else bias.to(ctx.dtype)
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        hidden_grad = torch.empty_like(hidden) if to_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if to_weight else None
        bias_grad = torch.zeros_like(bias, dtype=torch.float32) if to_bias else None
        for at in range(0, len(targets), ctx.size):
            block = slice(at, at + ctx.size)
            logits = _logits(low_hidden[block], low_weight, low_bias, temperature[block])
            # d log p(target) / d logit = [target] - p, over the temperature.
            share = gradients[0][block] / temperature[block]
            grad = logits.sub_(norm[block].unsqueeze(-1)).exp_().mul_(-share.unsqueeze(-1))
            grad[torch.arange(len(share), device=grad.device), targets[block]] += share
            low = grad.to(ctx.dtype)
            if hidden_grad is not None:
                hidden_grad[block] = low @ low_weight
            if weight_grad is not None and ctx.dtype == torch.float32:
                weight_grad.addmm_(low.T, low_hidden[block])
            elif weight_grad is not None:
                weight_grad += low.T @ low_hidden[block]
            if bias_grad is not None:
                bias_grad += grad.sum(0)
        return hidden_grad, weight_grad, bias_grad, None, None, None, None
