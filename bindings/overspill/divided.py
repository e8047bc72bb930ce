"""Parameters that are DTensors: torch's tensor parallelism (parallelize_module) beside the engine.

A DTensor wraps a plain tensor, this rank's part, which every operation works on. The engine holds, updates and saves
that part, and takes its memory away; the DTensor keeps its identity, its mesh and its placements. All that knows of
DTensors is here; nothing here imports them, as most models have none.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Placement:
    """Of a DTensor: its undivided shape; the dimension that is divided, or None where every part has all of it;
    `blocks`: how many blocks of equal size lie along that dimension, each divided by itself (torch's _StridedShard)."""

    shape: tuple[int, ...]
    dim: int | None
    blocks: int

    def to_json(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "dim": self.dim, "blocks": self.blocks}

    @classmethod
    def of(cls, parameter: Any) -> Placement:
        placement = parameter.placements[0]
        dim = None if placement.is_replicate() else placement.dim % parameter.ndim
        return cls(tuple(parameter.shape), dim, getattr(placement, "split_factor", 1))

    @classmethod
    def from_json(cls, value: Any) -> Placement:
        """Raises ValueError, LookupError or TypeError for what to_json did not give."""
        shape, dim, blocks = value["shape"], value["dim"], value["blocks"]
        if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**48 for n in shape):
            raise ValueError(f"{shape!r:.60} is no shape")
        if dim is not None and not (type(dim) is int and 0 <= dim < len(shape)):
            raise ValueError(f"{dim!r:.40} is no dimension of the shape {shape}")
        if type(blocks) is not int or blocks < 1 or (dim is not None and shape[dim] % blocks):
            raise ValueError(f"{blocks!r:.40} blocks cannot lie along dimension {dim} of the shape {shape}")
        return cls(tuple(shape), dim, blocks)


@dataclass(frozen=True)
class Division:
    """Which part of a model a checkpoint has: number `part` of `of`. `run`: the same text in all parts of one model,
    and in no other. `placements`: by name, of each DTensor; None where there is none, and whoever divided the model
    knows how."""

    part: int
    of: int
    run: str
    placements: dict[str, Placement] | None

    def to_json(self) -> dict[str, Any]:
        placed = self.placements and {name: each.to_json() for name, each in self.placements.items()}
        return {"part": self.part, "of": self.of, "run": self.run, "placements": placed}

    @classmethod
    def of_model(cls, model: nn.Module, model_group: Any, run: str) -> Division | None:
        """None of a whole model. `model_group`: an overspill.ranks.Group, or None."""
        found = {name: p for name, p in model.named_parameters() if is_divided(p)}
        if found:
            mesh: Any = next(iter(found.values())).device_mesh  # check() and copies() let one through
            part, of = mesh.get_local_rank(), mesh.size()
        else:
            part, of = (model_group.rank, model_group.world) if model_group is not None else (0, 1)
        placements = {name: Placement.of(p) for name, p in found.items()}
        return cls(part, of, run, placements or None) if of > 1 else None

    @classmethod
    def from_json(cls, value: Any) -> Division | None:
        """What to_json gave; None of None. Raises ValueError, LookupError or TypeError for anything else."""
        if value is None:
            return None
        part, of, run, placed = value["part"], value["of"], value["run"], value["placements"]
        if not (type(part) is int and type(of) is int and 0 <= part < of <= 2**20 and isinstance(run, str)):
            raise ValueError(f"part {part!r:.40} of {of!r:.40} of the run {run!r:.40}")
        if placed is not None:
            placed = {name: Placement.from_json(each) for name, each in placed.items()}
        return cls(part, of, run, placed)
