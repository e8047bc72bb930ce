"""Sections of DeepSpeed's JSON as classes of pydantic, with DeepSpeed's fields, defaults and checks (0.19,
runtime/config_utils.py, runtime/zero/config.py, runtime/zero/offload_config.py, runtime/precision_config.py). They read
and check a section; what the engine makes of each key is in keys.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from .parts import OffloadDeviceEnum, ZeroStageEnum, logger


class DeepSpeedConfigModel(BaseModel):
    """A section. Values "auto" are left to the defaults, unless `strict`. A field whose json_schema_extra has
    "deprecated" gives its value, through "new_param_fn", to the field that "new_param" names."""

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any):
        super().__init__(**{name: value for name, value in data.items() if strict or value != "auto"})
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra.get("deprecated") and name in self.model_fields_set:
                self._take_from(name, extra)

    def _take_from(self, old: str, extra: Any) -> None:
        new = extra.get("new_param", "")
        logger.warning("Config parameter %s is deprecated%s", old, f" use {new} instead" if new else "")
        if not new or not extra.get("set_new_param", True):
            return
        if new in self.model_fields_set:
            raise AssertionError(
                f"overspill: Cannot provide deprecated parameter {old!r} and replacing parameter {new!r} together"
            )
        make: Callable[[Any], Any] = extra.get("new_param_fn", lambda value: value)
        setattr(self, new, make(getattr(self, old)))


def _old(new: str, make: Any = None, default: Any = None) -> Any:
    """A field of the name that `new` had before; of several names none is set."""
    extra = {"deprecated": True, "new_param": new}
    extra |= {"set_new_param": False} if " or " in new else {}
    return Field(default, json_schema_extra=extra | ({"new_param_fn": make} if make else {}))


def _count(default: float, **other: Any) -> Any:
    return Field(int(default), ge=0, **other)


class DeepSpeedZeroOffloadParamConfig(DeepSpeedConfigModel):
    """zero_optimization.offload_param."""

    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    nvme_path: Path | None = None
    buffer_count: int = _count(5)
    buffer_size: int = _count(1e8)
    max_in_cpu: int = _count(1e9)
    pin_memory: bool = True


class DeepSpeedZeroOffloadOptimizerConfig(DeepSpeedConfigModel):
    """zero_optimization.offload_optimizer."""

    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    nvme_path: Path | None = None
    buffer_count: int = _count(4)
    pin_memory: bool = True
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: float = Field(1.0, ge=0.0, le=1.0)
    super_offload: bool = False
    cpuadam_cores_perc: float = Field(0.8, ge=0.0, le=1.0)

    @property
    def pipeline(self) -> bool:
        return self.pipeline_read or self.pipeline_write


def _on_cpu(kind: type[DeepSpeedConfigModel]) -> Callable[[Any], Any]:
    return lambda asked: kind(device=OffloadDeviceEnum.cpu) if asked else None


DEFAULT_LEAF_MODULE_CLASSES = [
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
]
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []


def _listed(value: Any) -> Any:
    """A text is a list of one; each once."""
    return list(dict.fromkeys([value] if isinstance(value, str) else value)) if value else value


_Names = Annotated[list[str], BeforeValidator(_listed)]


class DeepSpeedZeroLeafModuleConfig(DeepSpeedConfigModel):
    """zero_optimization.leaf_module: which modules are marked as leaves (leaves.py)."""

    classes: _Names = Field(default_factory=lambda: list(DEFAULT_LEAF_MODULE_CLASSES))
    names: _Names = Field(default_factory=list)
    name_suffixes: _Names = Field(default_factory=list)


_Auto = Literal["auto"]


class ZenFlowConfig(DeepSpeedConfigModel):
    """zero_optimization.zenflow, which `deepspeed.initialize` refuses."""

    topk_ratio: float = Field(0.1, ge=0.0, le=1.0)
    select_strategy: Literal["auto", "step", "epoch"] = "auto"
    select_interval: int | _Auto = "auto"
    update_interval: int | _Auto = "auto"
    overlap_step: bool = False
    offload: bool = False
    auto_ratio: float = Field(0.99, ge=0.0, le=1.0)
    full_warm_up_rounds: int = 0
    pt_reserved_cores_perc: float = Field(0.5, ge=0.0, le=1.0)
    steps_per_epoch: int | None = Field(None, exclude=True)


class DeepSpeedZeroConfig(DeepSpeedConfigModel):
    """zero_optimization."""

    stage: ZeroStageEnum = ZeroStageEnum.disabled
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: int = Field(int(5e8), gt=0)
    use_multi_rank_bucket_allreduce: bool = True
    allgather_partitions: bool = True
    allgather_bucket_size: int = _count(5e8)
    overlap_comm: bool | None = None
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    offload_param: DeepSpeedZeroOffloadParamConfig | None = None
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = None
    zenflow: ZenFlowConfig | None = None
    sub_group_size: int = _count(1e9)
    cpu_offload_param: bool | None = _old("offload_param", _on_cpu(DeepSpeedZeroOffloadParamConfig))
    cpu_offload_use_pin_memory: bool | None = _old("offload_param or offload_optimizer")
    cpu_offload: bool | None = _old("offload_optimizer", _on_cpu(DeepSpeedZeroOffloadOptimizerConfig))
    prefetch_bucket_size: int = _count(5e7, alias="stage3_prefetch_bucket_size")
    param_persistence_threshold: int = _count(1e5, alias="stage3_param_persistence_threshold")
    model_persistence_threshold: int = _count(sys.maxsize, alias="stage3_model_persistence_threshold")
    max_live_parameters: int = _count(1e9, alias="stage3_max_live_parameters")
    max_reuse_distance: int = _count(1e9, alias="stage3_max_reuse_distance")
    gather_16bit_weights_on_model_save: bool = Field(False, alias="stage3_gather_16bit_weights_on_model_save")
    module_granularity_threshold: int = Field(0, alias="stage3_module_granularity_threshold")
    use_all_reduce_for_fetch_params: bool = Field(False, alias="stage3_use_all_reduce_for_fetch_params")
    allgather_sequential: bool = Field(False, alias="stage3_allgather_sequential")
    stage3_gather_fp16_weights_on_model_save: bool = _old("gather_16bit_weights_on_model_save", None, False)
    ignore_unused_parameters: bool = True
    legacy_stage1: bool = False
    round_robin_gradients: bool = False
    zero_hpz_partition_size: int = _count(1)
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    zeropp_loco_param: dict[str, Any] | None = None
    mics_shard_size: int = -1
    mics_hierarchical_params_gather: bool = False
    memory_efficient_linear: bool = True
    pipeline_loading_checkpoint: bool = False
    override_module_apply: bool = True
    log_trace_cache_warnings: bool = False
    enable_sanity_checks: bool = False
    save_muon_momentum_buffer_in_memory: bool = False
    leaf_module: DeepSpeedZeroLeafModuleConfig = Field(default_factory=DeepSpeedZeroLeafModuleConfig)

    @model_validator(mode="after")
    def _overlaps(self) -> DeepSpeedZeroConfig:
        if self.overlap_comm is None:
            self.__dict__["overlap_comm"] = self.stage == ZeroStageEnum.weights
        return self

    @model_validator(mode="after")
    def _offloads_whole(self) -> DeepSpeedZeroConfig:
        section = self.offload_optimizer
        if section is not None and section.ratio < 1.0 and self.stage != ZeroStageEnum.weights:
            raise ValueError("overspill: Partial offloading only supported for ZeRO Stage 3.")
        return self

    @model_validator(mode="after")
    def _names_what_has_gone(self) -> DeepSpeedZeroConfig:
        if self.elastic_checkpoint and self.stage == ZeroStageEnum.weights:
            logger.warning(
                "ZeRO-3 elastic checkpointing is deprecated; a checkpoint of Overspill loads with any number of ranks"
            )
        return self


class DeepSpeedBF16Config(DeepSpeedConfigModel):
    """bf16."""

    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


def get_bfloat16_config(param_dict: dict[str, Any]) -> DeepSpeedBF16Config:
    """The section bf16 of the JSON, or bfloat16, its old name."""
    section = param_dict.get("bf16")
    return DeepSpeedBF16Config(**(param_dict.get("bfloat16", {}) if section is None else section))
