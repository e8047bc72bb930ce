"""Every key of DeepSpeed's JSON (its documentation, https://www.deepspeed.ai/docs/config-json, and its source at 0.19),
and what it is here. One table for the translation (settings.py) and for people (docs/coming-from-deepspeed.md)."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


class Fate(enum.Enum):
    """What becomes of a key."""

    MAPPED = "means the same here"
    UNUSED = "is accepted, and has no meaning here"
    OWN = "means the same in `deepspeed.initialize`, and is refused elsewhere"
    REFUSED = "is refused, unless it asks for nothing"


@dataclass(frozen=True)
class Key:
    """path: with dots. here: what it becomes; why it has no meaning, or is refused. idle: of a refused key, the values
    that ask for nothing. Where they include False, a section is idle if its `enabled` is false or missing."""

    path: str
    fate: Fate
    here: str
    idle: tuple[Any, ...] = ()


def _mapped(path: str, here: str) -> Key:
    return Key(path, Fate.MAPPED, here)


def _unused(here: str, *paths: str) -> Iterator[Key]:
    return (Key(path, Fate.UNUSED, here) for path in paths)


def _refused(path: str, here: str, *idle: Any) -> Key:
    return Key(path, Fate.REFUSED, here, (None, *(idle or (False,))))


_OFFLOAD = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"
_BUFFERS = "the engine sizes its buffers by the budget"
_READ_AHEAD = "the engine plans what it keeps and reads ahead (engine.prefetch_units)"
_COLLECTIVES = "the engine plans its collectives by unit"
_REPORTS = "the engine reports by engine.stats and engine.last_step"
_LOGS = "log what you need in the script; overspill train has --report-to"
_QUANTIZED = "it rounds what ranks exchange, and every update here is exact"
_OWN_OPTIMIZER = (
    "on one rank leave optimizer out of the JSON and give initialize one that the script has made, "
)

# Optimizers that DeepSpeed's JSON can name and that the engine does not have, in lower case: what to do instead.
REFUSED_OPTIMIZERS = {
    **dict.fromkeys(("onebitadam", "zerooneadam", "onebitlamb"), f"{_QUANTIZED}: take AdamW"),
    "lamb": f"{_OWN_OPTIMIZER}a Lamb; or take AdamW",
    **dict.fromkeys(
        ("muadam", "muadamw", "musgd"), "only deepspeed.initialize makes it: call that, or take AdamW"
    ),
    **{
        name.lower(): f"{_OWN_OPTIMIZER}torch.optim.{name}; or take AdamW"
        for name in ("Muon", "ASGD", "Adafactor", "RAdam", "Rprop")
    },
    "lbfgs": "its step needs a closure, which engine.step does not take: take AdamW",
    "sparseadam": "gradients here are dense: take AdamW",
}

KEYS: tuple[Key, ...] = (
    # Batches.
    _mapped(
        "train_batch_size",
        "checked: micro-batch × accumulation × ranks; the one of the three that is missing is derived",
    ),
    _mapped("train_micro_batch_size_per_gpu", "`train_micro_batch_size_per_gpu`"),
    _mapped("gradient_accumulation_steps", "`gradient_accumulation_steps`"),
    _mapped("managed_gradient_accumulation", "`managed_gradient_accumulation`"),
    _mapped("dataloader_drop_last", "`dataloader_drop_last`"),
    # Optimizer and schedule.
    _mapped(
        "optimizer.type",
        "`optimizer.type`: AdamW, Adam, Adagrad, Lion, SGD, RMSprop, NAdam, Adamax, Adadelta; MuAdam, MuAdamW and "
        "MuSGD in `deepspeed.initialize`, by the package mup; others are refused by name",
    ),
    _mapped(
        "optimizer.params",
        "`optimizer`, with DeepSpeed's defaults; Adam is AdamW unless adam_w_mode is false",
    ),
    *_unused("it only chooses a kernel", "optimizer.legacy_fusion"),
    _mapped(
        "scheduler.type", "`scheduler.type`: DeepSpeed's five schedules, or one of torch.optim.lr_scheduler"
    ),
    _mapped("scheduler.params", "`scheduler.params`"),
    _mapped("gradient_clipping", "`gradient_clipping`; 1.0 where it is missing, as there"),
    # Numbers.
    _mapped("bf16.enabled", '`dtype`: "bf16"; the masters are fp32 whatever is said'),
    _mapped(
        "bf16.check_grad_overflow",
        '`on_nonfinite`: "skip", or "propagate" where it is false; "skip" without bf16 too, which DeepSpeed lacks',
    ),
    *_unused("gradients are taken as they come", "bf16.immediate_grad_update"),
    _refused(
        "bf16.bf16_master_weights_and_grads", 'masters are fp32; "format": "compact" has smaller states'
    ),
    _refused("bf16.bf16_optimizer_states", '"format": "compact" has states in bf16'),
    _mapped("bfloat16", "the old name of bf16"),
    _mapped("fp16.enabled", '`dtype`: "fp16", and `loss_scaling.enabled`; the masters are fp32'),
    *(
        _mapped(f"fp16.{name}", f"`loss_scaling.{name}`")
        for name in (
            "loss_scale",
            "initial_scale_power",
            "loss_scale_window",
            "hysteresis",
            "consecutive_hysteresis",
            "min_loss_scale",
        )
    ),
    _refused(
        "fp16.auto_cast",
        "the engine does not convert inputs: call x.half(), and leave auto_cast out (Accelerate adds it where the JSON "
        'has no section fp16: write "fp16": {"enabled": true})',
    ),
    _refused("fp16.fp16_master_weights_and_grads", "masters are fp32"),
    *_unused("the engine makes the update", "fp16.fused_optimizer"),
    _refused("amp", "apex is not used: train in bf16, or put torch.autocast around the forward pass"),
    _refused("torch_autocast", "put torch.autocast around the forward pass in the script"),
    _refused("data_types.grad_accum_dtype", "micro-batches are added up in fp32", "fp32"),
    _refused("data_types.param_dtype", 'give "dtype", or bf16.enabled'),
    _refused("data_types.buffer_dtype", "buffers stay as the model has them"),
    # ZeRO.
    _mapped("zero_optimization.stage", "`zero_optimization.stage`; 0 where it is missing, as there"),
    *(
        key
        for section in _OFFLOAD
        for key in (
            _mapped(
                f"{section}.device", "nvme: its folder joins `budget.nvme`. cpu, none: the budget of the host"
            ),
            _mapped(f"{section}.nvme_path", "a folder of `budget.nvme`; it has to exist"),
            *_unused(_BUFFERS, f"{section}.buffer_count", f"{section}.pin_memory"),
        )
    ),
    *_unused(_BUFFERS, f"{_OFFLOAD[1]}.buffer_size", f"{_OFFLOAD[1]}.max_in_cpu"),
    *_unused(
        "reads and writes always overlap the update",
        f"{_OFFLOAD[0]}.pipeline_read",
        f"{_OFFLOAD[0]}.pipeline_write",
    ),
    *_unused("the engine updates where a unit lives", f"{_OFFLOAD[0]}.ratio", f"{_OFFLOAD[0]}.fast_init"),
    *_unused("engine.threads says how many cores update", f"{_OFFLOAD[0]}.cpuadam_cores_perc"),
    *_unused("the engine overlaps updates with backward (engine.speculate)", f"{_OFFLOAD[0]}.super_offload"),
    *_unused(
        "an old name of offload to the CPU, which is what the engine does", "zero_optimization.cpu_offload"
    ),
    *_unused(
        "an old name of offload to the CPU, which is what the engine does",
        "zero_optimization.cpu_offload_param",
        "zero_optimization.cpu_offload_use_pin_memory",
        "zero_optimization.cpu_offload_params",
    ),
    *_unused(
        _READ_AHEAD,
        *(
            f"zero_optimization.{prefix}{name}"
            for prefix in ("stage3_", "")
            for name in (
                "prefetch_bucket_size",
                "param_persistence_threshold",
                "model_persistence_threshold",
                "max_live_parameters",
                "max_reuse_distance",
                "module_granularity_threshold",
            )
        ),
        "zero_optimization.sub_group_size",
        "zero_optimization.memory_efficient_linear",
        "zero_optimization.override_module_apply",
        "zero_optimization.log_trace_cache_warnings",
        "zero_optimization.enable_sanity_checks",
        "zero_optimization.save_muon_momentum_buffer_in_memory",
    ),
    *(
        _mapped(
            f"zero_optimization.leaf_module.{name}",
            "marks these modules in `deepspeed.initialize`, as `set_z3_leaf_modules` does; nothing depends on the mark",
        )
        for name in ("classes", "names", "name_suffixes")
    ),
    *_unused(
        _COLLECTIVES,
        "zero_optimization.contiguous_gradients",
        "zero_optimization.reduce_scatter",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.use_multi_rank_bucket_allreduce",
        "zero_optimization.allgather_partitions",
        "zero_optimization.allgather_bucket_size",
        "zero_optimization.overlap_comm",
        "zero_optimization.round_robin_gradients",
        "zero_optimization.legacy_stage1",
        "zero_optimization.stage3_use_all_reduce_for_fetch_params",
        "zero_optimization.use_all_reduce_for_fetch_params",
        "zero_optimization.stage3_allgather_sequential",
        "zero_optimization.allgather_sequential",
        "zero_optimization.zero_hpz_partition_size",
        "zero_optimization.mics_shard_size",
        "zero_optimization.mics_hierarchical_params_gather",
    ),
    *_unused(
        "engine.save_pretrained writes whole weights, one tensor in memory at a time",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "zero_optimization.gather_16bit_weights_on_model_save",
        "zero_optimization.stage3_gather_fp16_weights_on_model_save",
    ),
    *_unused(
        "a checkpoint has the fp32 masters, and loads with any number of ranks",
        "zero_optimization.load_from_fp32_weights",
        "zero_optimization.elastic_checkpoint",
        "zero_optimization.pipeline_loading_checkpoint",
    ),
    _refused("zero_optimization.ignore_unused_parameters", "unused parameters are not looked for", True),
    _refused("zero_optimization.zero_quantized_weights", _QUANTIZED),
    _refused("zero_optimization.zero_quantized_nontrainable_weights", _QUANTIZED),
    _refused("zero_optimization.zero_quantized_gradients", _QUANTIZED),
    _refused("zero_optimization.zeropp_loco_param", _QUANTIZED, None),
    _refused(
        "zero_optimization.zenflow", "it updates with stale gradients, and every update here is exact", None
    ),
    *_unused(
        "optimizers of the script are stepped too",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
    ),
    # Between ranks.
    _refused("communication_data_type", "gradients are summed in fp32", "fp32"),
    _refused("seq_parallel_communication_data_type", "there is no sequence parallelism", "fp32"),
    _mapped("gradient_allreduce_op", "`gradients_of_ranks`; sum at stages 0 to 2, as there"),
    *_unused("the mean, or sum, is taken once, in fp32", "prescale_gradients", "gradient_predivide_factor"),
    *_unused(_COLLECTIVES, "disable_allgather", "sparse_gradients", "use_data_before_expert_parallelism"),
    # What is printed and measured.
    *_unused(_REPORTS, "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "timers"),
    *_unused(_REPORTS, "comms_logger", "flops_profiler", "log_level", "vocabulary_size"),
    *_unused(_LOGS, "tensorboard", "wandb", "csv_monitor", "comet"),
    # Other parts of DeepSpeed.
    *_unused(
        '`deepspeed.checkpointing.configure` reads it. The engine\'s own keys: `"overspill": {"engine": {"recompute": '
        '"blocks", "partition_activations": true}}` (docs/activations.md)',
        "activation_checkpointing",
    ),
    *_unused("the engine measures the disks (overspill doctor)", "aio"),
    _mapped(
        "checkpoint.tag_validation",
        "what `save_checkpoint` does where ranks give different tags, in `deepspeed.initialize`'s engine",
    ),
    *_unused(
        "all ranks write a checkpoint at once",
        "checkpoint.load_universal",
        "checkpoint.use_node_local_storage",
        "checkpoint.parallel_write",
        "checkpoint.checkpoint_serialization",
        "checkpoint.writer",
    ),
    *_unused("the engine does not capture graphs", "graph_harvesting"),
    _refused("compile.deepcompile", 'set "overspill": {"engine": {"compile": true}} (docs/compile.md)'),
    *_unused(
        "it belongs to deepcompile",
        *(
            f"compile.{name}"
            for name in (
                "free_activation",
                "free_activation_threshold",
                "offload_activation",
                "offload_activation_pin_memory",
                "offload_opt_states",
                "double_buffer",
                "symmetric_memory",
                "debug_log",
                "offload_parameters",
                "sync_before_reduce",
                "sync_after_reduce",
                "sync_before_allgather",
                "sync_after_allgather",
                "keep_int_input_tensors",
                "keep_all_input_tensors",
                "passes",
            )
        ),
    ),
    _refused("elasticity", "the number of ranks is fixed for a run; a checkpoint loads with another number"),
    _refused("autotuning", "`overspill plan` calculates what fits, without trials"),
    Key(
        "pipeline",
        Fate.OWN,
        "call overspill.deepspeed.initialize with a PipelineModule: activation_checkpoint_interval counts, other keys "
        "have no effect",
        (None, {}),
    ),
    _refused(
        "tensor_parallel",
        "divide the model with torch's parallelize_module (docs/torchrun.md)",
        {},
        {"autotp_size": 0},
    ),
    _refused("expert_parallel", "experts are partitioned like other weights"),
    _refused("hybrid_engine", "generate with engine.generate while training (docs/peft.md)"),
    _refused("sparse_attention", "use an attention that the model has", {}),
    _refused("eigenvalue", "it is not computed"),
    Key(
        "progressive_layer_drop",
        Fate.OWN,
        "call overspill.deepspeed.initialize, which gives forward progressive_layer_drop=True and pld_theta as "
        "DeepSpeed does",
        (None, False),
    ),
    _refused("curriculum_learning", "order the data in the script"),
    _refused("data_efficiency", "order the data in the script"),
    _refused("compression_training", "weights are not compressed in training", {}),
    _refused("quantize_training", "weights are not quantised in training"),
    _refused("weight_quantization", "weights are not quantised in training", {}),
    _refused("nebula", "checkpoints go to folders"),
    _refused(
        "datastates_ckpt", "DataStates is not used: save_checkpoint returns when the checkpoint is whole", {}
    ),
)
BY_PATH = {key.path: key for key in KEYS}
SECTIONS = {path[:cut] for path in BY_PATH for cut in range(len(path)) if path[cut] == "."}


def reference() -> str:
    """A table for docs/coming-from-deepspeed.md: keys with the same meaning share a row."""
    rows: dict[tuple[Fate, str], list[str]] = {}
    for key in KEYS:
        rows.setdefault((key.fate, key.here), []).append(key.path)
    lines = []
    for fate in Fate:
        lines += [f"### A key that {fate.value}", "", "| key | here |", "| --- | --- |"]
        for (of, here), paths in rows.items():
            if of is fate:
                lines.append(f"| {', '.join(f'`{path}`' for path in paths)} | {here} |")
        lines.append("")
    return "\n".join(lines)
