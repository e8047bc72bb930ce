"""deepspeed.ops: optimizers by DeepSpeed's names and signatures, whose steps the engine makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _adam(
    decoupled: bool, params: Any, lr: Any, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    return kind(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def cpu_adam(
    model_params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """deepspeed.ops.adam.DeepSpeedCPUAdam: torch's AdamW, or Adam."""
    if not bias_correction or amsgrad:
        raise ValueError(
            "overspill: DeepSpeedCPUAdam without bias_correction or with amsgrad is not supported: leave the argument "
            "out"
        )
    _refuse_bf16_states("DeepSpeedCPUAdam", fp32_optimizer_states)
    return _adam(adamw_mode, model_params, lr, betas, eps, weight_decay)


def fused_adam(
    params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> torch.optim.Optimizer:
    """deepspeed.ops.adam.FusedAdam: torch's AdamW, or Adam. set_grad_none: without a meaning here."""
    if not bias_correction or amsgrad:
        raise ValueError(
            "overspill: FusedAdam without bias_correction or with amsgrad is not supported: leave the argument out"
        )
    return _adam(adam_w_mode, params, lr, betas, eps, weight_decay)


def cpu_adagrad(
    model_params: Any,
    lr: float = 1e-2,
    eps: float = 1e-10,
    weight_decay: float = 0,
    amsgrad: bool = False,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """deepspeed.ops.adagrad.DeepSpeedCPUAdagrad: torch's Adagrad."""
    if amsgrad:
        raise ValueError("overspill: Adagrad with amsgrad is not supported: leave the argument out")
    _refuse_bf16_states("DeepSpeedCPUAdagrad", fp32_optimizer_states)
    return torch.optim.Adagrad(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


def cpu_lion(
    model_params: Any,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """deepspeed.ops.lion.DeepSpeedCPULion: overspill.optim.Lion, with the betas that are DeepSpeed's default."""
    from ..optim import Lion

    _refuse_bf16_states("DeepSpeedCPULion", fp32_optimizer_states)
    return Lion(model_params, lr=lr, betas=betas, weight_decay=weight_decay)


def fused_lion(
    params: Any,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    set_grad_none: bool = True,
) -> torch.optim.Optimizer:
    """deepspeed.ops.lion.FusedLion: as cpu_lion. set_grad_none: without a meaning here."""
    return cpu_lion(params, lr, betas, weight_decay)


def _refuse_bf16_states(name: str, fp32_optimizer_states: bool) -> None:
    if not fp32_optimizer_states:
        raise ValueError(
            f"overspill: {name}(fp32_optimizer_states=False) is not supported: leave it out, and give the "
            'configuration "format": "compact" for states in bf16'
        )


class _Kind(type):
    """Of a class that makes another's objects: calling it makes one, and isinstance says of an optimizer whether it
    makes these updates, the engine's own too."""

    make: Callable[..., torch.optim.Optimizer]
    kinds: tuple[str, ...]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.make(*args, **kwargs)

    def __instancecheck__(cls, value: Any) -> bool:
        groups = getattr(value, "groups", None)
        return getattr(groups, "kind", type(value).__name__) in cls.kinds


class DeepSpeedCPUAdam(metaclass=_Kind):
    make = staticmethod(cpu_adam)
    kinds = "Adam", "AdamW"


class FusedAdam(metaclass=_Kind):
    make = staticmethod(fused_adam)
    kinds = "Adam", "AdamW"


class DeepSpeedCPUAdagrad(metaclass=_Kind):
    make = staticmethod(cpu_adagrad)
    kinds = ("Adagrad",)


class DeepSpeedCPULion(metaclass=_Kind):
    make = staticmethod(cpu_lion)
    kinds = ("Lion",)


class FusedLion(metaclass=_Kind):
    make = staticmethod(fused_lion)
    kinds = ("Lion",)
