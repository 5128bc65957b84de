"""Optimizers by name, and their state as named tensors.

Invariants:

- Every trained parameter belongs to exactly one part, and all parts share one learning rate.
- `state` and `restore` are inverse to each other: what is restored continues with the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ratchet.configs.trainer import OptimizerConfig

if TYPE_CHECKING:
    from torch import Tensor

ON_CPU = ("step",)
"""State that torch keeps on the CPU wherever the parameter lies."""
RANDOM = "rng"
"""In place of a moment, in a checkpoint: the state of a generator of random numbers."""


class Optimizer:
    """One or more torch optimizers over the parameters of a model, stepped as one."""

    def __init__(self, model: Any, config: OptimizerConfig) -> None:
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._parts = _build(model, config)

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        for part in self._parts:
            part.zero_grad(set_to_none=True)

    def step(self, lr: float) -> None:
        """Moves the parameters along their gradients at rate `lr`."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()

    def state(self) -> dict[str, Tensor]:
        """Tensors named '<moment>/<parameter>', on the CPU; those that are sharded as they are."""
        from torch.distributed.tensor import DTensor

        def kept(value: Tensor) -> Tensor:
            value = value.detach()
            return value if isinstance(value, DTensor) else value.cpu().contiguous()

        return {
            f"{moment}/{self._names[id(parameter)]}": kept(value)
            for part in self._parts
            for parameter, moments in part.state.items()
            for moment, value in moments.items()
            if value is not None
        }

    def like(self, key: str, size: Sequence[int], dtype: Any) -> Tensor | None:
        """What a tensor of this name and size is read into before `restore` takes it: a moment is
        sharded as its parameter is. None for one that is not to be read.
        """
        import torch

        moment, _, name = key.partition("/")
        if moment != RANDOM and name not in self._parameters:
            return None
        if moment == RANDOM or moment in ON_CPU:
            return torch.empty(tuple(size), dtype=dtype)
        return torch.empty_like(self._parameters[name], requires_grad=False)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes the state that `state` gave, or that was read as `like` says; other names are
        ignored.
        """
        from torch.distributed.tensor import DTensor

        moments: dict[str, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            moment, _, name = key.partition("/")
            if name in self._parameters:
                # Older builds kept moments in the dtype that they computed in.
                like = value if moment in ON_CPU else self._parameters[name]
                own = value if isinstance(value, DTensor) else value.to(like, copy=True)
                moments.setdefault(name, {})[moment] = own
        for part in self._parts:
            for group in part.param_groups:
                for parameter in group["params"]:
                    name = self._names[id(parameter)]
                    if name in moments:
                        part.state[parameter] = moments[name]


def _build(model: Any, config: OptimizerConfig) -> list[Any]:
    import torch

    everything = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.type == "adamw":
        return [_adamw(everything, config)]
    if config.type == "sgd":
        return [
            torch.optim.SGD(
                everything,
                lr=config.lr,
                momentum=config.momentum,
                nesterov=config.nesterov,
                weight_decay=config.weight_decay,
            )
        ]
    if config.type == "signsgd":
        return [_sign_sgd(everything, config)]
    matrices = [parameter for parameter in hidden_matrices(model) if parameter.requires_grad]
    ids = {id(parameter) for parameter in matrices}
    rest = [parameter for parameter in everything if id(parameter) not in ids]
    muon = torch.optim.Muon(
        matrices,
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        ns_steps=config.ns_steps,
        weight_decay=config.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    # An adapter is matrices alone.
    return [muon, _adamw(rest, config)] if rest else [muon]


def hidden_matrices(model: Any) -> list[Any]:
    """Two-dimensional parameters other than those of the embedding and the output head."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    outer = {id(parameter) for end in ends for parameter in end.parameters()}
    return [p for p in model.parameters() if p.ndim == 2 and id(p) not in outer]


def _adamw(parameters: list[Any], config: Any) -> Any:
    import torch

    # On a CPU, one pass over memory instead of ten. On a GPU it would keep `step` there.
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=config.betas,
        weight_decay=config.weight_decay,
        fused=all(parameter.device.type == "cpu" for parameter in parameters),
    )


def _sign_sgd(parameters: list[Any], config: Any) -> Any:
    import torch

    class SignSgd(torch.optim.Optimizer):
        """p <- p (1 - lr weight_decay) - lr sign(g)."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            assert closure is None
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is None:
                            continue
                        parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                        parameter.add_(parameter.grad.sign(), alpha=-group["lr"])

    return SignSgd(parameters, {"lr": config.lr, "weight_decay": config.weight_decay})
