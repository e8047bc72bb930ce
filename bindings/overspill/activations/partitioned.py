"""Activations that each rank of a model-parallel group keeps a slice of (`engine.partition_activations`; ZeRO-R's P_a,
Rajbhandari et al., arXiv 1910.02054, section 6.1; with `budget.activations` the slices move, as in P_a+cpu).

Autograd keeps the inputs of a block that backward computes again. Under tensor parallelism most of these inputs are the
same on all ranks. Then each rank keeps one slice of such an input, and the ranks exchange their slices before the block
is computed again. At each call the ranks compare digests of the inputs' bytes, to find out which are the same."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import _core

if TYPE_CHECKING:
    from ..ranks import Group
    from .moving import Moved, Moving

FROM = 4096  # bytes; smaller ones are kept whole
_MOST = 64  # inputs of one call that are compared, the first ones
_DIGEST_BYTES = 8


class Partitioning:
    """Of one engine. `group`: the ranks that hold the other parts of the model, which make the same calls in the same
    order. `kept_bytes`: bytes of the slices that this rank has kept since the start; `whole_bytes`: bytes of the
    tensors that they are slices of."""

    def __init__(self, group: Group, owner: Any):
        self.group, self.owner = group, owner
        self.kept_bytes = self.whole_bytes = 0

    def as_dict(self) -> dict[str, int]:
        return {"kept_bytes": self.kept_bytes, "whole_bytes": self.whole_bytes}

    def alike(self, leaves: Sequence[Any]) -> Alike:
        """Which of a call's inputs are the same on all ranks. Collective. Raises EngineFailed."""
        mine = [leaf for leaf in leaves if _is_candidate(leaf)][:_MOST]
        table = bytearray(_MOST * _DIGEST_BYTES)  # as long on all ranks, whatever they have
        for number, leaf in enumerate(mine):
            at = number * _DIGEST_BYTES
            table[at : at + _DIGEST_BYTES] = _digest(leaf).to_bytes(_DIGEST_BYTES, "little")
        tables = self.group.tables(table)
        same = [
            leaf
            for number, leaf in enumerate(mine)
            if len({bytes(each[number * _DIGEST_BYTES :][:_DIGEST_BYTES]) for each in tables}) == 1
        ]
        return Alike(self, same)

    def keep(self, tensor: torch.Tensor) -> Slice:
        flat = tensor.detach().view(-1)
        begin, end = _bounds(flat.numel(), self.group.rank, self.group.world)
        mine = flat[begin:end].clone()
        self.kept_bytes += mine.nbytes
        self.whole_bytes += tensor.nbytes
        moving: Moving | None = self.owner.moving
        moved = moving.keep(mine) if moving is not None else None
        return Slice(self, moved or mine, tensor)


class Alike:
    """Inputs of one call that all ranks have, by id: they live while this does."""

    def __init__(self, owner: Partitioning, tensors: Sequence[torch.Tensor]):
        self.owner, self._tensors = owner, {id(each): each for each in tensors}

    def keep(self, tensor: torch.Tensor) -> Slice | None:
        """None where it is none of them."""
        return self.owner.keep(tensor) if id(tensor) in self._tensors else None


class Slice:
    """What autograd has of a tensor: this rank's slice."""

    __slots__ = ("dtype", "mine", "partitioning", "shape")

    def __init__(self, partitioning: Partitioning, mine: torch.Tensor | Moved, tensor: torch.Tensor):
        self.partitioning, self.mine, self.shape, self.dtype = partitioning, mine, tensor.shape, tensor.dtype

    def tensor(self) -> torch.Tensor:
        """The whole, of all ranks' slices. Collective. Raises EngineFailed."""
        if self.partitioning.owner.closed:
            raise RuntimeError(f"overspill: {self.partitioning.owner.closed}")
        mine = self.mine if isinstance(self.mine, torch.Tensor) else self.mine.tensor()
        whole = torch.empty(self.shape, dtype=self.dtype)
        flat, group = whole.view(-1), self.partitioning.group
        parts = [flat[slice(*_bounds(flat.numel(), rank, group.world))] for rank in range(group.world)]
        parts[group.rank].copy_(mine)
        group.all_gather(parts)
        return whole


def _is_candidate(leaf: Any) -> bool:
    if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided or leaf.device.type != "cpu":
        return False
    if leaf.is_conj() or leaf.is_neg() or leaf.nbytes < FROM or not leaf.is_contiguous():
        return False
    return not (leaf.is_leaf and leaf.requires_grad)


def _digest(tensor: torch.Tensor) -> int:
    """Of the bytes, the shape and the dtype; never 0, which stands for no tensor."""
    form = zlib.crc32(f"{list(tensor.shape)} {tensor.dtype}".encode())
    return (_core.digest(tensor.data_ptr(), tensor.nbytes) ^ form) % 2**64 or 1


def _bounds(elements: int, rank: int, world: int) -> tuple[int, int]:
    return elements * rank // world, elements * (rank + 1) // world
