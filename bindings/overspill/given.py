"""What scripts give to the calls of the engine, looked at before it is used: all that is wrong is refused by name, with
what to give instead."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

_HERE = str(Path(__file__).parent)


def script_level() -> int:
    """The stacklevel with which a warning of the caller names the script's line, by whatever way it came here."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        level, frame = level + 1, frame.f_back
    return level


def micro_batches(batches: Any, count: int) -> Iterator[Any]:
    """Of the `count` micro-batches of a step and those that follow. What begins anew at each call would give every step
    the same ones, so it is refused, as is a list of which a part would be dropped."""
    kind = type(batches).__name__
    if isinstance(batches, (torch.Tensor, Mapping, str, bytes)):
        raise TypeError(
            f"overspill: train_batch: batches is one micro-batch, a {kind}: give a list of them, or an iterator"
        )
    try:
        found = iter(batches)
    except TypeError:
        raise TypeError(
            f"overspill: train_batch: batches is an {kind}: give an iterator of micro-batches, or a list of them"
        ) from None
    if found is batches:
        return found
    try:
        held = None if isinstance(batches, torch.utils.data.DataLoader) else len(batches)
    except TypeError:
        held = None
    if held is None:
        raise ValueError(
            f"overspill: train_batch: a {kind} begins anew at each call, and every step would train on the same "
            "micro-batches: make batches = iter(batches) once an epoch, and give that"
        )
    if held > count:
        raise ValueError(
            f"overspill: train_batch needs gradient_accumulation_steps = {count} micro-batches, there are {held}: to "
            "take the next ones at each call, make batches = iter(batches) once, and give that"
        )
    return found


def max_norm(value: Any) -> float:
    """A limit of a norm, as the core takes it: of 0, which torch takes too, the least number, by which a gradient is
    scaled to 0."""
    try:
        limit = float(value)
    except (TypeError, ValueError):
        limit = math.nan
    if not limit >= 0:
        raise ValueError(f"overspill: max_norm = {value!r}: give a number from 0 on; inf limits nothing")
    return max(limit, sys.float_info.min)
