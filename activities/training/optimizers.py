"""Optimizers by name, and their state as named tensors.

Invariants:

- Every trained parameter belongs to exactly one part, and all parts share one learning rate.
- `state` and `restore` are inverse to each other: what is restored continues with the same bits.
- Moments that are offloaded lie on the CPU but for those of the one parameter that is stepped. The
  step is computed where the parameter lies, so that its bits are those of any other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ratchet.configs.trainer import OptimizerConfig

if TYPE_CHECKING:
    from torch import Tensor

ON_CPU = ("step",)
"""State that torch keeps on the CPU wherever the parameter lies."""
RANDOM = "rng"
"""In place of a moment, in a checkpoint: the state of a generator of random numbers."""


class Optimizer:
    """One or more torch optimizers over the parameters of a model, stepped as one.

    With `offload` each parameter has one of its own, whose moments are on the CPU between steps.
    """

    def __init__(self, model: Any, config: OptimizerConfig, *, offload: bool = False) -> None:
        self._offload = offload
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._parts = [
            make(share)
            for make, parameters in _kinds(model, config)
            for share in ([[one] for one in parameters] if offload else [parameters])
        ]

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        for part in self._parts:
            part.zero_grad(set_to_none=True)

    def step(self, lr: float) -> None:
        """Moves the parameters along their gradients at rate `lr`."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = lr
            with _at_hand(part) if self._offload else contextlib.nullcontext():
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
        place = "cpu" if self._offload else None
        return torch.empty_like(self._parameters[name], requires_grad=False, device=place)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes the state that `state` gave, or that was read as `like` says; other names are
        ignored.
        """
        from torch.distributed.tensor import DTensor

        moments: dict[str, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            moment, _, name = key.partition("/")
            if name in self._parameters:
                own, parameter = value, self._parameters[name]
                if not isinstance(value, DTensor):
                    stays = self._offload or moment in ON_CPU
                    # Older builds kept moments in the dtype that they computed in.
                    dtype = value.dtype if moment in ON_CPU else parameter.dtype
                    own = value.to("cpu" if stays else parameter.device, dtype, copy=True)
                moments.setdefault(name, {})[moment] = own
        for part in self._parts:
            for group in part.param_groups:
                for parameter in group["params"]:
                    name = self._names[id(parameter)]
                    if name in moments:
                        part.state[parameter] = moments[name]


@contextlib.contextmanager
def _at_hand(part: Any) -> Iterator[None]:
    """Within it the moments of a torch optimizer lie where its parameters do, and not on the CPU;
    afterwards again in the memory that they had there.
    """
    homes = {parameter: dict(moments) for parameter, moments in part.state.items()}
    for parameter, name, moments in _movable(part):
        moments[name] = moments[name].to(parameter.device, copy=True)
    yield
    for parameter, name, moments in _movable(part):
        home = homes.get(parameter, {}).get(name)
        moments[name] = moments[name].cpu() if home is None else home.copy_(moments[name])


def _movable(part: Any) -> list[tuple[Any, str, dict[str, Any]]]:
    """Each moment of a torch optimizer: its parameter, its name, and the dict that has it."""
    return [
        (parameter, name, moments)
        for parameter, moments in part.state.items()
        for name, value in moments.items()
        if value is not None and name not in ON_CPU
    ]


def _kinds(
    model: Any, config: OptimizerConfig
) -> list[tuple[Callable[[list[Any]], Any], list[Any]]]:
    """The trained parameters by what steps them: how to make a torch optimizer over some of them,
    and which they are.
    """
    everything = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.type == "adamw":
        return [(lambda some: _adamw(some, config), everything)]
    if config.type == "sgd":
        return [(lambda some: _sgd(some, config), everything)]
    if config.type == "signsgd":
        return [(lambda some: _sign_sgd(some, config), everything)]
    matrices = [parameter for parameter in hidden_matrices(model) if parameter.requires_grad]
    ids = {id(parameter) for parameter in matrices}
    rest = [parameter for parameter in everything if id(parameter) not in ids]
    kinds = [
        (lambda some: _muon(some, config), matrices),
        (lambda some: _adamw(some, config), rest),
    ]
    # An adapter is matrices alone.
    return [kind for kind in kinds if kind[1]]


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


def _sgd(parameters: list[Any], config: Any) -> Any:
    import torch

    return torch.optim.SGD(
        parameters,
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        weight_decay=config.weight_decay,
    )


def _muon(parameters: list[Any], config: Any) -> Any:
    import torch

    return torch.optim.Muon(
        parameters,
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        ns_steps=config.ns_steps,
        weight_decay=config.weight_decay,
        adjust_lr_fn="match_rms_adamw",
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
