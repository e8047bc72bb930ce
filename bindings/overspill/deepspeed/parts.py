"""What else scripts import of DeepSpeed: the accelerator, the CPU optimizers, small helpers."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

logger = logging.getLogger("overspill.deepspeed")


class Accelerator:
    """Where forward and backward run."""

    def device_name(self, device_index: int | None = None) -> str:
        name = "cuda" if torch.cuda.is_available() else "cpu"
        return name if device_index is None or name == "cpu" else f"{name}:{device_index}"

    def current_device_name(self) -> str:
        return self.device_name(torch.cuda.current_device() if torch.cuda.is_available() else None)

    def current_device(self) -> int:
        return torch.cuda.current_device() if torch.cuda.is_available() else 0

    def device_count(self) -> int:
        return torch.cuda.device_count() if torch.cuda.is_available() else 1

    def communication_backend_name(self) -> str:
        return "nccl" if torch.cuda.is_available() else "gloo"

    def is_available(self) -> bool:
        return True

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        return False

    def set_device(self, device_index: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.set_device(device_index)

    def empty_cache(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def synchronize(self, device_index: int | None = None) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize(device_index)


_accelerator = Accelerator()


def get_accelerator() -> Accelerator:
    return _accelerator


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
    """deepspeed.ops.adam.DeepSpeedCPUAdam and FusedAdam: torch's AdamW, or Adam, whose steps the engine makes."""
    if not bias_correction or amsgrad or not fp32_optimizer_states:
        raise ValueError(
            "overspill: Adam without bias_correction, with amsgrad or with states in bf16 is not supported"
        )
    kind = torch.optim.AdamW if adamw_mode else torch.optim.Adam
    return kind(model_params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def cpu_adagrad(
    model_params: Any, lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0, amsgrad: bool = False
) -> torch.optim.Optimizer:
    """deepspeed.ops.adagrad.DeepSpeedCPUAdagrad: torch's Adagrad, whose steps the engine makes."""
    if amsgrad:
        raise ValueError("overspill: Adagrad with amsgrad is not supported")
    return torch.optim.Adagrad(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


def cpu_lion(
    model_params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0
) -> torch.optim.Optimizer:
    """deepspeed.ops.lion.DeepSpeedCPULion: overspill.optim.Lion, whose steps the engine makes."""
    from ..optim import Lion

    return Lion(model_params, lr=lr, betas=betas, weight_decay=weight_decay)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """--deepspeed and --deepspeed_config, as DeepSpeed's."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true", help="without a meaning here")
    group.add_argument("--deepspeed_config", default=None, type=str, help="DeepSpeed's JSON")
    return parser


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[Any]) -> list[nn.Module]:
    """Nothing has to be done: units are found by what forward uses. Returns the modules of these classes."""
    classes = tuple(each for each in leaf_module_classes if isinstance(each, type))
    names = {each for each in leaf_module_classes if isinstance(each, str)}
    return [each for each in model.modules() if isinstance(each, classes) or type(each).__name__ in names]


def clone_tensors_for_torch_save(item: Any, device: Any = None) -> Any:
    """Copies of the tensors in dicts, lists and tuples, each as large as what it shows."""
    if isinstance(item, torch.Tensor):
        return item.detach().clone().to(device or item.device)
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(each, device) for each in item)
    if isinstance(item, dict):
        return type(item)({name: clone_tensors_for_torch_save(each, device) for name, each in item.items()})
    return item
