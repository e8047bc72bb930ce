"""deepspeed.utils: a parameter's exact weight, gradient and states, as whole tensors. All ranks call these."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch._C import DisableTorchFunction

from .. import calls, moments, reading
from ..residency import Segment, registry
from .engine import DeepSpeedEngine, engines


def _engine_of(parameter: nn.Parameter) -> DeepSpeedEngine | None:
    living = (each for each in engines if not each._end.over)
    return next((each for each in living if any(parameter is own for own in each.module.parameters())), None)


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """A copy in fp32; None of a parameter that no engine has."""
    engine = _engine_of(param)
    return None if engine is None else engine.weight(param, torch.float32)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """A copy of exp_avg, exp_avg_sq and so on, in fp32; None of a parameter that no engine updates, or without it."""
    engine = _engine_of(param)
    return None if engine is None else engine.optimizer_state(param).get(optim_state_key)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """A copy of the gradient added up so far, in fp32; None where there is none. Of several ranks what a step would
    make of theirs; inside engine.no_sync this rank's own, as there."""
    engine = _engine_of(param)
    if engine is None:
        return None
    return engine._gradient(param, reading.own_gradient if engine._inside == "no_sync" else reading.gradient)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """The exact weight becomes `value`, on every rank the same; forward uses it rounded to the parameter's dtype.
    Raises ValueError of a parameter that no engine has, or of another shape."""

    def write(engine: DeepSpeedEngine, segment: Segment) -> None:
        unit, master = segment.unit, torch.float32 if segment.unit.trainable else segment.unit.dtype
        flat = moments.as_held(value, master, segment)
        size = flat.numel() * flat.element_size()
        engine._core.load_weight(unit.index, segment.index, flat.data_ptr(), size, reading.DTYPES[master])
        engine._residency.refresh()

    _write(param, value, "safe_set_full_fp32_param", write)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """The state of that name becomes `value`, on every rank the same. Raises ValueError of a parameter that no engine
    updates, of another name or shape."""
    call = "safe_set_full_optimizer_state"

    def write(engine: DeepSpeedEngine, segment: Segment) -> None:
        names = {theirs: ours for ours, theirs in engine.optimizer.groups.states().items()}
        if optim_state_key not in names or not segment.unit.trainable:
            there = ", ".join(names) if segment.unit.trainable and names else "none"
            raise ValueError(
                f"overspill: {call}: {segment.name} has no state {optim_state_key!r}: it has {there}"
            )
        if engine.world_size == 1:
            engine.optimizer.state[param][optim_state_key] = value.detach().cpu().float()
        else:
            moments.write(segment, names[optim_state_key], value)

    _write(param, value, call, write)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """What has been added up so far becomes `value`, on every rank the same. Raises ValueError of a parameter that no
    engine has, or, of several ranks, that has no gradient."""
    call = "safe_set_full_grad"

    def write(engine: DeepSpeedEngine, segment: Segment) -> None:
        if engine.world_size == 1:
            engine._residency.gradients.write(segment, value.detach().to(segment.unit.dtype, copy=True))
            return
        engine._residency.gradients.settle()
        unit, flat = segment.unit, moments.as_held(value, torch.float32, segment)
        if not engine._core.replace_whole_gradient(unit.index, segment.index, flat.data_ptr(), flat.nbytes):
            raise ValueError(f"overspill: {call}: {segment.name} has no gradient: call backward before it")

    _write(param, value, call, write)


def safe_update_full_grad_vectorized(
    params: list[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Each gradient becomes update_func(gradient, parameter), on every rank the same."""
    for param in params:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def _write(
    param: nn.Parameter, value: torch.Tensor, call: str, write: Callable[[DeepSpeedEngine, Segment], None]
) -> None:
    engine = _engine_of(param)
    if engine is None or id(param) not in registry:
        raise ValueError(f"overspill: {call}: no engine has this parameter")
    segment = registry[id(param)]
    if tuple(value.shape) != tuple(param.shape):
        raise ValueError(
            f"overspill: {call}: {segment.name} is {tuple(param.shape)}, and the value {tuple(value.shape)}"
        )
    with calls.Alone(), torch.inference_mode(False), DisableTorchFunction():
        engine._settle()
        calls.refuse_update(engine._residency, call)
        reading.hand_over((segment.unit,))
        write(engine, segment)
