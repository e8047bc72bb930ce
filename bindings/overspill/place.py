"""Where forward and backward run, as PyTorch has it: the CPU, a GPU, or another accelerator.

An accelerator that is not CUDA is one of torch's own device types, in tree or not, whose device module
(torch.get_device_module) has two functions more: `overspill_device()`, a capsule named "overspill.device" that holds a
std::shared_ptr<overspill::kernels::Device>, and `overspill_queue()`, the native() of torch's current stream
(docs/adding-a-device.md).
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.dlpack import to_dlpack

from . import _core

_CPU, _CUDA, _EXTENSION = 1, 2, 12  # DLPack's device types
_GPUS = Path("/proc/driver/nvidia/gpus")  # a folder for each, where NVIDIA's driver is loaded


class Place:
    """The CPU, where weights may be used as they lie."""

    on_host = True
    device = torch.device("cpu")
    name = "host"
    autocast = "cpu"  # the device type that torch.autocast knows
    given: Any = None  # the core's device, where it does not make one by its name

    def put(self, value: Any) -> Any:
        """Tensors of an argument, in dicts, lists and tuples too, moved here."""
        return value

    def entered(self) -> Any:
        """A context for another thread, in which torch computes as it does in the calling one now."""
        return contextlib.nullcontext()

    def generators(self) -> Any:
        """The module with torch's random states for this device, None where they are the CPU's."""
        return None

    def free_bytes(self) -> int | None:
        """Of its own memory, None where that is not known."""
        return None

    def make_room(self) -> None:
        """Torch gives back the device's memory that it keeps for later: before the engine takes its own."""


class Accelerator(Place):
    """`dlpack`: how tensors over the core's memory are made."""

    on_host = False

    def __init__(self, name: str, device: torch.device, dlpack: tuple[int, int]):
        self.name, self.device, self.dlpack = name, device, dlpack
        self.module = torch.get_device_module(device.type)

    def queue(self) -> int:
        """Torch's current stream on this device in this thread."""
        return self.module.overspill_queue()

    def put(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            # Of pinned memory a copy goes on after the call, and the script may write there at once.
            return (
                value
                if value.device == self.device
                else value.to(self.device, non_blocking=not _is_pinned(value))
            )
        if type(value) is dict:
            return {key: self.put(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(map(self.put, value))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.put, value))
        if isinstance(value, Mapping) and hasattr(value, "to"):  # a tokenizer's BatchEncoding
            return value.to(self.device)
        return value

    def take(self, tensor: torch.Tensor) -> Any:
        """The tensor's memory for the core, as a capsule. It is dense: its elements as they lie."""
        return to_dlpack(tensor.as_strided((tensor.numel(),), (1,)))


class Cuda(Accelerator):
    autocast = "cuda"

    def __init__(self, ordinal: int):
        super().__init__(f"cuda:{ordinal}", torch.device("cuda", ordinal), (_CUDA, ordinal))

    def queue(self) -> int:
        return _raw_stream(self.device.index)

    def make_room(self) -> None:
        torch.cuda.empty_cache()

    def entered(self) -> Any:
        return torch.cuda.stream(torch.cuda.current_stream(self.device))

    def generators(self) -> Any:
        return torch.cuda

    def free_bytes(self) -> int | None:
        return torch.cuda.mem_get_info(self.device)[0]


class Extension(Accelerator):
    def __init__(self, kind: str):
        super().__init__(kind, torch.device(kind, 0), (_EXTENSION, 0))
        if not hasattr(self.module, "overspill_device"):
            raise ValueError(
                f"overspill: engine.device = {kind!r}: torch.{kind} has no overspill_device(), so the engine does not "
                "know its memory (docs/adding-a-device.md)"
            )
        self.given = self.module.overspill_device()


HOST = Place()


def _is_pinned(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.is_pinned()


def _raw_stream(ordinal: int) -> int:
    """Torch's current stream there in this thread; without an object of it for each use, where torch can."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return torch.cuda.current_stream(ordinal).cuda_stream if raw is None else raw(ordinal)


def find(name: str, budget: int | None) -> Place:
    """The place that `engine.device` names. "auto": a GPU where torch sees one, else the CPU, with a warning where the
    machine has a GPU; with a device budget, a GPU or an error. Raises ValueError saying what is missing, or why the
    engine cannot use the GPU that torch sees."""
    if name in ("host", "cpu"):
        return HOST
    if name == "auto" and budget is None and not torch.cuda.is_available():
        if unseen := unseen_gpu():
            warnings.warn(f"overspill: {unseen}", stacklevel=2)
        return HOST
    if name in ("auto", "cuda") or name.startswith("cuda:"):
        return _cuda(name, budget)
    try:
        return Extension(name)
    except (RuntimeError, AttributeError):
        raise ValueError(
            f"overspill: engine.device = {name!r}: one of auto, host, cuda, cuda:0 and so on, or an accelerator that "
            "torch knows by that name"
        ) from None


def unseen_gpu() -> str:
    """What is missing where the machine has an NVIDIA GPU and torch sees none; "" where it has none, or where
    CUDA_VISIBLE_DEVICES says that none is meant. For a machine where torch sees none."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not (_GPUS.is_dir() and any(_GPUS.iterdir())):
        return ""
    lacks = "was built without CUDA" if torch.version.cuda is None else f"has CUDA {torch.version.cuda}"
    return (
        f"this machine has an NVIDIA GPU, and torch {torch.__version__}, which {lacks}, sees none: the model computes "
        "on the CPU. For the GPU install a torch with CUDA that the driver is new enough for (nvidia-smi shows its "
        'version), and an overspill built where nvcc is. engine.device = "host" says that the CPU is meant'
    )


def _cuda(name: str, budget: int | None) -> Place:
    number = name.partition(":")[2]
    if number and not number.isdigit():
        raise ValueError(f"overspill: engine.device = {name!r}: a GPU is cuda, cuda:0, cuda:1 and so on")
    by_budget = name == "auto" and budget is not None
    asked = f"budget.device = {budget}" if by_budget else f"engine.device = {name!r}"
    if not torch.cuda.is_available():
        raise ValueError(
            f"overspill: {asked}: this torch ({torch.__version__}) sees no GPU; leave it out to train on the CPU"
        )
    ordinal = int(number) if number else _own_ordinal()
    why = _core.why_no_cuda(ordinal)
    if why:
        raise ValueError(
            f"overspill: {asked}: torch sees a GPU, and the engine cannot use it: {why}; "
            f'engine.device = "host"{" without budget.device" if by_budget else ""} trains on the CPU'
        )
    return Cuda(ordinal)


def _own_ordinal() -> int:
    """The GPU that the script has chosen, or torchrun's for this rank."""
    chosen = torch.cuda.current_device()
    if chosen == 0 and "LOCAL_RANK" in os.environ:
        chosen = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
        torch.cuda.set_device(chosen)
    return chosen
