"""What autograd saves: a handle where it would save a parameter or a view of one, the tensor itself
elsewhere.

A handle costs no memory of the model; unpacking it acquires the unit again. Both kinds carry the version
that torch itself compares
when no hooks are set, so that an in-place change between forward and backward raises here as it does there.
"""

from __future__ import annotations

import functools
import sys
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction, _autograd

from . import calls, leases, showing, vertical
from .activations.moving import Moved
from .activations.partitioned import Slice
from .calls import books, in_backward
from .divided import form_of, in_form, is_divided, memory_of
from .segments import Segment, Unit, registry

_PLAIN = (torch.Tensor, nn.Parameter)
_TRANSFORMS = torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp


class Handle:
    """`offset`, in elements of `dtype`, counts from the start of the unit's memory. `form`: of a DTensor that has its
    part there (divided.py)."""

    __slots__ = ("dtype", "form", "generation", "offset", "segment", "size", "stride", "unit", "version")

    def tensor(self) -> torch.Tensor:
        unit, segment = self.unit, self.segment
        if unit.residency.closed:
            raise RuntimeError(f"overspill: {segment.name}: {unit.residency.closed}")
        if not unit.residency.current:
            unit.residency.refresh()
        vertical.before(unit)
        calls.work(sys._getframe())  # it may release a block whose edits become weights
        if (why := self._outdated()) is not None:
            books.open = False
            raise RuntimeError(f"overspill: {why}")
        keep = in_backward()
        if keep:
            showing.remember(unit)
        idle = unit.flat is None
        flat = leases.hold(unit)
        if self.dtype != unit.dtype:
            flat = flat.view(torch.uint8).view(self.dtype)
        view = flat.as_strided(self.size, self.stride, self.offset)
        if idle and not keep:
            leases.drop(unit)
        books.open = False
        return in_form(self.form, view)

    def _outdated(self) -> str | None:
        name = self.segment.name
        if self.generation != self.unit.generation:
            return (
                f"{name} was saved for backward and has been updated since (engine.step, a loaded checkpoint, "
                "a write outside forward): run backward before, or forward again"
            )
        if self.version is not None and self.segment.parameter._version != self.version:
            return (
                f"one of the variables needed for gradient computation, {name}, has been modified by an inplace "
                "operation"
            )
        return None


class Activation:
    """A tensor that is no weight, detached: holding it whole would be a cycle through its own graph."""

    __slots__ = ("tensor", "version")


def pack(tensor: torch.Tensor) -> Any:
    """A Handle, a Moved, a Slice, an Activation, or the tensor (kinds of tensors that have no storage of their own)."""
    with DisableTorchFunction():
        handle = _handle(tensor)
        if handle is not None:
            return handle
        if not (_has_memory(tensor) or is_divided(tensor)):
            return tensor
        if (alike := calls.here.stack.alike) is not None and (kept := alike.keep(tensor)) is not None:
            return kept
        under_way = _under_way()
        owner = None if under_way is None else under_way.owner
        if owner is not None and owner.tracer is not None and _has_memory(tensor):
            owner.tracer.saved(tensor)
        if owner is not None and owner.moving is not None and _has_memory(tensor):
            moved = owner.moving.keep(tensor)
            if moved is not None:
                return moved
        if owner is not None and owner.watch is not None:
            owner.watch.saved(tensor, under_way.module)
        saved = Activation()
        saved.tensor, saved.version = tensor.detach(), tensor._version
        return saved


def unpack(saved: Any) -> torch.Tensor:
    if type(saved) is Activation:
        tensor = saved.tensor
        with DisableTorchFunction():
            if tensor._version != saved.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    "inplace operation: "
                    f"{tensor.type()} {list(tensor.shape)} is at version {tensor._version}, expected "
                    f"{saved.version}"
                )
        return tensor
    if type(saved) in (Handle, Moved, Slice):
        with DisableTorchFunction():
            tensor = saved.tensor()
            if type(saved) is Moved and (watch := saved.kept.owner.watch) is not None:
                watch.came(tensor.nbytes)
            return tensor
    return saved


def _under_way() -> calls.Call | None:
    """The call of an engine's module that is under way, where the engine keeps or counts what autograd saves."""
    listed = calls.here.stack.calls
    owner = listed[-1].owner if listed else None
    if owner is None or owner.closed or calls.here.stack.leaves:
        return None
    if owner.moving is None and owner.watch is None and owner.tracer is None:
        return None
    # A call that was broken off is listed still.
    return listed[-1] if listed[-1].is_on(sys._getframe()) else None


def compose(user_pack: Callable, user_unpack: Callable) -> tuple[Callable, Callable]:
    """A user's hooks, with weights taken out before they see them. torch runs the innermost pair only."""
    # Inside a block that is computed again the script looks after what its own hooks take.
    inside = calls.here.stack.saves is not None

    def composed_pack(tensor: torch.Tensor) -> Any:
        with DisableTorchFunction():
            handle = _handle(tensor)
            saves = None if handle is not None or inside else calls.here.stack.saves
            if saves is not None and _has_memory(tensor):
                saves.append((tensor.detach(), tensor._version))
        return user_pack(tensor) if handle is None else handle

    def composed_unpack(saved: Any) -> torch.Tensor:
        if type(saved) is not Handle:
            return user_unpack(saved)
        with DisableTorchFunction():
            return saved.tensor()

    composed_pack.overspill_composed = True
    composed_pack.overspill_gone = False  # taken away by the engine, before the script did
    return composed_pack, composed_unpack


def is_gone(pair: tuple[Any, Any]) -> bool:
    return getattr(pair[0], "overspill_gone", False)


def put_back(above: list[tuple[Any, Any]]) -> None:
    """What pop_hooks has taken away."""
    for pair in reversed(above):
        _autograd._push_saved_tensors_default_hooks(*pair)
        if is_gone(pair):
            pair[0].overspill_gone = False


def push_hooks() -> None:
    """Weights are saved as handles from now on in this thread, until guard.remove_modes. RuntimeError where torch
    allows no hooks: what it saved would be NaN once the unit is released."""
    if are_refused():
        raise RuntimeError(
            "overspill: torch.func.grad, vjp, jvp, jacrev, jacfwd and hessian of a module that an engine has are not "
            "supported, since they allow no hooks on saved tensors: call the engine inside them, engine(x), which runs "
            "on copies of all weights, or use torch.autograd.grad"
        )
    users = _autograd._top_saved_tensors_default_hooks(True)
    if users is None:
        _autograd._push_saved_tensors_default_hooks(pack, unpack)
        return
    is_composed = hasattr(users[0], "overspill_composed")
    ours, theirs = (functools.partial(users[0]), users[1]) if is_composed else compose(*users)
    ours.overspill_guard = ours.overspill_composed = True  # type: ignore[attr-defined]
    _autograd._push_saved_tensors_default_hooks(ours, theirs)


def pop_hooks() -> list[tuple[Any, Any]]:
    """Undoes push_hooks. Returns the pairs that lay above, innermost first, which are gone, too."""
    above: list[tuple[Any, Any]] = []
    while (top := _autograd._top_saved_tensors_default_hooks(True)) is not None:
        _autograd._pop_saved_tensors_default_hooks()
        if top[0] is pack or hasattr(top[0], "overspill_guard"):
            return above
        if hasattr(top[0], "overspill_gone"):
            top[0].overspill_gone = True
        above.append(top)
    put_back(above)  # ours were not there: Ctrl-C struck before they were
    return []


def are_refused() -> bool:
    """Inside torch.func.grad, vjp, jacrev and hessian, which allow no hooks, and jvp and jacfwd, whose tensors are not
    the memory that the engine leases."""
    if torch._C._functorch.maybe_current_level() is None:
        return False
    return any(each.key() in _TRANSFORMS for each in torch._C._functorch.get_interpreter_stack())


def _has_memory(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.layout is torch.strided


def _handle(tensor: torch.Tensor) -> Handle | None:
    """None where the tensor is neither a parameter of an engine nor a view of one's memory."""
    memory = memory_of(tensor)
    if not _has_memory(memory):
        return None
    segment = registry.get(id(tensor))
    if segment is not None:
        return _make(segment.unit, segment, tensor, segment.offset, segment.stride)
    lease = leases.of_storage.get(memory.untyped_storage()._cdata)
    if lease is None or lease[0].expired():
        return None
    unit, offset = lease[1], memory.storage_offset()
    position = offset * memory.element_size() // unit.dtype.itemsize
    segment = unit.segments[bisect_right(unit.segments, position, key=lambda s: s.offset) - 1]
    return _make(unit, segment, tensor, offset, memory.stride())


def _make(unit: Unit, segment: Segment, tensor: torch.Tensor, offset: int, stride: tuple) -> Handle:
    handle = Handle()
    handle.unit, handle.segment, handle.generation = unit, segment, unit.generation
    handle.offset, handle.size, handle.stride = offset, memory_of(tensor).size(), stride
    handle.dtype = tensor.dtype
    handle.form = form_of(tensor)
    # A view made through .data counts its own versions: torch would not compare them either.
    version = tensor._version
    handle.version = version if version == segment.parameter._version else None
    return handle
