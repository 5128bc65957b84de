"""Activation checkpointing: layers keep only their input and compute the rest again in the backward
pass.

Invariants:

- A model stays in evaluation mode, without dropout. transformers recomputes in training mode only,
  so just the modules that check it are put into training mode, and `enable` tests that the model
  still gives the same bits.
"""

from typing import Any

from ratchet.activities.training.model import probe


def enable(model: Any) -> None:
    """Makes the layers of a model recompute their activations in the backward pass.

    Raises ValueError for a model that does not support it, or whose layers then apply dropout.
    """
    import torch

    name = type(model).__name__
    if not model.supports_gradient_checkpointing:
        raise ValueError(
            f"trainer.activation_checkpointing is true, and {name} does not support it; set it to "
            "false"
        )
    ids = probe(model)
    with torch.no_grad():
        before = model(input_ids=ids, use_cache=False).logits
        model.gradient_checkpointing_enable()
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.training = True
        after = model(input_ids=ids, use_cache=False).logits
    if not torch.equal(before, after):
        raise ValueError(
            f"trainer.activation_checkpointing is true, and the layers of {name} draw dropout in "
            "training mode; set it to false, or the dropout of the model's config to 0"
        )
