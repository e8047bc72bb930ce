"""Which names the module `deepspeed` and its parts have, where Overspill answers to that name (finder.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from . import comm, fragments, lr_schedules, parts, zero
from .engine import DeepSpeedEngine, initialize

VERSION = "0.19.6"  # whose calls these are


def _of(module: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if not name.startswith("_")}


_SCHEDULES = {**lr_schedules.SCHEDULES, "VALID_LR_SCHEDULES": list(lr_schedules.SCHEDULES)}
_ZERO = {
    name: getattr(zero, name)
    for name in ("Init", "GatheredParameters", "register_external_parameter", "unregister_external_parameter")
}
_UTILS = {
    "logger": parts.logger,
    "set_z3_leaf_modules": parts.set_z3_leaf_modules,
    "safe_get_full_fp32_param": fragments.safe_get_full_fp32_param,
    "safe_get_full_optimizer_state": fragments.safe_get_full_optimizer_state,
    "safe_get_full_grad": fragments.safe_get_full_grad,
}
_ADAM = {"DeepSpeedCPUAdam": parts.cpu_adam, "FusedAdam": parts.cpu_adam}
_ACCELERATOR = {"get_accelerator": parts.get_accelerator}

MODULES: dict[str, dict[str, Any]] = {
    "deepspeed": {
        "__version__": VERSION,
        "initialize": initialize,
        "init_distributed": comm.init_distributed,
        "add_config_arguments": parts.add_config_arguments,
        "DeepSpeedEngine": DeepSpeedEngine,
    },
    "deepspeed.accelerator": _ACCELERATOR,
    "deepspeed.checkpoint": {},
    "deepspeed.checkpoint.utils": {"clone_tensors_for_torch_save": parts.clone_tensors_for_torch_save},
    "deepspeed.comm": _of(comm),
    "deepspeed.ops": {},
    "deepspeed.ops.adagrad": {"DeepSpeedCPUAdagrad": parts.cpu_adagrad},
    "deepspeed.ops.adam": _ADAM,
    "deepspeed.ops.lion": {"DeepSpeedCPULion": parts.cpu_lion, "FusedLion": parts.cpu_lion},
    "deepspeed.runtime": {},
    "deepspeed.runtime.engine": {"DeepSpeedEngine": DeepSpeedEngine},
    "deepspeed.runtime.lr_schedules": _SCHEDULES,
    "deepspeed.runtime.utils": {},
    "deepspeed.runtime.zero": _ZERO,
    "deepspeed.runtime.zero.partition_parameters": {
        **_ZERO,
        **_ACCELERATOR,
        "_orig_torch_arange": torch.arange,
        "zero_wrapper_for_fp_tensor_constructor": lambda function, *_, **__: function,
    },
    "deepspeed.utils": {
        **_UTILS,
        "groups": SimpleNamespace(
            get_data_parallel_world_size=comm.get_world_size, get_data_parallel_rank=comm.get_rank
        ),
    },
    "deepspeed.zero": _ZERO,
}
