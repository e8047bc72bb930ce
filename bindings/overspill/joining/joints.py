"""How the parts of one tensor make the whole: which slices of which parts, in which order.

A style (styles.py) decides that from shapes alone, before any byte is read. Then one piece of code joins tensors, on
the CPU, with one part in memory beside the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch

from .._core import OverspillError

Shape = tuple[int, ...]


class Misfit(OverspillError, ValueError):
    """Why shapes do not make a whole."""


class Slice(NamedTuple):
    """Of a part along the joint's dimension."""

    part: int
    start: int
    length: int


@dataclass(frozen=True)
class Joint:
    """`shape`: of the whole, which is `slices` one behind the other along `dim`; of a tensor without dimensions, and
    where dim is None, the one part that `slices` names. `same`: pairs that have to be equal."""

    shape: Shape
    dim: int | None
    slices: tuple[Slice, ...]
    same: tuple[tuple[Slice, Slice], ...] = ()

    def join(self, read: Callable[[int], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The whole. `read`: a part by its number, in `dtype`."""
        if self.dim is None or (len(self.slices) == 1 and self.slices[0].length == self.shape[self.dim]):
            return self._cut(read(self.slices[0].part), self.slices[0]).contiguous()
        whole = torch.empty(self.shape, dtype=dtype)
        for part, places in self._by_part():
            tensor = read(part)
            for begin, piece in places:
                whole.narrow(self.dim, begin, piece.length).copy_(self._cut(tensor, piece))
        return whole

    def differing(self, read: Callable[[int], torch.Tensor]) -> tuple[int, int] | None:
        """Two parts that have to agree and do not; None where all agree. NaNs agree with the same NaNs."""
        for first, others in groupby(self.same, key=lambda pair: pair[0]):
            one = _bytes(self._cut(read(first.part), first))
            for _, other in others:
                if not torch.equal(one, _bytes(self._cut(read(other.part), other))):
                    return first.part, other.part
        return None

    def _by_part(self) -> Iterator[tuple[int, list[tuple[int, Slice]]]]:
        """Each part once, with its slices and where in the whole they begin."""
        begin, found = 0, []
        for piece in self.slices:
            found.append((begin, piece))
            begin += piece.length
        found.sort(key=lambda place: place[1].part)
        for part, places in groupby(found, key=lambda place: place[1].part):
            yield part, list(places)

    def _cut(self, tensor: torch.Tensor, piece: Slice) -> torch.Tensor:
        return tensor if self.dim is None else tensor.narrow(self.dim, piece.start, piece.length)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.contiguous().view(-1)
    return flat.view(torch.uint8) if flat.numel() else flat


def equal_in_all(shapes: Sequence[Shape]) -> Joint:
    """Every part has the whole."""
    shape = shapes[0]
    if any(other != shape for other in shapes):
        raise Misfit(
            f"its parts have the shapes {listed(shapes)}, and one that is whole in each has one shape"
        )
    dim, length = (0, shape[0]) if shape else (None, 1)
    slices = [Slice(part, 0, length) for part in range(len(shapes))]
    return Joint(shape, dim, tuple(slices[:1]), tuple((slices[0], other) for other in slices[1:]))


def chained(shapes: Sequence[Shape], dim: int, slices: Sequence[Slice], same=()) -> Joint:
    """Slices of parts whose other dimensions are the same."""
    check_others(shapes, dim)
    length = sum(piece.length for piece in slices)
    shape = (*shapes[0][:dim], length, *shapes[0][dim + 1 :])
    return Joint(shape, dim, tuple(piece for piece in slices if piece.length), tuple(same))


def check_others(shapes: Sequence[Shape], dim: int) -> None:
    others = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes if len(shape) > dim}
    if len(others) != 1 or any(len(shape) <= dim for shape in shapes):
        raise Misfit(f"its parts have the shapes {listed(shapes)}, which do not fit along dimension {dim}")


def listed(shapes: Sequence[Shape]) -> str:
    found = [str(list(shape)) for shape in shapes[:4]]
    return ", ".join(found) + (f" and {len(shapes) - 4} more" if len(shapes) > 4 else "")
