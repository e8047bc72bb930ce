"""Weights and states as the core has them, for scripts, exports and checkpoints. Every read goes through one buffer of
the core, and what it reads may change under a step; so a thread reads alone (calls.Alone), or as a part of what it has
under way itself. An edit inside a `gathered` block, or inside a forward, is a weight from the moment that somebody
reads it; else it becomes one where the block or the forward ends, or, where another thread works then, at the next
call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch._C import DisableTorchFunction

from . import calls, packed, showing
from .segments import Segment, Unit, registry
from .units import DTYPES


def hand_over(units: Iterable[Unit]) -> None:
    """What was edited in units that are shown becomes the weight. All ranks do it, and have edited alike. Raises
    RuntimeError where another thread is at work in them, StoreError where the core cannot keep the edit."""
    units = list(units)
    owners = {unit.residency for unit in units}
    with DisableTorchFunction():
        edited = [unit for unit in units if unit.shown and any(s.edited() for s in unit.segments)]
        if edited or any(owner.lending.has_any() for owner in owners):
            with calls.Alone():
                for unit in edited:
                    showing.hand_over(unit)
                for owner in owners:
                    showing.settle_all(owner)


def weight(segment: Segment, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A copy of the weight, after pending updates, in its own dtype, or the exact master (torch.float32)."""
    with torch.inference_mode(False), DisableTorchFunction():
        return _read_into(segment, _room(segment, dtype or segment.unit.dtype))


def copy(segment: Segment) -> torch.Tensor:
    """As `weight`, for a script to keep: where the engine has a disk, a large one lies in a file there (files.py), so
    that copies of a model larger than memory have room."""
    dtype, folder = segment.unit.dtype, segment.unit.residency.folder
    with torch.inference_mode(False), DisableTorchFunction():
        out = folder.tensor(segment.shape, segment.stride, dtype, f"a copy of {segment.name}")
        return _read_into(segment, _room(segment, dtype) if out is None else out)


def copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of parameters, as `copy`, and of buffers, on the CPU, by the same names; a tied one is one tensor. All ranks call
    it with the same names."""
    made: dict[int, torch.Tensor] = {}
    with calls.Alone():
        for tensor in tensors.values():
            if id(tensor) not in made:
                segment = registry.get(id(tensor))
                made[id(tensor)] = (tensor.clone().cpu() if segment is None else copy(segment)).detach()
    return {name: made[id(tensor)] for name, tensor in tensors.items()}


def _room(segment: Segment, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(segment.shape, segment.stride, dtype=dtype, device="cpu")


def _read_into(segment: Segment, out: torch.Tensor) -> torch.Tensor:
    read(segment, out)
    return segment.as_parameter(out)


def read(segment: Segment, out: torch.Tensor) -> None:
    """Into `out`, which is on the CPU and lies as the segment does. RuntimeError where another thread is at work."""
    unit, into = segment.unit, out
    if unit.packing is not None:
        if out.dtype is not unit.dtype:
            raise ValueError(
                f"overspill: {segment.name} is {unit.dtype}, held in {unit.packing}: it has no {out.dtype}"
            )
        into = torch.empty(segment.packed_bytes, dtype=torch.uint8)
    with calls.Alone():
        hand_over((unit,))
        core = unit.residency.core
        core.read_weight(unit.index, segment.index, into.data_ptr(), into.nbytes, DTYPES[into.dtype])
    if unit.packing is not None:
        packed.unpack_into(unit.packing, into, out)


def state(segment: Segment, name: str) -> torch.Tensor:
    """A copy in fp32 of a state, by the core's name, or of "grad". RuntimeError where another thread is at work."""
    unit = segment.unit
    with torch.inference_mode(False), DisableTorchFunction(), calls.Alone():
        out = _room(segment, torch.float32)
        unit.residency.core.read_state(unit.index, segment.index, name, out.data_ptr(), out.numel() * 4)
        return segment.as_parameter(out)


def gradient(segment: Segment) -> torch.Tensor | None:
    """A copy in fp32 of what the next step would use, without the loss's scale; of several ranks their mean, or sum.
    None where there is none."""
    return _gradient(segment, segment.unit.residency.core.read_whole_gradient)


def own_gradient(segment: Segment) -> torch.Tensor | None:
    """The same of what this rank's own passes gave, before ranks sum it."""
    return _gradient(segment, segment.unit.residency.core.read_own_gradient)


def _gradient(segment: Segment, read: Callable[[int, int, int, int], bool]) -> torch.Tensor | None:
    with torch.inference_mode(False), DisableTorchFunction(), calls.Alone():
        out = _room(segment, torch.float32)
        found = read(segment.unit.index, segment.index, out.data_ptr(), out.nbytes)
        if not found:
            return None
        if (scale := segment.unit.residency.gradients.loss_scale) != 1:
            out.div_(scale)
        return segment.as_parameter(out)
