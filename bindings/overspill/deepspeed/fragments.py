"""deepspeed.utils: a parameter's exact weight, gradient and states, as whole tensors or as this rank's piece of them.
All ranks call these. Pieces are as DeepSpeed has them: the flat tensor in as many equal parts as there are ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch._C import DisableTorchFunction

from .. import calls, moments, reading, showing
from ..segments import Segment, registry
from . import zero_params
from .living import engines

if TYPE_CHECKING:
    from .engine import DeepSpeedEngine


def _engine_of(parameter: nn.Parameter) -> DeepSpeedEngine | None:
    living = (each for each in engines if not each._end.over)
    return next((each for each in living if any(parameter is own for own in each.module.parameters())), None)


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """A copy in fp32; None of a parameter that no engine updates."""
    return weight(param) if _is_updated(param) else None


def weight(param: nn.Parameter) -> torch.Tensor:
    """Of an engine's parameter, in fp32."""
    engine = _engine_of(param)
    assert engine is not None
    return engine.weight(param, torch.float32)


def _is_updated(param: nn.Parameter) -> bool:
    return param.requires_grad and _engine_of(param) is not None


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
    set_weight(param, value, "safe_set_full_fp32_param")


def set_weight(param: nn.Parameter, value: torch.Tensor, call: str) -> None:
    """What safe_set_full_fp32_param does, in the name of another call."""

    def write(engine: DeepSpeedEngine, segment: Segment) -> None:
        unit, master = segment.unit, torch.float32 if segment.unit.trainable else segment.unit.dtype
        flat = moments.as_held(value, master, segment)
        size = flat.numel() * flat.element_size()
        showing.settle_all(engine._residency)  # what the script wrote before
        showing.forget()  # else a unit that was used last would be shown as it was
        engine._core.load_weight(unit.index, segment.index, flat.data_ptr(), size, reading.DTYPES[master])
        engine._residency.refresh()

    _write(param, value, call, write)


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
        engine._residency.gradients.settle()
        scaler = engine._residency.gradients.scaler
        # The engine has gradients of the scaled loss.
        given = value if scaler is None else value.detach().float() * scaler.scale
        unit, flat = segment.unit, moments.as_held(given, torch.float32, segment)
        if engine._core.replace_whole_gradient(unit.index, segment.index, flat.data_ptr(), flat.nbytes):
            return
        if engine.world_size == 1 and scaler is None:
            engine._residency.gradients.write(segment, value.detach().to(segment.unit.dtype, copy=True))
        else:
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


def _local(param: nn.Parameter, call: str, whole: torch.Tensor | None) -> torch.Tensor | None:
    _require_zero3(param, call)
    return None if whole is None else zero_params.piece_of(param, whole)


def _require_zero3(param: nn.Parameter, call: str) -> None:
    if not zero_params.is_zero_param(param):
        raise AssertionError(
            f"overspill: {call}: this API is only defined for ZeRO-3 partitioned parameters, as in DeepSpeed, and a "
            f"parameter of shape {tuple(param.shape)} is none: set zero_optimization.stage to 3, or call "
            f"{call.replace('_local_', '_full_')}"
        )


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's piece of what safe_get_full_fp32_param returns. AssertionError below stage 3, as there."""
    return _local(param, "safe_get_local_fp32_param", safe_get_full_fp32_param(param))


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's piece of what safe_get_full_optimizer_state returns. AssertionError below stage 3, as there."""
    whole = safe_get_full_optimizer_state(param, optim_state_key)
    return _local(param, "safe_get_local_optimizer_state", whole)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's piece of what safe_get_full_grad returns. AssertionError below stage 3, as there."""
    return _local(param, "safe_get_local_grad", safe_get_full_grad(param))


def _whole_of(param: nn.Parameter, value: torch.Tensor, call: str) -> torch.Tensor | None:
    """None of a frozen parameter, of which nothing is set, as there."""
    _require_zero3(param, call)
    return zero_params.whole_of(param, value, call) if param.requires_grad else None


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """The ranks' values together become the exact weight. Raises ValueError of another size; AssertionError below stage
    3, as there."""
    call = "safe_set_local_fp32_param"
    if (whole := _whole_of(param, value, call)) is not None:
        set_weight(param, whole, call)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """The ranks' values together become the state of that name. Errors as of safe_set_local_fp32_param."""
    if (whole := _whole_of(param, value, "safe_set_local_optimizer_state")) is not None:
        safe_set_full_optimizer_state(param, whole, optim_state_key)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """The ranks' values together become what has been added up so far. Errors as of safe_set_local_fp32_param."""
    if (whole := _whole_of(param, value, "safe_set_local_grad")) is not None:
        safe_set_full_grad(param, whole)


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
