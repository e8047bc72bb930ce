"""torch.func's grad, vjp, jvp, jacrev, jacfwd and hessian of an engine, as
`torch.func.grad(lambda x: engine(x).sum())(x)`.

The engine hands weights to backward through hooks on saved tensors, and these transforms forbid such hooks. So a call
inside one of them runs on copies of all weights, beside the budget, which live as long as the transform's graph. A
copy's gradient is its parameter's: a loss computed from a transform's result trains the model."""

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

_Swapped = list[tuple[nn.Module, str, nn.Parameter]]
# What calls have swapped, with what was there: Ctrl-C may strike while torch swaps it back.
_swapped: _Swapped = []


def _put_back(swapped: _Swapped) -> None:
    for part, local, parameter in swapped:
        if part._parameters.get(local) is not parameter:
            part._parameters[local] = parameter


class _OfParameter(torch.autograd.Function):
    """Gives `weight` the parameter as its origin: its gradient goes to the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, weight: torch.Tensor) -> torch.Tensor:
        return weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None]:  # type: ignore[override]
        return gradients[0], None


def call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`module(*args, **kwargs)` on copies of its weights. All ranks call it alike."""
    if not here.is_on_copies():
        _put_back(_swapped)
        _swapped.clear()
    begun = len(_swapped)
    with temporarily_clear_interpreter_stack():  # copies are made outside of the transform
        weights = _copies(module)
    before, here.on_copies = here.on_copies, Call(here.stack, sys._getframe())
    try:
        return torch.func.functional_call(module, weights, args, kwargs, tie_weights=False)
    finally:
        here.on_copies = before
        _put_back(_swapped[begun:])
        del _swapped[begun:]


def _copies(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the weights by name; a module or parameter with several names appears once, since torch restores by
    name."""
    found: dict[str, torch.Tensor] = {}
    made: dict[int, torch.Tensor] = {}
    with DisableTorchFunction(), Alone():
        for name, part in module.named_modules():
            for local, parameter in part._parameters.items():
                _refuse_released(name, local, parameter)
                if id(parameter) in registry:
                    if id(parameter) not in made:
                        made[id(parameter)] = _copy(parameter)
                    found[f"{name}.{local}" if name else local] = made[id(parameter)]
                    _swapped.append((part, local, parameter))
    return found


def _refuse_released(name: str, local: str, value: Any) -> None:
    """functional_call puts a script's tensors into modules. Raises RuntimeError if one of them is an engine's parameter
    that the transform has wrapped: its memory holds no weight now, and a copy would not be part of the transform."""
    inner = value
    while isinstance(inner, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(inner):
        inner = torch._C._functorch.get_unwrapped(inner)
    if inner is not value and id(inner) in registry:
        which = f"{name}.{local}" if name else local
        raise RuntimeError(
            f"overspill: {which} is the engine's own weight, which is not in memory now: call engine(x) inside the "
            "transform; or give functional_call copies, "
            "{name: p.detach().clone() for name, p in engine.named_parameters()}"
        )


def _copy(parameter: nn.Parameter) -> torch.Tensor:
    segment = registry[id(parameter)]
    weight = reading.weight(segment).to(segment.unit.residency.place.device)
    trained = parameter.requires_grad and torch.is_grad_enabled()
    return _OfParameter.apply(parameter, weight) if trained else weight
