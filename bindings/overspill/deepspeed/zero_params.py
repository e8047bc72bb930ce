"""What DeepSpeed hangs on a parameter of ZeRO-3, and scripts ask for: ds_id, ds_shape, ds_numel, ds_status, ds_tensor.
A parameter has them once deepspeed.zero.Init has made it, or an engine of stage 3 has taken it; no other one has."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from ..segments import registry
from . import comm
from .refused import NotSupported

_numbers: Any = WeakIdKeyDictionary()  # parameter -> its ds_id
_gathered: Any = WeakIdKeyDictionary()  # parameter -> how many GatheredParameters have it
_next = itertools.count()


class ZeroParamStatus(enum.Enum):
    """Of ds_status."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def mark(parameters: Iterable[Any]) -> None:
    """These are parameters of ZeRO-3 from here on."""
    for parameter in parameters:
        if isinstance(parameter, nn.Parameter) and parameter not in _numbers:
            _numbers[parameter] = next(_next)
    for name, read in _ATTRIBUTES.items():
        setattr(nn.Parameter, name, read)


def is_zero_param(parameter: Any) -> bool:
    """Whether it is a parameter of ZeRO-3."""
    return isinstance(parameter, nn.Parameter) and parameter in _numbers


def gather(parameters: Iterable[nn.Parameter], more: int) -> None:
    """A GatheredParameters of these was entered (1) or left (-1)."""
    for parameter in parameters:
        _gathered[parameter] = _gathered.get(parameter, 0) + more


def piece_size(parameter: nn.Parameter) -> int:
    """Elements of each rank's piece, of which the last one's end may be padding."""
    return -(-parameter.numel() // comm.get_world_size())


def piece_of(parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    """This rank's, one-dimensional; zeros are the padding."""
    size = piece_size(parameter)
    elements = whole.flatten()[size * comm.get_rank() :][:size]
    piece = elements.new_zeros(size)
    piece[: elements.numel()] = elements
    return piece


def whole_of(parameter: nn.Parameter, value: torch.Tensor, call: str) -> torch.Tensor:
    """What the ranks' pieces make together. All ranks call it. Raises ValueError where the value is of another size."""
    size, world = piece_size(parameter), comm.get_world_size()
    sizes = torch.tensor([value.numel()])
    given = [sizes] if world == 1 else [torch.empty_like(sizes) for _ in range(world)]
    if world > 1:
        torch.distributed.all_gather(
            given, sizes
        )  # so that all ranks refuse together, and none waits for the others
    if any(each.item() != size for each in given):
        raise ValueError(
            f"overspill: {call}: a rank's piece of a parameter of shape {tuple(parameter.shape)} has {size} elements, "
            f"and the value has {value.numel()} (on the ranks: {[int(each) for each in given]}): give this rank's "
            "piece, its end padded with zeros"
        )
    mine = value.detach().flatten().contiguous()
    pieces = [mine] if world == 1 else [torch.empty_like(mine) for _ in range(world)]
    if world > 1:
        torch.distributed.all_gather(pieces, mine)
    return torch.cat(pieces)[: parameter.numel()].view(parameter.shape)


def _refuse_change(func: Any, args: Any, kwargs: Any, kind: type, of: str) -> None:
    """Raises NotSupported for a function that writes into a tensor of that kind, which is a copy."""
    name = getattr(func, "__name__", str(func))
    writes = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    if (writes and args and isinstance(args[0], kind)) or isinstance((kwargs or {}).get("out"), kind):
        raise NotSupported(
            f"overspill: {of}.{name} is not supported, since {of} is a copy: assign a whole tensor to "
            "param.ds_tensor.data, or call deepspeed.utils.safe_set_local_fp32_param"
        )


class Values(torch.Tensor):
    """ds_tensor.data as it is read: a copy, which refuses to be changed in place, and so do its views. What functions
    of torch compute from it is a plain tensor."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        _refuse_change(func, args, kwargs, Values, "param.ds_tensor.data")
        with DisableTorchFunction():
            found = func(*args, **(kwargs or {}))
            return found.as_subclass(Values) if _is_memory_of(found, args) else found


def _is_memory_of(found: Any, args: Any) -> bool:
    """Whether a write into it would be one into a Values among the arguments."""
    if not isinstance(found, torch.Tensor):
        return False
    memory = found.untyped_storage().data_ptr()
    return any(isinstance(each, Values) and each.untyped_storage().data_ptr() == memory for each in args)


class Piece(torch.Tensor):
    """ds_tensor has the shape and dtype of this rank's piece. A function of torch that needs the values gets a copy of
    them; all ranks call it. All ranks may assign `data`. Changing ds_tensor or `data` in place is refused."""

    _of: nn.Parameter

    @staticmethod
    def of(parameter: nn.Parameter) -> Piece:
        blank = torch.empty(piece_size(parameter), dtype=parameter.dtype, device="meta")
        piece = blank.as_subclass(Piece)
        piece._of = parameter
        return piece

    def values(self) -> torch.Tensor:
        """A copy. All ranks call it."""
        from . import fragments

        parameter = self._of
        with DisableTorchFunction():
            if id(parameter) in registry:
                return piece_of(parameter, fragments.weight(parameter)).to(parameter.dtype)
            whole = parameter.detach().clone()
            if comm.get_world_size() > 1:
                torch.distributed.broadcast(whole, 0)  # an engine will take what rank 0 has
            return piece_of(parameter, whole)

    def write(self, value: torch.Tensor) -> None:
        """All ranks call it, each with its piece."""
        from . import fragments

        with DisableTorchFunction():
            whole = whole_of(self._of, value, "param.ds_tensor.data")
            if id(self._of) in registry:
                fragments.set_weight(self._of, whole, "param.ds_tensor.data")
            else:
                self._of.data.copy_(whole)

    data = property(lambda self: self.values().as_subclass(Values), write)  # type: ignore[assignment]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        _refuse_change(func, args, kwargs, Piece, "param.ds_tensor")
        with DisableTorchFunction():
            if func in _OF_THE_SHAPE:
                return func(*args, **(kwargs or {}))
            args, kwargs = tree_map(lambda x: x.values() if isinstance(x, Piece) else x, (args, kwargs or {}))
            return func(*args, **kwargs)


_OF_THE_SHAPE = {
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
    torch.Tensor.numel,
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.nelement,
    torch.Tensor.element_size,
    torch.Tensor.__len__,
}


def _status(parameter: nn.Parameter) -> ZeroParamStatus:
    segment = registry.get(id(parameter))
    there = _gathered.get(parameter, 0) > 0 or (segment is not None and segment.is_shown())
    return ZeroParamStatus.AVAILABLE if there else ZeroParamStatus.NOT_AVAILABLE


def _attribute(name: str, read: Callable[[nn.Parameter], Any]) -> property:
    def ask(parameter: nn.Parameter) -> Any:
        if parameter not in _numbers:
            raise AttributeError(f"'{type(parameter).__name__}' object has no attribute {name!r}")
        with DisableTorchFunction():
            return read(parameter)

    return property(ask)


_ATTRIBUTES = {
    name: _attribute(name, read)
    for name, read in {
        "ds_id": _numbers.__getitem__,
        "ds_shape": lambda parameter: parameter.shape,
        "ds_numel": lambda parameter: parameter.numel(),
        "ds_status": _status,
        "ds_tensor": Piece.of,
    }.items()
}
