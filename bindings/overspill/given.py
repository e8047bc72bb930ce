"""What scripts give to the calls of the engine, looked at before it is used: all that is wrong is refused by name, with
what to give instead."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .config.values import can_name_a_file, parse_size

# Frames between a script and the engine: ours, and torch's around an optimizer's step and a module's call.
_BETWEEN = tuple(
    os.path.dirname(module)
    for module in (__file__, torch.optim.__file__, torch.amp.__file__, nn.modules.__file__)
)


def script_level() -> int:
    """The stacklevel with which a warning of the caller names the script's line, by whatever way it came here."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        level, frame = level + 1, frame.f_back
    return level


def kind_of(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def parameter(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    such = "engine.module.get_parameter(NAME)"
    if isinstance(value, str):
        such = f"engine.module.get_parameter({value!r})"
    elif isinstance(value, nn.Module):
        such = "one of module.parameters()"
    raise TypeError(f"overspill: {value!r:.40} is {kind_of(value)}: give a parameter, such as {such}")


def parameters(values: Any) -> list[torch.Tensor]:
    """One, or several, also as pairs of a name and a parameter."""
    if isinstance(values, (torch.Tensor, nn.Module, str)) or not isinstance(values, Iterable):
        return [parameter(values)]
    pairs = (each[1] if isinstance(each, tuple) and len(each) == 2 else each for each in values)
    return [parameter(each) for each in pairs]


def loss(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"overspill: backward: the loss is {kind_of(value)}: give a tensor that the model's output led to"
        )
    return value


def budgets(values: Any) -> list[int]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"overspill: predict: budgets is {kind_of(values)}: give a list of bytes")
    found = []
    for value in values:
        try:
            found.append(parse_size(value))
        except ValueError as error:
            raise ValueError(f"overspill: predict: budgets has {value!r:.60}: {error}") from None
    return found


def model(value: Any) -> None:
    if value is not None and not isinstance(value, nn.Module):
        raise TypeError(
            f"overspill: model is {kind_of(value)}: give an nn.Module; a folder with weights is given as checkpoint="
        )


def dtype(model: nn.Module, wanted: str | None) -> None:
    """Converts the model's weights to the configuration's dtype; its buffers stay. Raises ValueError for weights that
    lie in files, whose copies may not fit in memory."""
    if wanted is None:
        return
    to = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[wanted]
    for name, parameter in model.named_parameters():
        if parameter.dtype == to or not parameter.is_floating_point():
            continue
        if parameter.device.type == "cpu" and parameter.untyped_storage().filename is not None:
            raise ValueError(
                f"overspill: the configuration's dtype is {wanted}, and {name} is {parameter.dtype} in a file: make "
                f"the model in {to} (torch.set_default_dtype inside Init), or leave dtype (bf16.enabled, "
                "fp16.enabled) out"
            )
        parameter.data = parameter.data.to(to)
        if parameter.grad is not None:
            parameter.grad = parameter.grad.to(to)


def in_shared_memory(model: nn.Module) -> str | None:
    """The first parameter that other processes may have, by name. Torch's is_shared() is true of memory-mapped files
    too: of those that are this process's alone (torch.load(mmap=True)), and of Init's own."""
    candidates = {
        p.data_ptr(): name
        for name, p in model.named_parameters()
        if p.device.type == "cpu" and p.is_shared() and p.untyped_storage().filename is None
    }
    if not candidates:
        return None
    shared = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, *_ = line.split(maxsplit=2)
        if rights.endswith("s"):
            shared.append([int(address, 16) for address in place.split("-")])
    return next(
        (name for at, name in candidates.items() if any(begin <= at < end for begin, end in shared)), None
    )


def path(call: str, value: Any) -> str:
    """As the core takes it. `~` is refused: who gives it means the home, which no call of Python's takes it for."""
    try:
        text = os.fspath(value)
    except TypeError:
        text = None
    if not isinstance(text, str):
        raise TypeError(
            f"overspill: {call}: {value!r:.60} is {kind_of(value)}: give a path, as a str or a Path"
        )
    wrong = ""
    if not text:
        wrong = "the path is empty: name one"
    elif not can_name_a_file(text):
        wrong = f"{text!r:.60} has characters that no file can have: name another path"
    elif text.startswith("~") and not os.path.lexists(text.split("/")[0]):
        wrong = f"{text!r:.60}: Python does not take ~ for your home: give os.path.expanduser(...) of it"
    if wrong:
        raise ValueError(f"overspill: {call}: {wrong}")
    return text


def switch(name: str, value: Any) -> None:
    """Raises TypeError for anything but True and False."""
    if type(value) is not bool:
        raise TypeError(f"overspill: {name} = {value!r:.40}: True or False is expected")


def file(call: str, value: Any) -> str:
    """The path of a file that is to be written, in a folder that is there."""
    text = path(call, value)
    folder = os.path.dirname(text) or "."
    if os.path.isdir(text):
        raise IsADirectoryError(f"overspill: {call}: {text} is a folder: name a file")
    if not os.path.isdir(folder):
        state = "is no folder" if os.path.lexists(folder) else "does not exist"
        raise FileNotFoundError(
            f"overspill: {call}: {text}: {folder} {state}: name a file in a folder that is there"
        )
    return text


def training_data(data: Any, collate_fn: Any) -> None:
    if data is None:
        if collate_fn is not None:
            raise ValueError(
                "overspill: collate_fn is of the loader of training_data: give training_data, or neither"
            )
        return
    if isinstance(data, torch.utils.data.DataLoader):
        raise TypeError(
            "overspill: training_data is a DataLoader: give its dataset, or leave it out and take the loader yourself, "
            "with engine.train_batch(iter(loader))"
        )
    indexed = hasattr(data, "__getitem__") and not isinstance(data, (str, bytes, Mapping))
    if not indexed and not isinstance(data, torch.utils.data.IterableDataset):
        raise TypeError(
            f"overspill: training_data = {data!r:.60} is {kind_of(data)}, no data set: give one of torch.utils.data, "
            "or a list of samples"
        )
    try:
        empty = len(data) == 0
    except (TypeError, NotImplementedError):
        empty = False
    if empty:
        raise ValueError("overspill: training_data is empty: give at least one sample")


def lr_scheduler(scheduler: Any) -> None:
    if scheduler is not None and not callable(scheduler) and not hasattr(scheduler, "step"):
        raise TypeError(
            f"overspill: lr_scheduler is {kind_of(scheduler)}: give a scheduler of torch.optim.lr_scheduler that was "
            "made on the optimizer, or a callable optimizer -> scheduler"
        )


def micro_batches(batches: Any, count: int) -> Iterator[Any]:
    """Of the `count` micro-batches of a step and those that follow. What begins anew at each call would give every step
    the same ones, so it is refused, as is a list of which a part would be dropped."""
    kind = kind_of(batches)
    if isinstance(batches, (torch.Tensor, Mapping, str, bytes)):
        raise TypeError(
            f"overspill: train_batch: batches is one micro-batch, {kind}: give a list of them, or an iterator"
        )
    try:
        found = iter(batches)
    except TypeError:
        raise TypeError(
            f"overspill: train_batch: batches is {kind}: give an iterator of micro-batches, or a list of them"
        ) from None
    if found is batches:
        return found
    try:
        held = None if isinstance(batches, torch.utils.data.DataLoader) else len(batches)
    except TypeError:
        held = None
    if held is None:
        raise ValueError(
            f"overspill: train_batch: {kind} begins anew at each call, and every step would train on the same "
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
