"""torch.func's grad, vjp, jvp, jacrev, jacfwd and hessian of an engine, as `torch.func.grad(lambda x: engine(x))(x)`.

They allow no hooks on saved tensors, by which the engine gives weights to backward. So a call inside one of them runs
on copies of all weights, beside the budget, which live as long as the transform's graph. A copy's gradient is its
parameter's: a loss made of a transform's result trains the model."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from . import reading
from .calls import Alone, Call, here
from .segments import registry


class _OfParameter(torch.autograd.Function):
    """`weight`, whose gradient is the parameter's."""

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, weight: torch.Tensor) -> torch.Tensor:
        return weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None]:  # type: ignore[override]
        return gradients[0], None


def call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`module(*args, **kwargs)` on copies of its weights. All ranks call it alike."""
    with temporarily_clear_interpreter_stack():  # copies are made outside of the transform
        weights = _copies(module)
    before, here.on_copies = here.on_copies, Call(here.stack, sys._getframe())
    try:
        return torch.func.functional_call(module, weights, args, kwargs, tie_weights=False)
    finally:
        here.on_copies = before


def _copies(module: nn.Module) -> dict[str, torch.Tensor]:
    """By name; of a module or a parameter that has several names once, since torch puts back what it found by name."""
    found: dict[str, torch.Tensor] = {}
    made: dict[int, torch.Tensor] = {}
    with DisableTorchFunction(), Alone():
        for name, part in module.named_modules():
            for local, parameter in part._parameters.items():
                if id(parameter) in registry:
                    if id(parameter) not in made:
                        made[id(parameter)] = _copy(parameter)
                    found[f"{name}.{local}" if name else local] = made[id(parameter)]
    return found


def _copy(parameter: nn.Parameter) -> torch.Tensor:
    segment = registry[id(parameter)]
    weight = reading.weight(segment).to(segment.unit.residency.place.device)
    trained = parameter.requires_grad and torch.is_grad_enabled()
    return _OfParameter.apply(parameter, weight) if trained else weight
