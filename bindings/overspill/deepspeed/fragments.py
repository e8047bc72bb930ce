"""deepspeed.utils: a parameter's exact weight, gradient and states, as whole tensors. All ranks call these."""

from __future__ import annotations

import torch
from torch import nn

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
    """A copy of the gradient added up so far, in fp32; None where there is none. Raises RankError of several ranks."""
    engine = _engine_of(param)
    return None if engine is None else engine.grad(param)
