"""Logits that are never whole (`budget.logits`). Where the result of a linear layer outside the model's repeated blocks
would be larger than the key says, its call returns a stand-in. torch.nn.functional.cross_entropy of that is computed in
tiles: the logits of some tokens, then their loss, and the logits are forgotten. Backward computes them again. (Compare
Liger-Kernel's fused linear cross entropy, Hsu et al., arXiv 2410.10989, section 3.2, which
computes gradients in forward, and so holds the weight's until backward.)

On the way to the loss a stand-in takes other shapes, rows, dtypes, factors and caps. Any other function gets the logits
whole, and a warning says so once."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree

from .. import given, released
from ..activations import recompute
from ..calls import here, is_traced
from ..divided import is_divided
from ..guard import guard, touch, units_of
from ..memory import human
from ..segments import Segment, registry
from .instead import Instead
from .tiles import Change, Job, Losses, Modes

_RESHAPES = {torch.Tensor.view, torch.Tensor.reshape, torch.Tensor.flatten, torch.flatten, torch.reshape,
             torch.Tensor.unsqueeze, torch.unsqueeze, torch.Tensor.squeeze, torch.squeeze}  # fmt: skip
_CASTS = {
    torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.double, torch.Tensor.to,
}  # fmt: skip
_CHANGES = _CASTS | {
    torch.Tensor.mul, torch.Tensor.div, torch.Tensor.__mul__, torch.Tensor.__rmul__, torch.Tensor.__truediv__,
    torch.mul, torch.div, torch.Tensor.tanh, torch.tanh,
}  # fmt: skip
_LOOKS = {
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.ndimension,
    torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.is_floating_point, torch.Tensor.__len__,
    torch.Tensor.element_size, torch.Tensor.get_device, torch.Tensor.__hash__,
    *(getattr(torch.Tensor, name).__get__ for name in (
        "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_cpu", "is_meta", "is_sparse",
        "is_nested", "is_quantized", "itemsize", "nbytes",
    )),
}  # fmt: skip


class Layer(Instead):
    """Of a linear layer. `limit`: bytes of logits in fp32."""

    def __init__(self, name: str, module: nn.Linear, owner: Any, limit: int):
        super().__init__(name, module)
        self.owner, self.limit = owner, limit
        self.told = False

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        module = self.module()
        assert module is not None
        rows = input.numel() // max(1, module.in_features)
        applies = self.replaced is None and type(module) is nn.Linear and type(input) is torch.Tensor
        if not applies or 4 * rows * module.out_features <= self.limit or self._stands_aside(module):
            return self.forward(module)(input)
        return Logits(_Source.of(self, module), input, (), Modes.now(input.device))

    def _stands_aside(self, module: nn.Linear) -> bool:
        if is_traced() or here.is_on_copies():
            return True
        mine = (p for p in (module.weight, module.bias) if p is not None)
        return any(id(p) not in registry or is_divided(p) for p in mine)

    def tokens(self) -> int:
        """How many a tile has."""
        module = self.module()
        return max(1, self.limit // (4 * module.out_features)) if module is not None else 1

    def tell(self, function: Any) -> None:
        if not self.told:
            self.told = True
            name = _name(function)
            with_these = ""
            instead = "Only torch.nn.functional.cross_entropy does without whole logits (docs/activations.md#logits)"
            if function is functional.cross_entropy:
                with_these = " with these arguments"
                instead = (
                    "Give it classes (int64) as targets, logits of shape [tokens, vocabulary], and no weight=, "
                    "size_average= or reduce="
                )
            warnings.warn(
                f"overspill: budget.logits: {name}{with_these} takes the logits of {self.name} whole, so the engine "
                f"does not compute the loss in tiles. {instead}; or leave budget.logits out",
                stacklevel=given.script_level(),
            )


def layers_of(model: nn.Module) -> dict[nn.Linear, str]:
    """The linear layers outside the model's repeated blocks, with their names."""
    blocks = recompute.blocks_of(model, is_part=True)
    inside = {part for block in blocks for part in block.modules()}
    return {
        part: name for name, part in model.named_modules() if type(part) is nn.Linear and part not in inside
    }


def said(model: nn.Module, layers: dict[nn.Linear, str], limit: int) -> str | None:
    """Which layers, in words; warns where there is none."""
    if layers:
        return f"{', '.join(layers.values())}, where they would take more than {human(limit)}"
    warnings.warn(
        f"overspill: budget.logits = {human(limit)} has no effect: {type(model).__name__} has no torch.nn.Linear "
        "outside its repeated blocks: make the logits with one, or leave budget.logits out",
        stacklevel=given.script_level(),
    )
    return None


class _Source(NamedTuple):
    """The layer, as it was when it was called: `generations` of its weights' units."""

    layer: Layer
    generations: tuple[int, ...]

    @classmethod
    def of(cls, layer: Layer, module: nn.Linear) -> _Source:
        return cls(layer, tuple(segment.unit.generation for segment in _segments(module)))

    def with_weights(self, use: Callable[[nn.Linear], Any]) -> Any:
        """`use` of the layer, with its weights there; inside a call of the model or after it. RuntimeError where they
        are others than those of the call."""
        owner, module = self.layer.owner, self.layer.module()
        if module is None or owner.closed:
            raise RuntimeError(f"overspill: {owner.closed or owner.why_closed}")
        if not owner.current:
            owner.refresh()
        mine = _segments(module)
        if tuple(segment.unit.generation for segment in mine) != self.generations:
            raise RuntimeError(
                f"overspill: budget.logits: the weights of {self.layer.name} have changed since its call (engine.step, "
                "a loaded checkpoint, a write), and its logits were not computed before: take what you need of them "
                "before that, run forward again, or leave budget.logits out"
            )
        if not guard.on():
            return released.on_weights(mine, use, module)
        touch(units_of(mine))
        return use(module)


def _segments(module: nn.Linear) -> list[Segment]:
    return [registry[id(p)] for p in (module.weight, module.bias) if p is not None]


class Logits(torch.Tensor):
    """linear(hidden, weight, bias), then `changes`. Its own memory is one number. `root` and `path`: which other one
    this is a view of, and how; what becomes of the root's whole is seen here. `form`: of the same shape and strides, on
    the meta device, whose storage views share."""

    _source: _Source
    _hidden: torch.Tensor
    _stamp: int | None
    _changes: tuple[Change, ...]
    _modes: Modes
    _root: Logits | None
    _path: tuple[Change, ...]
    _form: torch.Tensor
    _whole: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        source: _Source,
        hidden: torch.Tensor,
        changes: tuple[Change, ...],
        modes: Modes,
        root: Logits | None = None,
        path: tuple[Change, ...] = (),
        form: torch.Tensor | None = None,
    ) -> Logits:
        module = source.layer.module()
        assert module is not None
        with torch._C.DisableTorchFunctionSubclass():
            dtype = modes.dtype if modes.autocast else hidden.dtype
            blank = torch.empty((), dtype=dtype, device=hidden.device)
            for function, args, kwargs in changes:
                blank = function(blank, *args, **kwargs)
            blank = blank.detach().expand(*hidden.shape[:-1], module.out_features)
            made = torch.Tensor._make_subclass(cls, blank, modes.gradients)
            if modes.gradients:
                made.register_hook(functools.partial(_refuse_gradient, source.layer.name))
        made._source, made._hidden, made._changes, made._modes = source, hidden, changes, modes
        made._stamp = None if hidden.is_inference() else hidden._version
        made._root, made._path, made._whole = root, path, None
        made._form = torch.empty(blank.shape, device="meta") if form is None else form
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is torch.Tensor.is_contiguous:
            return args[0]._form.is_contiguous(*args[1:], **kwargs)
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, Logits) and not first._is_whole():
            made = _lazily(first, func, args[1:] if args else (), kwargs)
            if made is not None:
                return made
        found = [each for each in _pytree.tree_leaves((args, kwargs)) if isinstance(each, Logits)]
        if not found:
            raise TypeError(
                f"overspill: budget.logits: {_name(func)} was given logits inside an object that is no tuple, list or "
                "dict: give them by themselves, or leave budget.logits out"
            )
        for each in found:
            needed = each._top() if _stays(func, kwargs) else each
            if not needed._is_whole() and 4 * needed._form.numel() > each._source.layer.limit:
                each._source.layer.tell(func)
            needed.whole()
        return func(*_wholes(args), **_wholes(kwargs))

    def _top(self) -> Logits:
        return self if self._root is None else self._root

    def _is_whole(self) -> bool:
        return self._whole is not None or self._top()._whole is not None

    def whole(self) -> torch.Tensor:
        top = self._top()
        if top is not self and top._whole is not None:
            made = top._whole
            for function, args, kwargs in self._path:
                made = function(made, *args, **kwargs)
            return made
        if self._whole is None:
            hidden = self._checked()
            with torch.set_grad_enabled(self._modes.gradients), self._modes.again():
                made = self._source.with_weights(lambda m: functional.linear(hidden, m.weight, m.bias))
                for function, args, kwargs in self._changes:
                    made = function(made, *args, **kwargs)
            self._whole = made
        return self._whole

    def _checked(self) -> torch.Tensor:
        """What the layer was given. RuntimeError where it has changed, or where the stand-in has got a graph that it
        does not know."""
        if self._stamp is not None and self._hidden._version != self._stamp:
            raise RuntimeError(
                f"overspill: budget.logits: what {self._source.layer.name} was given has been modified by an inplace "
                "operation since, and its logits were not computed before: leave budget.logits out"
            )
        with torch._C.DisableTorchFunctionSubclass():
            has_graph = self.grad_fn is not None
        if has_graph:
            raise RuntimeError(
                "overspill: budget.logits: a function of autograd, such as torch.utils.checkpoint with "
                f"use_reentrant=True, returned the logits of {self._source.layer.name}: give it use_reentrant=False, "
                "or leave budget.logits out"
            )
        return self._hidden


def _refuse_gradient(name: str, _: torch.Tensor) -> None:
    """Autograd hands no stand-in to the layer whose result it is."""
    raise RuntimeError(
        f"overspill: budget.logits: a function of autograd (torch.autograd.Function, torch.utils.checkpoint with "
        f"use_reentrant=True) was given the logits of {name} themselves, and their gradient would be lost: give it "
        "logits + 0, or leave budget.logits out"
    )


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func))


_VIEWS = frozenset(
    "__get__ as_strided chunk detach diagonal expand expand_as movedim moveaxis narrow numpy permute select split "
    "split_with_sizes squeeze swapaxes swapdims t tensor_split transpose unbind unflatten unfold unsqueeze view "
    "view_as __getitem__ __setitem__ __set__ retain_grad register_hook requires_grad_".split()
)


def _stays(func: Callable, kwargs: dict) -> bool:
    """Whether a function may write into logits, returns views of them, or stays with them: the one of which they are a
    view has to be there then."""
    name = _name(func)
    if name in _VIEWS or "out" in kwargs or kwargs.get("inplace"):
        return True
    return name.startswith("__i") if name.startswith("__") else name.endswith("_")


def _wholes(value: Any) -> Any:
    return _pytree.tree_map(lambda each: each.whole() if isinstance(each, Logits) else each, value)


def _lazily(logits: Logits, func: Callable, rest: tuple, kwargs: dict) -> Any:
    """What the function makes of them without their being whole; None where it cannot."""
    if func is functional.cross_entropy:
        return _cross_entropy(logits, *rest, **{k: v for k, v in kwargs.items() if k != "input"})
    if func is torch.Tensor.contiguous:
        return None if rest or kwargs else logits if logits._form.is_contiguous() else _copy(logits)
    if func in _RESHAPES:
        return _reshaped(logits, func, rest, kwargs)
    if func is torch.Tensor.__getitem__ and not kwargs:
        return _rows(logits, rest[0])
    if func in _CHANGES and not any(isinstance(each, torch.Tensor) for each in (*rest, *kwargs.values())):
        return _changed(logits, func, rest, kwargs)
    return None


def _copy(logits: Logits, changes: tuple[Change, ...] = ()) -> Logits:
    """A tensor of its own."""
    hidden = logits._checked()
    return Logits(logits._source, hidden, (*logits._changes, *changes), logits._modes)


def _view(logits: Logits, hidden: torch.Tensor, step: Change) -> Logits:
    """A view, or a copy, where torch would make one."""
    function, args, kwargs = step
    form = function(logits._form, *args, **kwargs)
    if form.untyped_storage()._cdata != logits._form.untyped_storage()._cdata:
        return Logits(logits._source, hidden, logits._changes, logits._modes)
    path = (*logits._path, step)
    return Logits(logits._source, hidden, logits._changes, logits._modes, logits._top(), path, form)


def _changed(logits: Logits, func: Callable, rest: tuple, kwargs: dict) -> Logits | None:
    if func is torch.Tensor.to:
        device = kwargs.get("device", rest[0] if rest else None)
        if not isinstance(device, torch.dtype) and (device is not None or "dtype" not in kwargs):
            return None
    made = _copy(logits, ((func, rest, kwargs),))
    with torch._C.DisableTorchFunctionSubclass():
        same = made.dtype == logits.dtype
    return logits if same and func in _CASTS else made


def _reshaped(logits: Logits, func: Callable, rest: tuple, kwargs: dict) -> Logits | None:
    """None where the last dimension is no longer the logits of one token."""
    if any(isinstance(each, torch.dtype) for each in (*rest, *kwargs.values())):
        return None
    shape = func(logits._form, *rest, **kwargs).shape
    if not shape or shape[-1] != logits._form.shape[-1]:
        return None
    hidden = logits._checked()
    return _view(logits, hidden.reshape(*shape[:-1], hidden.shape[-1]), (func, rest, kwargs))


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
    hidden = logits._checked()[full[:-1]]
    return _view(logits, hidden, (torch.Tensor.__getitem__, (index,), {}))


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
    hidden = logits._checked()
    now = Modes.now(hidden.device)
    job = Job(
        logits._source.layer.tokens(),
        logits._changes,
        logits._modes,
        now,
        ignore_index,
        float(label_smoothing),
    )

    def use(module: nn.Linear) -> torch.Tensor:
        return Losses.apply(job, hidden, module.weight, module.bias, target)

    with torch.set_grad_enabled(logits._modes.gradients and now.gradients):
        losses = logits._source.with_weights(use)
        if reduction == "none":
            return losses
        total = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))
        mean = total if reduction == "sum" else total / (target != ignore_index).sum()
        return mean.to(losses.dtype)
