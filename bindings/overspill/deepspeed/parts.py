"""What else scripts import of DeepSpeed: enums, arguments, what it logs, small helpers."""

from __future__ import annotations

import argparse
import enum
import logging
import resource
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from . import comm

logger = logging.getLogger("overspill.deepspeed")


class OffloadDeviceEnum(enum.StrEnum):
    """Of a section offload_param or offload_optimizer."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(enum.StrEnum):
    """Of engine.offload_states, which does nothing here."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ZeroStageEnum(enum.IntEnum):
    """Of zero_optimization.stage."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = weights


class RepeatingLoader:
    """A loader that begins again where it has ended."""

    def __init__(self, loader: Iterable[Any]):
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Any, max_group_size: int | float | None = None
) -> list[dict[str, Any]]:
    """The groups, in a list: none of their parameters belongs to DeepSpeed's MoE layer, which is not there."""
    if isinstance(param_groups, dict):
        return [param_groups]
    if not isinstance(param_groups, (list, tuple)):
        raise ValueError(f"overspill: {type(param_groups).__name__}: a group or a list of groups is expected")
    return list(param_groups)


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Logs on these ranks; on all where -1 is among them, or no group is set up; on none where none are given, as
    there."""
    named = list(ranks or ())
    if comm.is_initialized() and comm.get_rank() not in named and -1 not in named[:1]:
        return
    rank = comm.get_rank() if comm.is_initialized() else -1
    logger.log(level, "[Rank %s] %s", rank, message)


def see_memory_usage(message: str, force: bool = False, ranks: Iterable[int] | None = None) -> None:
    """Logs `message` and the memory that the process had at most, on rank 0. Nothing without `force`."""
    if force:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        log_dist(f"{message}: {peak:.2f} GiB of host memory at most", ranks or [0])


def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """Whether torch's version (its first two numbers) lies between the two, both included."""
    if min_version is None and max_version is None:
        raise AssertionError("overspill: required_torch_version: give min_version or max_version")

    def numbers(version: Any) -> list[int]:
        return [int(each) for each in str(version).split("+")[0].split(".")[:2]]

    mine = numbers(torch.__version__)
    return (min_version is None or mine >= numbers(min_version)) and (
        max_version is None or mine <= numbers(max_version)
    )


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """--deepspeed and --deepspeed_config, as DeepSpeed's."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true", help="without a meaning here")
    group.add_argument("--deepspeed_config", default=None, type=str, help="DeepSpeed's JSON")
    return parser


def clone_tensors_for_torch_save(item: Any, device: Any = None) -> Any:
    """Copies of the tensors in dicts, lists and tuples, each as large as what it shows."""
    if isinstance(item, torch.Tensor):
        return item.detach().clone().to(device or item.device)
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(each, device) for each in item)
    if isinstance(item, dict):
        return type(item)({name: clone_tensors_for_torch_save(each, device) for name, each in item.items()})
    return item
