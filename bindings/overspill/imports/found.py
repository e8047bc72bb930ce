"""What every reader of another system's checkpoint gives, whatever its files look like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import moments
from .._core import CheckpointError
from ..loss_scaling import Course
from .torch_file import Tensor


@dataclass(frozen=True)
class Parameter:
    """A parameter that was trained: its exact weight and its states, by torch's names, are read when they are called
    for. `step`: how often it was updated. `hyper`: the hyper-parameters of its group."""

    name: str
    shape: tuple[int, ...]
    states: tuple[str, ...]
    step: int
    read: Callable[[str], torch.Tensor]  # WEIGHT, or a state
    hyper: dict[str, Any]


WEIGHT = "weight"


@dataclass(frozen=True)
class Checkpoint:
    """`rest`: shape and reader of weights that were not trained, and of buffers. `aliases`: another name of a trained
    parameter -> its own. `lr_scheduler`: a scheduler's state_dict, or None."""

    folder: Path
    trained: dict[str, Parameter]
    rest: dict[str, tuple[tuple[int, ...], Callable[[], torch.Tensor]]]
    aliases: dict[str, str]
    global_steps: int
    lr_scheduler: Any
    client_state: dict[str, Any]
    loss_scaling: Course | None = None  # another system's rule may go otherwise, and begins anew


def damaged(path: Path, why: str, writer: str) -> CheckpointError:
    return CheckpointError(f"overspill: {path}: {why}: it is damaged, or {writer} did not write it")


def shape_of(value: Any) -> tuple[int, ...]:
    """A shape, or another list of places. Raises ValueError for anything else."""
    if not isinstance(value, (tuple, list)) or not all(type(n) is int and 0 <= n < 2**48 for n in value):
        raise ValueError(f"a shape is {value!r:.60}")
    return tuple(value)


def step_of(value: Any, name: str) -> int:
    """A count of updates, which may be a tensor. Raises ValueError that names the parameter for anything else."""
    value = value.read() if isinstance(value, Tensor) else value
    return moments.count_of(moments.number(value), name, value)
