"""What a script meets that touches a released parameter: the weight.

A released parameter has a class of its own (released_class.py), and torch hands each function, method and
attribute of it over to `run`. Those that need no weights run as they are. All else runs on the real weights: the units
of the parameters among the arguments are shown, the function runs, and they are hidden again. Inside forward they are
shown by guard.touch, and stay shown for a while.

What the function returned may lie over a unit's memory (`p.data`, `p.detach()`, a numpy array). Then the unit is lent
(lending.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass
from torch.autograd.graph import increment_version

from . import calls, kept, released_class, saved
from .calls import Call, books, here, opaque
from .guard import METADATA_FUNCTIONS, collect, guard, touch, units_of
from .segments import Segment, registry

# What would take the memory of a parameter away, or its shape, and what to do in its place.
_REFUSED = {
    torch.Tensor.share_memory_: "send copy.deepcopy(model) or model.state_dict() to the other process",
    torch.Tensor.set_: "copy_ the values",
    torch.Tensor.resize_: "make the model with the new shape before overspill.initialize",
    torch.Tensor.resize_as_: "make the model with the new shape before overspill.initialize",
    torch.Tensor.t_: "take a view, p.t()",
    torch.Tensor.transpose_: "take a view, p.transpose(...)",
    torch.Tensor.swapaxes_: "take a view, p.swapaxes(...)",
    torch.Tensor.swapdims_: "take a view, p.swapdims(...)",
    torch.Tensor.squeeze_: "take a view, p.squeeze()",
    torch.Tensor.unsqueeze_: "take a view, p.unsqueeze(...)",
    torch.Tensor.as_strided_: "take a view, p.as_strided(...)",
}
# They write into what they are given, and count no versions of it.
_UNCOUNTED = {
    getattr(torch, name) for name in dir(torch) if name.startswith("_fused_") and name.endswith("_")
}
# Scripts tell by these which tensors share memory. A released parameter has an address of its own, of memory that reads
# as NaN; but safetensors reads by the address.
_RAW = {torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.storage}
# Detaches parameters for a state_dict, in which hooks.StateDictHook then puts the weights in the place of those.
_SAVES = torch.nn.Module._save_to_state_dict.__code__


@opaque
def run(func: Callable, args: tuple, kwargs: dict) -> Any:
    """What torch is about to do to released parameters."""
    if func in METADATA_FUNCTIONS or _needs_no_weights(func, sys._getframe(2)):
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    segments = collect(args, kwargs)
    if not segments or any(_is_closed(each) for each in (*args, *kwargs.values())):
        raise RuntimeError(
            f"overspill: the engine of this parameter is closed, and its weights are gone, so there is no "
            f"{_name(func)}: make model and engine anew, and load a checkpoint"
        )
    if func in _REFUSED:
        raise RuntimeError(
            f"overspill: {_name(func)} of {segments[0].name}, whose memory the engine holds: {_REFUSED[func]}"
        )
    if guard.on():
        touch(units_of(segments))
        return func(*args, **kwargs)
    return on_weights(segments, func, *args, **kwargs)


def _needs_no_weights(func: Callable, caller: FrameType) -> bool:
    if func in _RAW:
        return not caller.f_globals.get("__name__", "").startswith("safetensors")
    return func is torch.Tensor.detach and caller.f_code is _SAVES


def _is_closed(argument: Any) -> bool:
    """Whether it is, or has, a parameter whose engine is closed."""
    if isinstance(argument, (tuple, list)):
        return any(map(_is_closed, argument))
    return released_class.is_released_class(type(argument)) and id(argument) not in registry


opaque(released_class.torch_function)
released_class.ask = run


def on_weights(segments: list[Segment], func: Callable, *args: Any, **kwargs: Any) -> Any:
    """func(...) outside forward, with real weights in the parameters. What it saves for autograd of them are handles;
    what it edits in them becomes the weight."""
    units = units_of(segments)
    stack = here.stack
    call = Call(stack, sys._getframe())
    with calls.Alone():
        with DisableTorchFunction():
            calls.hold_block(call, units)
        saves = torch.is_grad_enabled() and stack.remove_modes is None  # else this is inside such a call
        try:
            if saves:
                stack.remove_modes = guard.remove_modes
                saved.push_hooks()
            # Not in a name here: the frame of a call that is interrupted lives until a garbage collection.
            return _made(func, segments, saves, func(*args, **kwargs))
        finally:
            with DisableTorchFunction():
                calls.work(sys._getframe(), ending=call)
                if call in books.blocks:
                    calls.end_function(call, segments)
                books.open = False
                call.python = None  # the frame has the call among its locals
                if saves:
                    stack.without_modes()


def _made(func: Callable, segments: list[Segment], saves: bool, result: Any) -> Any:
    if func in _UNCOUNTED:
        for segment in segments:
            increment_version(segment.parameter)
    if saves:
        kept.put_into_files(result, segments)
    return result


def _name(func: Callable) -> str:
    """As a script writes it."""
    name = getattr(func, "__name__", str(func))
    owner = getattr(func, "__self__", None)
    return getattr(owner, "__name__", name) if name in ("__get__", "__set__") else name
