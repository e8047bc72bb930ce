"""Parameters that join a model, or a wrapper around it, after its engine was made: nobody would train them, and nobody
would notice."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch._C import DisableTorchFunctionSubclass

from .divided import memory_of
from .segments import Segment, Unit, registry


def check(model: nn.Module, units: Iterable[Unit]) -> None:
    """Before a step. Raises RuntimeError that names trainable parameters of the model which no engine holds. It looks
    at every module, because a model may change at any time and in many ways; that takes less than the hooks of one
    forward. `units`: the engine's; raises RuntimeError too where the step would train none of them."""
    with DisableTorchFunctionSubclass():  # it would ask for each parameter
        for module in model.modules():
            for parameter in module._parameters.values():
                if parameter is not None and parameter.requires_grad and _is_new(parameter):
                    raise RuntimeError(_text(model))
        _check_frozen([s for unit in units if unit.is_trained for s in unit.segments])


def _check_frozen(segments: list[Segment]) -> None:
    """What a wrapper trains lies outside the engine's module, but the wrapper freezes the module. Torch would make such
    a step without a word; a gradient that came before the freezing is stepped here too."""
    if any(s.parameter.requires_grad for s in segments):
        return
    if segments and not any(s.has_gradient() for s in segments):
        raise RuntimeError(
            f"overspill: none of the {len(segments)} parameters that the engine trains requires a gradient any more or "
            "has one, so no step would train anything. If a wrapper froze them (adapters, prompts) and trains what it "
            "has itself, build the wrapper first, then call overspill.initialize with it; if they are frozen for a "
            "while, leave step() out meanwhile"
        )


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
        "another optimizer trains outside this model"
    )
