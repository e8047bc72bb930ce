"""Logits that are never whole (`budget.logits`). Where the result of a linear layer outside the model's repeated blocks
would be larger than the key says, its call returns a stand-in. torch.nn.functional.cross_entropy of that is computed in
tiles: the logits of some tokens, then their loss, and the logits are forgotten. Backward computes them again. (Compare
Liger-Kernel's fused linear cross entropy, Hsu et al., arXiv 2410.10989, section 3.2, which
computes gradients in forward, and so holds the weight's until backward.)

On the way to the loss a stand-in takes other shapes, rows, dtypes, factors and caps. Any other function gets the logits
whole, and a warning says so once."""

from __future__ import annotations

import inspect
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from . import given, recompute, released
from .calls import here
from .divided import is_divided
from .guard import guard, touch, units_of
from .segments import registry

_Change = tuple[Callable, tuple, dict]  # of a tile's logits: a function, its further arguments

_RESHAPES = {torch.Tensor.view, torch.Tensor.reshape, torch.Tensor.flatten, torch.flatten, torch.reshape,
             torch.Tensor.unsqueeze, torch.unsqueeze, torch.Tensor.squeeze, torch.squeeze}  # fmt: skip
_CHANGES = {
    torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.double, torch.Tensor.to,
    torch.Tensor.mul, torch.Tensor.div, torch.Tensor.__mul__, torch.Tensor.__rmul__, torch.Tensor.__truediv__,
    torch.mul, torch.div, torch.Tensor.tanh, torch.tanh,
}  # fmt: skip
_LOOKS = {
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.ndimension,
    torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.is_floating_point, torch.Tensor.__len__,
    torch.Tensor.element_size, torch.Tensor.get_device, torch.Tensor.__hash__, torch.Tensor.is_contiguous,
    *(getattr(torch.Tensor, name).__get__ for name in (
        "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_cpu", "is_meta", "is_sparse",
        "is_nested", "is_quantized", "itemsize", "nbytes",
    )),
}  # fmt: skip


class Layer:
    """Stands in a linear layer's `__dict__` for its forward. `limit`: bytes of logits in fp32."""

    def __init__(self, name: str, module: nn.Linear, owner: Any, limit: int):
        self.name, self.owner, self.limit = name, owner, limit
        self.module = weakref.ref(module)
        self.replaced = module.__dict__.get("forward")
        self.__signature__ = inspect.signature(module.forward)
        self.told = False

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        module = self.module()
        assert module is not None
        rows = input.numel() // max(1, module.in_features)
        applies = self.replaced is None and type(module) is nn.Linear and type(input) is torch.Tensor
        if not applies or 4 * rows * module.out_features <= self.limit or self._stands_aside(module):
            return (self.replaced or types.MethodType(type(module).forward, module))(input)
        return Logits(self, input, (), _Modes.now(input.device))

    def _stands_aside(self, module: nn.Linear) -> bool:
        if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
            return True
        mine = (p for p in (module.weight, module.bias) if p is not None)
        return here.is_on_copies() or any(id(p) not in registry or is_divided(p) for p in mine)

    def with_weights(self, use: Callable[[nn.Linear], Any]) -> Any:
        """`use` of the layer, with its weights there; inside a call of the model or after it."""
        module = self.module()
        if module is None or self.owner.closed:
            raise RuntimeError(f"overspill: {self.owner.closed or self.owner.why_closed}")
        mine = [registry[id(p)] for p in (module.weight, module.bias) if p is not None]
        if not guard.on():
            return released.on_weights(mine, use, module)
        touch(units_of(mine))
        return use(module)

    def tokens(self) -> int:
        """Of a tile."""
        module = self.module()
        return max(1, self.limit // (4 * module.out_features)) if module is not None else 1

    def tell(self, function: Any) -> None:
        if not self.told:
            self.told = True
            name = getattr(function, "__name__", str(function))
            warnings.warn(
                f"overspill: budget.logits: {name} takes the logits of {self.name} whole, so they are not computed in "
                "tiles: give the model's result to torch.nn.functional.cross_entropy, or leave budget.logits out",
                stacklevel=given.script_level(),
            )


def layers_of(model: nn.Module) -> dict[nn.Linear, str]:
    """The linear layers outside the model's repeated blocks, with their names."""
    blocks = recompute.blocks_of(model, is_part=True)
    inside = {part for block in blocks for part in block.modules()}
    return {
        part: name for name, part in model.named_modules() if type(part) is nn.Linear and part not in inside
    }


class _Modes(NamedTuple):
    """Autograd and autocast as they were when the layer was called."""

    gradients: bool
    device: str
    autocast: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: torch.device) -> _Modes:
        kind = device.type
        return cls(
            torch.is_grad_enabled(), kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        )

    def again(self) -> torch.autocast:
        return torch.autocast(self.device, self.dtype, self.autocast)


class Logits(torch.Tensor):
    """linear(hidden, weight, bias), then `changes`. Its own memory is one number. Once it was whole, it stays so."""

    _layer: Layer
    _hidden: torch.Tensor
    _changes: tuple[_Change, ...]
    _modes: _Modes
    _whole: torch.Tensor | None

    @staticmethod
    def __new__(
        cls, layer: Layer, hidden: torch.Tensor, changes: tuple[_Change, ...], modes: _Modes
    ) -> Logits:
        module = layer.module()
        assert module is not None
        with torch._C.DisableTorchFunctionSubclass():
            dtype = modes.dtype if modes.autocast else hidden.dtype
            blank = torch.empty((), dtype=dtype, device=hidden.device)
            for function, args, kwargs in changes:
                blank = function(blank, *args, **kwargs)
            blank = blank.detach().expand(*hidden.shape[:-1], module.out_features)
            made = torch.Tensor._make_subclass(cls, blank, modes.gradients)
        made._layer, made._hidden, made._changes, made._modes, made._whole = (
            layer,
            hidden,
            changes,
            modes,
            None,
        )
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, Logits) and first._whole is None:
            made = _lazily(first, func, args[1:] if args else (), kwargs)
            if made is not None:
                return made
        for each in _found((args, kwargs)):
            each._layer.tell(func)
            break
        return func(*_wholes(args), **_wholes(kwargs))

    def whole(self) -> torch.Tensor:
        if self._whole is None:
            hidden = self._hidden
            with torch.set_grad_enabled(self._modes.gradients), self._modes.again():
                made = self._layer.with_weights(lambda m: functional.linear(hidden, m.weight, m.bias))
                for function, args, kwargs in self._changes:
                    made = function(made, *args, **kwargs)
            self._whole = made
        return self._whole


def _found(value: Any) -> Iterator[Logits]:
    if isinstance(value, Logits):
        if value._whole is None:
            yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _found(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _found(each)


def _wholes(value: Any) -> Any:
    if isinstance(value, Logits):
        return value.whole()
    if type(value) in (tuple, list):
        return type(value)(map(_wholes, value))
    return {key: _wholes(each) for key, each in value.items()} if type(value) is dict else value


def _lazily(logits: Logits, func: Callable, rest: tuple, kwargs: dict) -> Any:
    """What the function makes of them without their being whole; None where it cannot."""
    if func is functional.cross_entropy:
        return _cross_entropy(logits, *rest, **{k: v for k, v in kwargs.items() if k != "input"})
    if func is torch.Tensor.contiguous:
        return logits if not rest and not kwargs else None
    if func in _RESHAPES:
        return _reshaped(logits, func, rest, kwargs)
    if func is torch.Tensor.__getitem__ and not kwargs:
        return _rows(logits, rest[0])
    if func in _CHANGES and not any(isinstance(each, torch.Tensor) for each in (*rest, *kwargs.values())):
        return _changed(logits, func, rest, kwargs)
    return None


def _changed(logits: Logits, func: Callable, rest: tuple, kwargs: dict) -> Logits | None:
    if func is torch.Tensor.to:
        device = kwargs.get("device", rest[0] if rest else None)
        if not isinstance(device, torch.dtype) and (device is not None or "dtype" not in kwargs):
            return None
    return Logits(logits._layer, logits._hidden, (*logits._changes, (func, rest, kwargs)), logits._modes)


def _reshaped(logits: Logits, func: Callable, rest: tuple, kwargs: dict) -> Logits | None:
    """None where the last dimension is no longer the logits of one token."""
    shape = func(torch.empty(logits.shape, device="meta"), *rest, **kwargs).shape
    if not shape or shape[-1] != logits.shape[-1]:
        return None
    hidden = logits._hidden
    return Logits(
        logits._layer, hidden.reshape(*shape[:-1], hidden.shape[-1]), logits._changes, logits._modes
    )


def _rows(logits: Logits, index: Any) -> Logits | None:
    """Of an index that takes tokens, and each with all of its logits."""
    items = index if type(index) is tuple else (index,)
    if not all(each is Ellipsis or isinstance(each, (int, slice)) for each in items):
        return None
    if items.count(Ellipsis) > 1 or any(type(each) is bool for each in items):
        return None
    dims = logits.dim()
    at = items.index(Ellipsis) if Ellipsis in items else len(items)
    before, after = items[:at], items[at + 1 :]
    if len(before) + len(after) > dims:
        return None
    full = (*before, *[slice(None)] * (dims - len(before) - len(after)), *after)
    if full[-1] not in (slice(None), slice(None, None, 1), slice(0, None)):
        return None
    hidden = logits._hidden[full[:-1]]
    return Logits(logits._layer, hidden, logits._changes, logits._modes)


def _cross_entropy(
    logits: Logits,
    target: torch.Tensor,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    usual = (
        weight is None and size_average is None and reduce is None and reduction in ("mean", "sum", "none")
    )
    if not usual or logits.dim() != 2 or type(target) is not torch.Tensor or target.dtype != torch.int64:
        return None
    if target.shape != logits.shape[:1]:
        return None  # torch's error
    layer, modes = logits._layer, logits._modes
    job = _Job(layer, logits._changes, modes, ignore_index, float(label_smoothing))

    def use(module: nn.Linear) -> torch.Tensor:
        return _Losses.apply(job, logits._hidden, module.weight, module.bias, target)

    with torch.set_grad_enabled(modes.gradients):
        losses = layer.with_weights(use)
        if reduction == "none":
            return losses
        total = losses.sum()
        return total if reduction == "sum" else total / (target != ignore_index).sum()


class _Job(NamedTuple):
    layer: Layer
    changes: tuple[_Change, ...]
    modes: _Modes
    ignore_index: int
    label_smoothing: float

    def losses(self, product: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for function, args, kwargs in self.changes:
            product = function(product, *args, **kwargs)
        return functional.cross_entropy(
            product,
            target,
            ignore_index=self.ignore_index,
            reduction="none",
            label_smoothing=self.label_smoothing,
        )


class _Losses(torch.autograd.Function):
    """The losses of all tokens. Tensors of one tile live at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        job: _Job,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
    ) -> torch.Tensor:
        ctx.job = job
        ctx.save_for_backward(hidden, weight, bias, target)
        step = job.layer.tokens()
        with job.modes.again():
            tiles = [
                job.losses(functional.linear(some, weight, bias), wanted)
                for some, wanted in zip(hidden.split(step), target.split(step), strict=True)
            ]
        return torch.cat(tiles)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, weight, bias, target = ctx.saved_tensors
        job, step = ctx.job, ctx.job.layer.tokens()
        wants = ctx.needs_input_grad
        of_hidden = torch.empty_like(hidden) if wants[1] else None
        sums = [
            torch.zeros(each.shape, dtype=torch.promote_types(each.dtype, torch.float32), device=each.device)
            if wanted
            else None
            for each, wanted in ((weight, wants[2]), (bias, bias is not None and wants[3]))
        ]
        for at in range(0, len(hidden), step):
            some, tile = hidden[at : at + step], slice(at, at + step)
            with torch.enable_grad(), job.modes.again():
                product = functional.linear(some, weight, bias).detach().requires_grad_()
                losses = job.losses(product, target[tile])
            (slope,) = torch.autograd.grad(losses, product, gradient[tile])
            if of_hidden is not None:
                of_hidden[tile].copy_(slope @ weight.to(slope.dtype))
            if sums[0] is not None:
                _add_product(sums[0], slope, some)
            if sums[1] is not None:
                sums[1].add_(slope.sum(0))
        grads = [
            None if each is None else each.to(of.dtype) for each, of in zip(sums, (weight, bias), strict=True)
        ]
        return None, of_hidden, *grads, None


def _add_product(sum_: torch.Tensor, slope: torch.Tensor, hidden: torch.Tensor) -> None:
    """Adds a tile's part of the weight's gradient: in place, where the dtypes are one."""
    hidden = hidden.to(slope.dtype)
    if sum_.dtype == slope.dtype:
        sum_.addmm_(slope.t(), hidden)
    else:
        sum_.add_(slope.t() @ hidden)
