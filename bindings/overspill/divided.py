"""Parameters that are DTensors: torch's tensor parallelism (parallelize_module) beside the engine.

A DTensor wraps a plain tensor, this rank's part, which every operation works on. The engine holds, updates and saves
that part, and takes its memory away; the DTensor keeps its identity, its mesh and its placements. All that knows of
DTensors is here; nothing here imports them, as most models have none.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def parameter_classes() -> list[type]:
    """Of what parameters can be, DTensor only where somebody has imported it."""
    tensor = sys.modules.get("torch.distributed.tensor")
    return [nn.Parameter] if tensor is None else [nn.Parameter, tensor.DTensor]


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def is_divided(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "_local_tensor")


def is_sharded(module: nn.Module) -> bool:
    """By fully_shard or FullyShardedDataParallel."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel))


def form_of(tensor: Any) -> tuple | None:
    """What `in_form` needs, and holds no memory; None of a tensor that is no DTensor."""
    return (type(tensor), tensor._spec) if is_divided(tensor) else None


def in_form(form: tuple | None, memory: torch.Tensor) -> torch.Tensor:
    """A tensor over `memory` like the one that `form` was of."""
    if form is None:
        return memory
    kind, spec = form
    return kind(memory, spec, requires_grad=False)


def as_divided(like: Any, part: torch.Tensor) -> torch.Tensor:
    """A DTensor of `like`'s shape, mesh and placements whose part here is `part`, in its dtype."""
    return type(like).from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def part_of(gradient: Any, parameter: Any) -> torch.Tensor:
    """This rank's part of a gradient, placed as its parameter is. Collective over the parameter's mesh where autograd
    left it otherwise, such as in summands."""
    if is_divided(parameter):
        if gradient.placements != parameter.placements:
            gradient = gradient.redistribute(placements=parameter.placements)
        gradient = memory_of(gradient)
    return gradient.wait() if hasattr(gradient, "wait") else gradient  # an AsyncCollectiveTensor


def check(model: nn.Module, model_group: Any, checkpoint: Any) -> None:
    """Raises ValueError for a DTensor that the engine cannot hold, or whose ranks `model_group` (torch's) does not
    span."""
    for name, module in model.named_modules():
        if is_sharded(module):
            raise ValueError(
                f"overspill: {name or 'the model'} is sharded by {type(module).__name__}: leave fully_shard and FSDP "
                "out and give process_group, the engine shards over its ranks"
            )
    for name, p in model.named_parameters():
        if not is_divided(p):
            continue
        mesh = p.device_mesh
        if checkpoint is not None:
            raise ValueError(
                f"overspill: {name} is a DTensor, and checkpoint= reads whole weights: load them, then divide the model"
            )
        if mesh.ndim != 1 or p.placements[0].is_partial():
            raise ValueError(
                f"overspill: {name} is a DTensor placed {p.placements} on a mesh of {mesh.ndim} dimensions: one "
                "dimension and Shard or Replicate can be held; data parallelism is the engine's (process_group)"
            )
        over = mesh.mesh.tolist()
        if model_group is None and len(over) > 1:
            raise ValueError(
                f"overspill: {name} is a DTensor on ranks {over}: give model_group=mesh.get_group(), and "
                "process_group, the ranks that hold the same part"
            )
        if model_group is not None:
            spanned = dist.get_process_group_ranks(model_group)
            if not set(over) <= set(spanned):
                raise ValueError(
                    f"overspill: {name} is a DTensor on ranks {over}; model_group has {spanned}: it spans all ranks "
                    "that hold the model"
                )


def copies(model: nn.Module) -> dict[str, str]:
    """Of a model with DTensors, the parameters that every rank of their mesh holds whole, replicated or plain; by name,
    with a name that is theirs on all of these ranks. Of any other model none."""
    parameters = dict(model.named_parameters())
    meshes = {p.device_mesh for p in parameters.values() if is_divided(p) and p.device_mesh.size() > 1}
    if not meshes:
        return {}
    if len(meshes) > 1:
        raise ValueError(f"overspill: the model's DTensors lie on {len(meshes)} meshes; one can be held")
    over = meshes.pop().mesh.tolist()
    whole = [n for n, p in parameters.items() if not is_divided(p) or p.placements[0].is_replicate()]
    return {name: f"{name} on ranks {over}" for name in whole}
