"""deepspeed.runtime.config: the JSON as an object with DeepSpeed's names. It reads and checks; `initialize` alone says
what the engine makes of it, and refuses what it has not."""

from __future__ import annotations

import os
from typing import Any

from ..config.files import read_deepspeed_json
from . import comm, json_models
from .settings import allreduce_op

ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
ADAGRAD_OPTIMIZER = "adagrad"
LION_OPTIMIZER = "lion"

# Keys that an attribute of the same name, or of the name that is given, has: the default.
_DEFAULTS: dict[str, Any] = {
    "train_batch_size": None,
    "train_micro_batch_size_per_gpu": None,
    "gradient_accumulation_steps": None,
    "managed_gradient_accumulation": True,
    "steps_per_print": None,
    "dump_state": False,
    "disable_allgather": False,
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "gradient_clipping": 1.0,
    "graph_harvesting": False,
    "zero_allow_untested_optimizer": False,
    "zero_force_ds_cpu_optimizer": True,
    "wall_clock_breakdown": False,
    "memory_breakdown": False,
    "dataloader_drop_last": False,
}
_EIGENVALUE: dict[str, Any] = {
    "enabled": False,
    "verbose": False,
    "max_iter": 100,
    "tol": 1e-2,
    "stability": 1e-6,
    "gas_boundary_resolution": 1,
    "layer_name": "bert.encoder.layer",
    "layer_num": 0,
}


class DeepSpeedConfig:
    """Reads the JSON: a dict, or a path.

    Attributes: the keys' values, or DeepSpeed's defaults, under DeepSpeed's names; world_size, global_rank.
    Raises ConfigError where the file is none, ValueError for a value that is none of DeepSpeed's, AssertionError where
    batch sizes do not agree, as there.
    """

    def __init__(
        self, config: str | os.PathLike[str] | dict[str, Any], mpu: Any = None, mesh_device: Any = None
    ):
        if mpu is not None or mesh_device is not None:
            raise TypeError(
                "overspill: DeepSpeedConfig: mpu and mesh_device are not supported: the ranks are those of "
                "torch.distributed; leave them out"
            )
        self._param_dict = config if isinstance(config, dict) else read_deepspeed_json(config)
        there = comm.is_initialized()
        self.global_rank = comm.get_rank() if there else 0
        self.world_size = comm.get_world_size() if there else 1
        self._read(self._param_dict)
        self._configure_train_batch_size()

    def _read(self, given: dict[str, Any]) -> None:
        for name, default in _DEFAULTS.items():
            setattr(self, name, given.get(name, default))
        for name, default in _EIGENVALUE.items():
            setattr(self, f"eigenvalue_{name}", given.get("eigenvalue", {}).get(name, default))
        for section in ("optimizer", "scheduler"):
            of = given.get(section) or {}
            setattr(self, f"{section}_name", of.get("type"))
            setattr(self, f"{section}_params", of.get("params"))
        if isinstance(self.optimizer_name, str) and self.optimizer_name.lower() in (
            ADAM_OPTIMIZER,
            ADAMW_OPTIMIZER,
            ADAGRAD_OPTIMIZER,
            LION_OPTIMIZER,
        ):
            self.optimizer_name = self.optimizer_name.lower()
        self.gradient_allreduce_op = allreduce_op(given)
        zero = given.get("zero_optimization", {})
        self.zero_config = json_models.DeepSpeedZeroConfig(
            **({"stage": int(zero)} if isinstance(zero, bool) else zero)
        )
        self.zero_optimization_stage = self.zero_config.stage
        self.zero_enabled = self.zero_optimization_stage > 0
        self.bfloat16_config = json_models.get_bfloat16_config(given)
        self.grad_accum_dtype = given.get("data_types", {}).get("grad_accum_dtype")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"overspill: DeepSpeedConfig.{name} is not supported: the JSON as it was given is _param_dict"
        )

    def _configure_train_batch_size(self) -> None:
        """Of the three sizes what is missing follows from the others."""
        whole, micro, steps = (
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
        )
        if whole is None and micro is None:
            raise AssertionError(
                "overspill: DeepSpeedConfig: Either train_batch_size or train_micro_batch_size_per_gpu needs to be "
                "provided"
            )
        if micro is None:
            steps = steps or 1
            micro = whole // self.world_size // steps
        elif steps is None:
            steps = 1 if whole is None else whole // micro // self.world_size
        if whole is None:
            whole = micro * steps * self.world_size
        self.train_batch_size, self.train_micro_batch_size_per_gpu = whole, micro
        self.gradient_accumulation_steps = steps
        if min(whole, micro, steps) <= 0 or whole != micro * steps * self.world_size:
            raise AssertionError(
                "overspill: DeepSpeedConfig: train_batch_size is not equal to micro_batch_per_gpu * "
                f"gradient_acc_step * world_size: {whole} != {micro} * {steps} * {self.world_size}: change one of "
                "them, or leave one out"
            )
