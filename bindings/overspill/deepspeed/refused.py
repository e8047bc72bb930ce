"""DeepSpeed's documented names that are not there: importing one works, since a script may never use it; using it
raises NotSupported, which says what to do instead."""

from __future__ import annotations

from typing import Any

from .._core import OverspillError

_PARALLEL = "divide the model with torch's parallelize_module (docs/ranks.md)"
_PLAN = "`overspill plan` calculates what fits"
_AUTOCAST = "put torch.autocast around the forward pass in the script"
_COMPRESSED = "it rounds what ranks exchange, and every update here is exact: use AdamW"
_PROFILER = dict.fromkeys(("FlopsProfiler", "get_model_profile"), "use torch.utils.flop_counter")


class NotSupported(OverspillError, NotImplementedError):
    """A part of DeepSpeed that Overspill does not have."""


# By module: name -> what to do instead.
REFUSED: dict[str, dict[str, str]] = {
    "deepspeed": {
        "init_inference": "generate with overspill.inference from a saved model",
        "InferenceEngine": "generate with overspill.inference from a saved model",
        "tp_model_init": _PARALLEL,
        "DeepSpeedTransformerLayer": "use an attention that the model has",
        "DeepSpeedTransformerConfig": "use an attention that the model has",
    },
    "deepspeed.autotuning": {},
    "deepspeed.autotuning.autotuner": {"Autotuner": "`overspill plan` calculates what fits, without trials"},
    "deepspeed.checkpointing": {"CheckpointFunction": "call deepspeed.checkpointing.checkpoint"},
    "deepspeed.moe": {},
    "deepspeed.moe.layer": {"MoE": "experts are partitioned like other weights: use the model's own experts"},
    "deepspeed.monitor": {},
    "deepspeed.monitor.monitor": {"MonitorMaster": "log what you need in the script"},
    "deepspeed.ops.lamb": {"FusedLamb": "there is no Lamb: give initialize an optimizer of the script's own"},
    "deepspeed.runtime.fp16": {},
    "deepspeed.runtime.fp16.onebit": {},
    "deepspeed.runtime.fp16.onebit.adam": {"OnebitAdam": _COMPRESSED},
    "deepspeed.runtime.fp16.onebit.lamb": {"OnebitLamb": _COMPRESSED},
    "deepspeed.runtime.fp16.onebit.zoadam": {"ZeroOneAdam": _COMPRESSED},
    "deepspeed.profiling": {},
    "deepspeed.profiling.flops_profiler": _PROFILER,
    "deepspeed.profiling.flops_profiler.profiler": _PROFILER,
    "deepspeed.runtime.torch_autocast": dict.fromkeys(
        (
            "get_default_autocast_lower_precision_modules",
            "has_autocast_dtype",
            "init_autocast_params",
            "is_autocast_initialized",
        ),
        _AUTOCAST,
    ),
    "deepspeed.runtime.zero.offload_states": {
        "get_state_devices": "engine.plan says where weights and states live"
    },
    "deepspeed.runtime.zero.stage3": {
        f"estimate_zero3_model_states_mem_needs_all_{when}": _PLAN for when in ("live", "cold")
    },
    "deepspeed.runtime.zero.stage_1_and_2": {
        f"estimate_zero2_model_states_mem_needs_all_{when}": _PLAN for when in ("live", "cold")
    },
}


def stand_in(module: str, name: str, instead: str) -> Any:
    """A class, which a script may inherit from, and whose call raises NotSupported."""

    def refuse(*_: Any, **__: Any) -> None:
        raise NotSupported(f"overspill: {module}.{name} is not supported: {instead}")

    # apply: what an autograd.Function is called by.
    members = {"__init__": refuse, "apply": staticmethod(refuse), "__doc__": f"Not supported: {instead}."}
    return type(name, (), members)


STAND_INS = {
    module: {name: stand_in(module, name, instead) for name, instead in names.items()}
    for module, names in REFUSED.items()
}
