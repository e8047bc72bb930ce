"""What carries bytes between ranks: the torch.distributed group that they share, through host memory, or NCCL between
their GPUs, with that group beside it for what is small (docs/ranks.md)."""

from __future__ import annotations

import importlib.util
import os
import socket
from pathlib import Path
from typing import Any

import torch

from . import _core
from .place import Place
from .ranks import Group, RankError


def choose(wanted: str, group: Group | None, where: Place) -> str | None:
    """The path of the NCCL library that this rank uses, "" where the loader finds it; None: the group alone, on all
    ranks alike. Collective. `wanted` is engine.transport; raises RankError where "nccl" cannot be had, naming the
    rank."""
    if group is None:
        return None
    library = _library()
    said = group.gathered([wanted, _gpu(where), _why_not(where, library)])
    asked = any(each[0] == "nccl" for each in said)
    if all(each[0] == "group" for each in said):
        return None
    why = _why_none(said)
    if not why:
        return library
    if asked:
        raise RankError(f"overspill: engine.transport = nccl: {why}")
    return None


def _why_none(said: list[list[str]]) -> str:
    """Empty: all ranks can."""
    seen: dict[str, int] = {}
    for rank, (_, gpu, why) in enumerate(said):
        if why:
            return f"rank {rank}: {why}"
        if gpu in seen:
            return f"ranks {seen[gpu]} and {rank} are on one GPU, and NCCL takes one rank each"
        seen[gpu] = rank
    if len({wanted for wanted, _, _ in said}) > 1:
        return f"ranks differ: {', '.join(wanted for wanted, _, _ in said)}"
    return ""


def _why_not(where: Place, library: str) -> str:
    if where.device.type != "cuda":
        return f"the model computes on {where.device}, and NCCL is for GPUs"
    return _core.why_no_nccl(library)


def _gpu(where: Place) -> str:
    """The same for two ranks only if they are on one GPU."""
    if where.device.type != "cuda":
        return f"{socket.gethostname()} {os.getpid()}"
    return str(torch.cuda.get_device_properties(where.device).uuid)


def _library() -> str:
    """PyTorch's own, where it brings one (the PyPI package nvidia-nccl-cu13), unless OVERSPILL_NCCL names another."""
    if "OVERSPILL_NCCL" in os.environ:
        return os.environ["OVERSPILL_NCCL"]
    try:
        spec: Any = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return ""
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "lib/libnccl.so.2"
        if path.is_file():
            return str(path)
    return ""
