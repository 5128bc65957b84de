"""The ranks of one trainer: several processes of one machine, and a policy sharded over them
(FSDP2, `torch.distributed.fsdp.fully_shard`).

torch's launcher starts them. Each holds a backend and gets the same operations in the same order
(`process.py`). Invariants:

- Each rank holds its rows of every weight, gradient and moment. Gradients are summed over the ranks
  in float32, not averaged: a micro-batch's loss is its share of the whole step's.
- No rank decides alone: what one knows and others need is exchanged, in the order of the ranks. So
  all are at the same step, and the bits are a function of the number of ranks.
- Work on files that fails on one rank fails on all, and leaves none waiting (`agree`). Any other
  failure on one rank leaves the others waiting, and ends the trainer (`process.py`).
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


@dataclass(frozen=True)
class Ranks:
    """This process's rank, from 0, of `count`. A single rank exchanges nothing."""

    rank: int = 0
    count: int = 1

    @staticmethod
    def join() -> Ranks:
        """Joins the group of processes that torch's launcher has started, and waits for all of
        them. A process that was started otherwise is a single rank.
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
        """Whether this rank acts for all: it replies, and writes the files that are not sharded."""
        return self.rank == 0

    def all(self, value: T) -> list[T]:
        """The values of all ranks, on every rank."""
        from torch import distributed

        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        distributed.all_gather_object(values, value)
        return values

    def at_first(self, value: T) -> list[T]:
        """The values of all ranks on the first rank; none on the others."""
        from torch import distributed

        if self.count == 1:
            return [value]
        values: list[Any] | None = [None] * self.count if self.first else None
        distributed.gather_object(value, values)
        return values or []

    def at_first_do(self, work: Callable[[], object]) -> None:
        """Runs `work` on the first rank, for all; raises its error on every rank."""
        failure: Exception | None = None
        if self.first:
            try:
                work()
            except Exception as error:
                failure = error
        self.agree(failure)

    def agree(self, failure: Exception | None) -> None:
        """Raises this rank's failure, or if it has none that of another rank."""
        report = None if failure is None else (getattr(failure, "errno", None), str(failure))
        others = [found for found in self.all(report) if found is not None]
        if failure is not None:
            raise failure
        for errno, text in others:
            raise RuntimeError(text) if errno is None else OSError(errno, text)


ALONE = Ranks()


def whole(tensor: Tensor) -> Tensor:
    """All rows of a sharded tensor (all ranks must call this); any other tensor unchanged."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded(model: Any, head: Head | None, ranks: Ranks) -> Any:
    """Shards a model over the ranks, in place; returns the module to call from then on: with the
    arguments of `model.token_scores`, and whether to compute logits by blocks.

    Each layer is gathered when it computes. Embedding, head and last norm stay gathered from the
    forward pass to the end of the backward pass, or without gradients until `reset_iter_state`.
    Raises ValueError for a model whose log-probabilities then differ.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    from ratchet.activities.training.model import probe, token_scores

    class Scorer(torch.nn.Module):
        """The root module: the head's weights are used outside of the model's forward pass, too."""

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
            # A copy: FSDP warns of a view, which could be changed in place.
            return logprobs.clone(), entropy

    ids, plain = probe(model), torch.ones(1, 1, device=model.device)
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
            "once it is sharded; set trainer.ranks to 1"
        )
    return scorer
