"""Which names the module `deepspeed` and its parts have, where Overspill answers to that name (finder.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from ..config.section import ConfigError
from . import (
    accelerator,
    checkpointing,
    checkpoints,
    comm,
    fragments,
    json_models,
    json_reader,
    layer_drop,
    leaves,
    lr_schedules,
    ops,
    optimizer,
    optimizers,
    parts,
    tiling,
    zero,
    zero_params,
)
from .engine import DeepSpeedEngine
from .pipe import links, module, schedule, topology
from .pipe.engine import PipelineEngine
from .refused import STAND_INS
from .starting import initialize

VERSION = "0.19.6"  # whose calls these are


def _of(module: Any, *names: str) -> dict[str, Any]:
    """The names that a module makes, or those that are given."""
    return {
        name: value
        for name, value in vars(module).items()
        if (name in names if names else not name.startswith("_") and name != "annotations")
    }


_SCHEDULES = {
    **lr_schedules.SCHEDULES,
    "VALID_LR_SCHEDULES": list(lr_schedules.SCHEDULES),
    "LR_RANGE_TEST": "LRRangeTest",
    "ONE_CYCLE": "OneCycle",
    "WARMUP_LR": "WarmupLR",
    "WARMUP_DECAY_LR": "WarmupDecayLR",
    "WARMUP_COSINE_LR": "WarmupCosineLR",
    "WARMUP_LOG_RATE": "log",
    "WARMUP_LINEAR_RATE": "linear",
    # Names of their arguments.
    **{
        name.upper(): name
        for name in (
            "lr_range_test_min_lr",
            "lr_range_test_step_rate",
            "lr_range_test_step_size",
            "lr_range_test_staircase",
            "cycle_first_step_size",
            "cycle_first_stair_count",
            "cycle_second_step_size",
            "cycle_second_stair_count",
            "decay_step_size",
            "cycle_min_lr",
            "cycle_max_lr",
            "decay_lr_rate",
            "cycle_min_mom",
            "cycle_max_mom",
            "decay_mom_rate",
            "warmup_min_lr",
            "warmup_max_lr",
            "warmup_num_steps",
            "warmup_type",
            "warmup_min_ratio",
            "cos_min_ratio",
            "total_num_steps",
        )
    },
}
_INIT = _of(
    zero, "Init", "GatheredParameters", "register_external_parameter", "unregister_external_parameter"
)
_TILES = _of(tiling, "TiledLinear", "TiledLinearReturnBias")
_ZERO = _INIT | _TILES
_ACCELERATOR = _of(accelerator, "get_accelerator", "is_current_accelerator_supported")
_OFFLOAD = _of(parts, "OffloadDeviceEnum", "OffloadStateTypeEnum")
_UTILS = {
    **_of(parts, "logger", "log_dist", "RepeatingLoader"),
    **{name: value for name, value in vars(leaves).items() if "z3_leaf_module" in name},
    **{name: value for name, value in vars(fragments).items() if name.startswith("safe_")},
    "groups": SimpleNamespace(
        get_data_parallel_world_size=comm.get_world_size, get_data_parallel_rank=comm.get_rank
    ),
}
_CHECKPOINTING = STAND_INS["deepspeed.checkpointing"] | _of(
    checkpointing,
    "checkpoint",
    "configure",
    "CudaRNGStatesTracker",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "reset",
)
_PIPE = _of(module, "PipelineModule", "LayerSpec", "TiedLayerSpec") | _of(topology, "ProcessTopology")
_OFFLOADS = "DeepSpeedZeroOffloadParamConfig", "DeepSpeedZeroOffloadOptimizerConfig"
_CHECKPOINTS = (
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
    "convert_zero_checkpoint_to_fp32_state_dict",
)

_THERE: dict[str, dict[str, Any]] = {
    "deepspeed": {
        "__version__": VERSION,
        "__version_major__": int(VERSION.split(".")[0]),
        "__version_minor__": int(VERSION.split(".")[1]),
        "__version_patch__": int(VERSION.split(".")[2]),
        "__git_hash__": "unknown",
        "__git_branch__": "unknown",
        "initialize": initialize,
        "init_distributed": comm.init_distributed,
        "add_config_arguments": parts.add_config_arguments,
        "DeepSpeedEngine": DeepSpeedEngine,
        "PipelineEngine": PipelineEngine,
        "PipelineModule": module.PipelineModule,
        "DeepSpeedConfig": json_reader.DeepSpeedConfig,
        "DeepSpeedConfigError": ConfigError,
        **_of(accelerator, "get_accelerator"),
        **_of(parts, "log_dist", "logger"),
    },
    "deepspeed.accelerator": _ACCELERATOR,
    "deepspeed.checkpoint": {},
    "deepspeed.checkpoint.utils": _of(parts, "clone_tensors_for_torch_save"),
    "deepspeed.checkpointing": _CHECKPOINTING,
    "deepspeed.comm": _of(comm),
    "deepspeed.moe.utils": _of(parts, "split_params_into_different_moe_groups_for_optimizer"),
    "deepspeed.ops": {"__compatible_ops__": ops.COMPATIBLE},
    "deepspeed.ops.adagrad": _of(optimizers, "DeepSpeedCPUAdagrad"),
    "deepspeed.ops.adam": _of(optimizers, "DeepSpeedCPUAdam", "FusedAdam"),
    "deepspeed.ops.aio": {"AsyncIOBuilder": ops.BUILDERS["AsyncIOBuilder"]},
    "deepspeed.ops.lion": _of(optimizers, "DeepSpeedCPULion", "FusedLion"),
    "deepspeed.ops.op_builder": {"OpBuilder": ops.OpBuilder, **ops.BUILDERS},
    "deepspeed.pipe": _PIPE,
    "deepspeed.runtime": {},
    "deepspeed.runtime.activation_checkpointing": {},
    "deepspeed.runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "deepspeed.runtime.base_optimizer": _of(optimizer, "ZeROOptimizer"),
    "deepspeed.runtime.config": {
        "DeepSpeedConfig": json_reader.DeepSpeedConfig,
        **{name: value for name, value in vars(json_reader).items() if name.endswith("_OPTIMIZER")},
    },
    "deepspeed.runtime.config_utils": _of(json_models, "DeepSpeedConfigModel"),
    "deepspeed.runtime.dataloader": _of(parts, "RepeatingLoader"),
    "deepspeed.runtime.engine": {"DeepSpeedEngine": DeepSpeedEngine},
    "deepspeed.runtime.lr_schedules": _SCHEDULES,
    "deepspeed.runtime.pipe": _PIPE,
    "deepspeed.runtime.pipe.engine": {"PipelineEngine": PipelineEngine, **_of(links, "PipelineError")},
    "deepspeed.runtime.pipe.module": _PIPE | _of(links, "PipelineError"),
    "deepspeed.runtime.pipe.schedule": _of(schedule),
    "deepspeed.runtime.pipe.topology": {
        name: value for name, value in vars(topology).items() if "Topology" in name or "Grid" in name
    }
    | {"_prime_factors": topology._prime_factors},
    "deepspeed.runtime.progressive_layer_drop": _of(layer_drop, "ProgressiveLayerDrop"),
    "deepspeed.runtime.swap_tensor": {
        "MIN_SWAPPABLE_BYTES": 1 << 20
    },  # what tests and scripts size tensors by
    "deepspeed.runtime.utils": _of(parts, "see_memory_usage"),
    "deepspeed.runtime.zero": _ZERO,
    "deepspeed.runtime.precision_config": _of(json_models, "DeepSpeedBF16Config", "get_bfloat16_config"),
    "deepspeed.runtime.zero.config": {
        **_of(parts, "ZeroStageEnum"),
        **_of(json_models, "DeepSpeedZeroConfig", *_OFFLOADS),
    },
    "deepspeed.runtime.zero.leaf_module_config": {
        name: value
        for name, value in vars(json_models).items()
        if "LEAF_MODULE" in name or "LeafModule" in name
    },
    "deepspeed.runtime.zero.offload_config": _OFFLOAD | _of(json_models, *_OFFLOADS),
    "deepspeed.runtime.zero.partition_parameters": {
        **_INIT,
        **_ACCELERATOR,
        **_of(zero_params, "ZeroParamStatus"),
        "_orig_torch_arange": torch.arange,
        "zero_wrapper_for_fp_tensor_constructor": lambda function, *_, **__: function,
    },
    "deepspeed.runtime.zero.tiling": _TILES,
    "deepspeed.runtime.zero.utils": _of(zero_params, "is_zero_param"),
    "deepspeed.runtime.zenflow": {},
    "deepspeed.runtime.zenflow.zenflow_config": _of(json_models, "ZenFlowConfig"),
    "deepspeed.utils": _UTILS,
    "deepspeed.utils.logging": _of(parts, "logger", "log_dist"),
    "deepspeed.utils.torch": _of(parts, "required_torch_version"),
    "deepspeed.utils.zero_to_fp32": _of(checkpoints, *_CHECKPOINTS),
    "deepspeed.zero": _ZERO,
}
MODULES: dict[str, dict[str, Any]] = {
    name: STAND_INS.get(name, {}) | _THERE.get(name, {}) for name in dict.fromkeys((*_THERE, *STAND_INS))
}
