"""Everything of torch that is changed, in one place. The changes hold while at least one engine lives and
leave other models alone.

torch.autograd._engine_run_backward     enters the guard, so that a plain loss.backward() finds the weights
saved_tensors_hooks.__enter__           keeps our handles in front of a user's hooks: torch runs the
innermost pair only
saved_tensors_hooks.__exit__            leaves what is on top where the engine has taken the object's own away
Parameter.data, Parameter.grad          properties: `data` is the weight, also of a released parameter; `grad` the
gradient that the engine holds
Parameter.__deepcopy__, __reduce_ex__   copies and pickles get real weights; all four of DTensor too, where it is loaded
Module.__reduce_ex__                    copies and pickles of modules have no hooks of the engine
Module._apply, Module.zero_grad         .to() and .half() are refused, zero_grad() reaches the engine
torch.nn.utils.clip_grad_norm_, clip_grad_value_   clip in the engine, or one gradient after the other
AveragedModel.update_parameters         takes one parameter after the other
GradScaler._unscale_grads_              asks the engine whether a gradient is not finite, in place of reading all
torch._dynamo.config                    is told to look at hooks: else torch.compile, by whatever name a script has it,
runs code that it made of a module without them
ForkingPickler's reducer of Parameter   refuses to share released memory with another process
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction
from torch.autograd import graph
from torch.nn.utils import clip_grad
from torch.optim import swa_utils

from . import averages, calls, given, gradients, hooks, reading, released, released_class, saved
from .divided import is_divided, memory_of, parameter_classes
from .guard import guard, touch
from .residency import Residency
from .segments import Segment, get_data, get_grad, registry, set_data, set_grad

_run_backward = graph._engine_run_backward
_enter_saved_tensors_hooks = graph.saved_tensors_hooks.__enter__
_exit_saved_tensors_hooks = graph.saved_tensors_hooks.__exit__
_ENTERED = "_overspill_entered"  # the pairs for which an object was entered, and not left
# A script that imported these before has torch's wrappers, which call what is in the cell.
_norm_cell, _value_cell = (f.__closure__[0] for f in (clip_grad.clip_grad_norm_, clip_grad.clip_grad_value_))
_clip_grad_norm, _clip_grad_value = _norm_cell.cell_contents, _value_cell.cell_contents
_unscale_grads = torch.amp.GradScaler._unscale_grads_
_apply = nn.Module._apply
_zero_grad = nn.Module.zero_grad
_deepcopy = nn.Parameter.__deepcopy__
_reduce = nn.Parameter.__reduce_ex__
_send = ForkingPickler._extra_reducers[nn.Parameter]

_OTHER_PROCESS = (
    "the engine holds its memory, which no other process can use; send copy.deepcopy(model) or "
    "model.state_dict()"
)


def run_backward(outputs: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
    if saved.are_refused():  # inside torch.func, where no module of an engine has run: see saved.push_hooks
        return _run_backward(outputs, gradients, *args, **kwargs)
    if any(id(each) in registry for each in gradients):
        gradients = tuple(map(_weight_of, gradients))
    _require_whole(args[2] if len(args) > 2 else ())
    with DisableTorchFunction():
        call = guard.begin_backward(sys._getframe())
    try:
        with (
            torch._C._EnableTorchFunction()
        ):  # released.run calls torch.autograd.grad without; hooks may read parameters
            out = _run_backward(outputs, gradients, *args, **kwargs)
    except BaseException:
        guard.abandon_backward(call)
        call.python = None
        raise
    guard.end_backward(call)
    # This frame has the call among its locals. Else it would keep the frames of its callers until a garbage collection,
    # and with them the weights that a backward of the script's own has when it calls this one.
    call.python = None
    return out


def _require_whole(inputs: Any) -> None:
    """Of what torch.autograd.grad and backward(inputs=...) name: gradients of weights in tiles do not pass there."""
    for each in inputs or ():
        segment = registry.get(id(each))
        if segment is not None and segment.unit.part_bytes:
            raise RuntimeError(
                f"overspill: budget.tile: {segment.name} is computed in tiles, and torch.autograd.grad and "
                "backward(inputs=...) would miss its gradient: call backward without inputs and read p.grad or "
                f"engine.grad(p), or give budget.tile more than {segment.bytes} bytes"
            )


def _weight_of(tensor: Any) -> Any:
    """Of a parameter, which may be released, a copy of its weight."""
    segment = registry.get(id(tensor))
    if segment is None:
        return tensor
    return reading.weight(segment).to(segment.unit.residency.place.device)


def enter_saved_tensors_hooks(self: graph.saved_tensors_hooks) -> None:
    with DisableTorchFunction():
        guard.forget_broken(sys._getframe())  # or its left-overs would lie below these
    pair = saved.compose(self.pack_hook, self.unpack_hook)
    vars(self).setdefault(_ENTERED, []).append(pair)
    torch._C._autograd._push_saved_tensors_default_hooks(*pair)


def exit_saved_tensors_hooks(self: graph.saved_tensors_hooks, *error: Any) -> None:
    """Torch pops whatever is on top, which would be another's where the engine has taken these away."""
    entered = vars(self).get(_ENTERED)
    if not entered or not saved.is_gone(entered.pop()):
        _exit_saved_tensors_hooks(self, *error)


def owners_of(parameters: Iterable[Any]) -> set[Residency]:
    """The engines of those of these that are trained."""
    segments = [registry[id(p)] for p in parameters if id(p) in registry]
    return {s.unit.residency for s in segments if s.unit.is_trained}


def owner_of_all(parameters: Iterable[Any]) -> Residency | None:
    """The engine whose gradients are those of these parameters, all of them and no others."""
    parameters = [p for p in parameters if p.requires_grad]
    owners = owners_of(parameters)
    if len(owners) != 1:
        return None
    (owner,) = owners
    mine = {id(p) for p in parameters if id(p) in registry}
    with calls.Alone(), DisableTorchFunction():
        owner.gradients.settle()
        others = any(
            s.has_gradient() for s in owner.segments if id(s.parameter) not in mine or s.unit.trained_by_torch
        )
        others = others or any(p.grad is not None for p in parameters if id(p) not in mine)
    return None if others else owner


def clip_grad_norm_(
    parameters: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    owners = owners_of(parameters)
    if not owners:
        return _clip_grad_norm(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    if not any(map(_with_gradient, parameters)):
        for owner in owners:
            owner.gradients.clip_by_hand()
        return _clip_grad_norm(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    owner = owner_of_all(parameters) if float(norm_type) == 2.0 else None
    if owner is None:
        return gradients.clip_norm(parameters, float(max_norm), float(norm_type), error_if_nonfinite, owners)
    with calls.Alone(), DisableTorchFunction():
        if error_if_nonfinite and not math.isfinite(owner.gradients.clip_norm(math.inf)):
            raise RuntimeError(
                "The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot be clipped."
            )
        return torch.tensor(owner.gradients.clip_norm(given.max_norm(max_norm)))


def clip_grad_value_(parameters: Any, clip_value: float, foreach: bool | None = None) -> None:
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    owners = owners_of(parameters)
    if not owners:
        return _clip_grad_value(parameters, clip_value, foreach)
    gradients.clip_value(parameters, float(clip_value), owners)


def apply(self: nn.Module, fn: Callable, recurse: bool = True) -> nn.Module:
    mine = [registry[id(p)] for p in self._parameters.values() if id(p) in registry]
    if not mine:
        return _apply(self, fn, recurse)
    for segment in mine:
        probe = torch.empty(0, dtype=segment.unit.dtype, device=segment.blank.device)
        changed = fn(probe)
        if changed.is_shared() and changed.device.type == "cpu":
            raise RuntimeError(f"overspill: {segment.name} cannot be shared: {_OTHER_PROCESS}")
        if changed.dtype != probe.dtype or changed.device != probe.device:
            raise RuntimeError(
                f"overspill: {segment.name} belongs to an engine: it cannot become {changed.dtype} on "
                f"{changed.device}. "
                "Convert the model before overspill.initialize"
            )
    if recurse:
        for child in self.children():
            child._apply(fn)
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = fn(buffer)
    return self


def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
    parameters = list(self.parameters())
    mine = {id(p) for p in parameters}
    owners = owners_of(parameters)
    if not owners:
        return _zero_grad(self, set_to_none)
    whole = set()
    for owner in owners:
        absent = [s for s in owner.segments if s.unit.is_trained and id(s.parameter) not in mine]
        with calls.Alone(), DisableTorchFunction():
            if not absent or not (owner.gradients.used or any(s.has_gradient() for s in absent)):
                owner.clear_gradients("model.zero_grad()", set_to_none)
                whole.add(owner)
    for p in parameters:
        segment = _with_gradient(p)
        if segment is None or segment.unit.residency not in whole:
            _clear(p, set_to_none)


def _clear(p: nn.Parameter, set_to_none: bool) -> None:
    """As torch's, of one parameter."""
    if set_to_none:
        p.grad = None
    elif (gradient := p.grad) is not None:
        gradient.detach_() if gradient.grad_fn is not None else gradient.requires_grad_(False)
        gradient.zero_()


def _data(self: nn.Parameter) -> torch.Tensor:
    """A view of the weight, whose writes are noticed."""
    segment = registry.get(id(self))
    if segment is None:
        return get_data(self)
    if not segment.is_shown():
        if not guard.on():
            return released.on_weights([segment], get_data, self)
        touch([segment.unit])
    with DisableTorchFunction():
        if segment.alias is None:
            segment.alias = get_data(self)
        return segment.alias.detach()


def _set_data(self: nn.Parameter, value: torch.Tensor) -> None:
    segment = registry.get(id(self))
    if segment is None:
        set_data(self, value)
    elif memory_of(value).shape != segment.shape or value.dtype != segment.unit.dtype:
        raise RuntimeError(
            f"overspill: {segment.name}.data stays {segment.unit.dtype} {list(segment.shape)}, "
            f"not {value.dtype} {list(value.shape)}"
        )
    elif not segment.is_shown() and not guard.on():
        released.on_weights([segment], _set_data, self, value)
    else:
        _data(self).copy_(value)


def _with_gradient(parameter: nn.Parameter) -> Segment | None:
    segment = registry.get(id(parameter))
    return segment if segment is not None and segment.unit.trainable else None


def _grad(self: nn.Parameter) -> torch.Tensor | None:
    segment = _with_gradient(self)
    if segment is None:
        return get_grad(self)
    owner = segment.unit.residency
    with calls.Alone(), DisableTorchFunction():
        calls.clear_spoiled(owner)
        gradients.take_in(segment)  # a hook of the script may come before ours
        return owner.gradients.read(segment)


def _set_grad(self: nn.Parameter, value: torch.Tensor | None) -> None:
    segment = _with_gradient(self)
    if segment is None:
        set_grad(self, value)
        return
    owner = segment.unit.residency
    with calls.Alone(), DisableTorchFunction():
        calls.clear_spoiled(owner)
        owner.gradients.write(segment, value)


def _real(segment: Segment, parameter: nn.Parameter, device: torch.device | None = None) -> nn.Parameter:
    kind = nn.Parameter if is_divided(parameter) else segment.kind
    return kind(reading.copy(segment).to(device), parameter.requires_grad)


def deepcopy_parameter(self: nn.Parameter, memo: dict) -> nn.Parameter:
    segment = registry.get(id(self))
    if segment is None:
        return (torch.Tensor.__deepcopy__ if is_divided(self) else _deepcopy)(self, memo)
    if id(self) not in memo:
        memo[id(self)] = _real(segment, self, segment.unit.residency.place.device)
    return memo[id(self)]


def reduce_parameter(self: nn.Parameter, protocol: int) -> Any:
    segment = registry.get(id(self))
    parameter = self if segment is None else _real(segment, self)
    return (torch.Tensor.__reduce_ex__ if is_divided(self) else _reduce)(parameter, protocol)


def reduce_module(self: nn.Module, protocol: Any) -> Any:
    found = object.__reduce_ex__(self, protocol)
    if isinstance(found, tuple) and len(found) > 2 and isinstance(found[2], dict):
        found = (*found[:2], hooks.without_hooks(found[2]), *found[3:])
    return found


def send_parameter(parameter: nn.Parameter) -> Any:
    """To another process, by torch.multiprocessing, which shares memory."""
    segment = registry.get(id(parameter))
    if segment is not None:
        raise RuntimeError(f"overspill: {segment.name} cannot be sent to another process: {_OTHER_PROCESS}")
    return _send(parameter)


def _heed_hooks() -> None:
    """torch.compile takes code that it made of a module without hooks for any module of the class, unless told. The
    import costs an engine nothing: torch.optim.Optimizer makes it for the engine's optimizer a moment later."""
    global _skips_hooks
    compiler = importlib.import_module("torch._dynamo")
    if _skips_hooks is None:
        _skips_hooks = compiler.config.skip_nnmodule_hook_guards
    compiler.config.skip_nnmodule_hook_guards = False
    compiler.reset()  # what was made before knows nothing of hooks


def unscale_grads(
    self: torch.amp.GradScaler,
    optimizer: Any,
    inv_scale: torch.Tensor,
    found_inf: torch.Tensor,
    allow_fp16: bool,
) -> dict[torch.device, torch.Tensor]:
    """`allow_fp16`: for an optimizer that takes the scale with its step, nothing is unscaled here."""
    asks = allow_fp16 and inv_scale.item() == 1  # else a script of its own has something divided
    find = getattr(optimizer, "_find_overflow", None) if asks else None
    if find is None:
        return _unscale_grads(self, optimizer, inv_scale, found_inf, allow_fp16)
    return find(found_inf)


_REPLACED = (
    (torch.amp.GradScaler, "_unscale_grads_", unscale_grads, _unscale_grads),
    (torch.autograd, "_engine_run_backward", run_backward, _run_backward),
    (graph, "_engine_run_backward", run_backward, _run_backward),
    (graph.saved_tensors_hooks, "__enter__", enter_saved_tensors_hooks, _enter_saved_tensors_hooks),
    (graph.saved_tensors_hooks, "__exit__", exit_saved_tensors_hooks, _exit_saved_tensors_hooks),
    (nn.Module, "_apply", apply, _apply),
    (nn.Module, "zero_grad", zero_grad, _zero_grad),
    (_norm_cell, "cell_contents", clip_grad_norm_, _clip_grad_norm),
    (_value_cell, "cell_contents", clip_grad_value_, _clip_grad_value),
    (nn.Module, "__reduce_ex__", reduce_module, nn.Module.__reduce_ex__),
    (swa_utils.AveragedModel, "update_parameters", averages.update, averages.update_all),
)
_OF_PARAMETERS = {
    "data": property(_data, _set_data),
    "grad": property(_grad, _set_grad),
    "__deepcopy__": deepcopy_parameter,
    "__reduce_ex__": reduce_parameter,
}
_engines: weakref.WeakSet[Residency] = weakref.WeakSet()  # those for whose sake torch is changed
_installed = False  # all of what is changed for the first of them
changing = threading.RLock()  # a garbage collection inside `install` may end another engine
_skips_hooks: bool | None = None  # the compiler's setting of before, where ours is in its place


def install(owner: Residency) -> None:
    """Called for every engine that starts to live. It is listed from the first: another one that ends meanwhile is not
    the last. What Ctrl-C broke off is done by the next call of this, or undone by `uninstall`."""
    global _installed
    with changing:
        _engines.add(owner)
        if not _installed:
            for place, name, ours, _ in _REPLACED:
                setattr(place, name, ours)
            for kind in (nn.Parameter, released_class.released_class(nn.Parameter)):
                ForkingPickler.register(kind, send_parameter)
            _heed_hooks()
            _installed = True
        for kind in parameter_classes():
            for name, ours in _OF_PARAMETERS.items():
                setattr(kind, name, ours)


def uninstall(owner: Residency) -> None:
    """Called for every engine that ends; the last one restores torch. May be called again where Ctrl-C broke it off,
    and for an engine that is not listed."""
    global _installed, _skips_hooks
    with changing:
        if owner not in _engines:
            return
        if len(_engines) > 1:
            _engines.discard(owner)
            return
        _installed = False
        calls.leave_torch(sys._getframe())
        for place, name, _, original in _REPLACED:
            setattr(place, name, original)
        ForkingPickler.register(nn.Parameter, _send)
        ForkingPickler._extra_reducers.pop(released_class.released_class(nn.Parameter), None)
        if _skips_hooks is not None:
            sys.modules["torch._dynamo"].config.skip_nnmodule_hook_guards = _skips_hooks
            _skips_hooks = None
        for kind in parameter_classes():
            for name in _OF_PARAMETERS:
                if name in vars(kind):
                    delattr(kind, name)
        nn.Parameter.__deepcopy__, nn.Parameter.__reduce_ex__ = _deepcopy, _reduce
        _engines.discard(owner)


def _after_fork() -> None:
    """In a child: the thread that held the lock is not there."""
    global changing
    changing = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
