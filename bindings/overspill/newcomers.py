"""Parameters that join a model after its engine was made: nobody would train them, and nobody would notice."""

from __future__ import annotations

from torch import nn

from .divided import memory_of
from .residency import registry


def check(model: nn.Module) -> None:
    """Raises RuntimeError that names trainable parameters of the model which no engine holds. It looks at every
    module, because a model may change at any time and in many ways; that takes less than the hooks of one forward."""
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad and _is_new(parameter):
                raise RuntimeError(_text(model))


def _is_new(parameter: nn.Parameter) -> bool:
    return (
        id(parameter) not in registry
        and not isinstance(parameter, nn.parameter.UninitializedTensorMixin)
        and memory_of(parameter).numel() > 0
    )


def _text(model: nn.Module) -> str:
    names = [name for name, p in model.named_parameters() if p.requires_grad and _is_new(p)]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    owners = {registry[id(p)].unit.residency for p in model.parameters() if id(p) in registry}
    taken = {name for owner in owners for segment in owner.segments for name in segment.names}
    # Frozen, one that replaced the engine's would be in forward, and the engine's in the checkpoint.
    freeze = (
        "write new values into the parameter that was there, inside `with engine.gathered(...)`"
        if taken.intersection(names)
        else "freeze what is new with requires_grad_(False)"
    )
    return (
        f"overspill: {', '.join(names[:3])}{more}: trainable, but came into the model after overspill.initialize, so "
        f"no step would train it. Change the model (adapters, a new head) before initialize; or {freeze}; or keep what "
        "another optimizer trains in a module of its own"
    )
