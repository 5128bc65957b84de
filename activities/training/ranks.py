"""Several processes of one machine that make one trainer: their group, and a policy sharded over
them (FSDP2, `torch.distributed.fsdp.fully_shard`).

torch's launcher starts them; each holds a backend and is sent the same operations in the same order
(`process.py`). Invariants:

- Each holds its rows of every weight, gradient and moment. Gradients are summed over the ranks in
  float32, and not averaged: a micro-batch's loss is its share of the whole step's.
- Nothing is decided by one alone: what one knows and others need is exchanged, in the order of the
  ranks. So all stand at the same step, and the bits are a function of their number.
- Work on files that fails on one of them fails on all, and leaves none waiting (`agree`).
  What fails in between leaves others waiting, and ends the trainer (`process.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from torch import Tensor

    from ratchet.activities.training.attention import Layout
    from ratchet.activities.training.head import Head

T = TypeVar("T")

PROBE = (11, 5, 7, 3)
"""Tokens whose log-probabilities tell whether a model can be sharded."""


@dataclass(frozen=True)
class Ranks:
    """This process's place, from 0, among `count`. One alone exchanges nothing."""

    rank: int = 0
    count: int = 1

    @staticmethod
    def join() -> Ranks:
        """The group of the processes that torch's launcher has started; waits for all of them. A
        process that somebody else started is alone.
        """
        import torch
        from torch import distributed

        if not distributed.is_torchelastic_launched():
            return Ranks()
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # Objects are exchanged on the CPU.
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        )
        return Ranks(distributed.get_rank(), distributed.get_world_size())

    @property
    def first(self) -> bool:
        """Whether this is the one that speaks for all and writes what is whole."""
        return self.rank == 0

    def all(self, value: T) -> list[T]:
        """The value of every rank, on each of them."""
        from torch import distributed

        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        distributed.all_gather_object(values, value)
        return values

    def at_first(self, value: T) -> list[T]:
        """The value of every rank on the first; nothing on the others."""
        from torch import distributed

        if self.count == 1:
            return [value]
        values: list[Any] | None = [None] * self.count if self.first else None
        distributed.gather_object(value, values)
        return values or []

    def at_first_do(self, work: Callable[[], object]) -> None:
        """Has the first rank do what it does for all; raises on each what went wrong there."""
        failure: Exception | None = None
        if self.first:
            try:
                work()
            except Exception as error:
                failure = error
        self.agree(failure)

    def agree(self, failure: Exception | None) -> None:
        """Raises what went wrong here, or where nothing did, what did on another rank."""
        report = None if failure is None else (getattr(failure, "errno", None), str(failure))
        others = [found for found in self.all(report) if found is not None]
        if failure is not None:
            raise failure
        for errno, text in others:
            raise RuntimeError(text) if errno is None else OSError(errno, text)


ALONE = Ranks()


def whole(tensor: Tensor) -> Tensor:
    """All rows of a tensor that is sharded, from all ranks, which call it alike; any other as it
    is.
    """
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded(model: Any, head: Head | None, ranks: Ranks) -> Any:
    """Shards a model over the ranks, in place; returns the module by which it is called from then
    on: with the arguments of `model.token_scores`, and whether logits are made by blocks.

    Layers are gathered one by one, when they compute. Embedding, head and last norm stay whole from
    the forward pass to the end of the backward pass, or without gradients to `reset_iter_state`.
    Raises ValueError for a model that gives other log-probabilities then.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    from ratchet.activities.training.model import token_scores

    class Scorer(torch.nn.Module):
        """The root: the head's weights are used beside the model's own forward pass."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(
            self,
            token_ids: Tensor,
            temperature: Tensor,
            positions: Tensor | None = None,
            layout: Layout | None = None,
            by_blocks: bool = True,
        ) -> tuple[Tensor, Tensor]:
            given = (token_ids, temperature, positions, layout, head if by_blocks else None)
            logprobs, entropy = token_scores(self.model, *given)
            # FSDP warns of a view that somebody might change in place.
            return logprobs.clone(), entropy

    ids, plain = torch.tensor([PROBE], device=model.device), torch.ones(1, 1, device=model.device)
    ids %= model.config.get_text_config().vocab_size
    with torch.no_grad():
        before = token_scores(model, ids, plain)
    mesh = init_device_mesh(model.device.type, (ranks.count,))
    kinds = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    scorer = Scorer()
    fully_shard(scorer, mesh=mesh)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    with torch.no_grad():
        after = scorer(ids, plain, by_blocks=False)
    cast(Any, scorer).reset_iter_state()
    if not all(torch.allclose(a, b, atol=1e-4) for a, b in zip(before, after, strict=True)):
        raise ValueError(
            f"trainer.ranks is above 1, and {type(model).__name__} gives other log-probabilities "
            "once it is sharded; set it to 1"
        )
    return scorer
