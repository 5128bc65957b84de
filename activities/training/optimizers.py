"""Optimizers by name, and their state as named tensors.

Invariants:

- Every trained parameter belongs to exactly one part, and all parts share one learning rate.
- `state` and `restore` are inverse to each other: what is restored continues with the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ratchet.configs.trainer import OptimizerConfig

if TYPE_CHECKING:
    from torch import Tensor

ON_CPU = ("step",)
"""State that torch keeps on the CPU wherever the parameter lies."""


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
        """Tensors on the CPU, named '<moment>/<parameter>'."""
        return {
            f"{moment}/{self._names[id(parameter)]}": value.detach().cpu().contiguous()
            for part in self._parts
            for parameter, moments in part.state.items()
            for moment, value in moments.items()
            if value is not None
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes the state that `state` gave; other names are ignored."""
        moments: dict[str, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            moment, _, name = key.partition("/")
            if name in self._parameters:
                # Older builds kept moments in the dtype that they computed in.
                like = value if moment in ON_CPU else self._parameters[name]
                own = value.to(like, copy=True)
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
