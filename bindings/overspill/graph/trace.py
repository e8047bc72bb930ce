"""Which uses of units a tensor derives from, followed through each operation of a forward.

A mode under autograd sees every operation that PyTorch dispatches, in parts that need no gradient too; a walk over
grad_fn would miss those, and would know no weights of blocks that are computed again. Sources belong to storages, so
views share them, and what writes into a tensor adds to them: more may seem to depend than does, never less. A value
that Python reads (item(), tolist(), numpy(), a condition) may decide what comes next: all later uses depend on it. Not
seen: memory that something else than PyTorch changes, and decisions by a shape that depends on values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .. import leases
from ..calls import in_backward

_READ_BY_PYTHON = {"tolist", "numpy", "__array__", "__dlpack__"}


@dataclass
class Use:
    """One use of a unit in forward: operations that need no result but those of the first of them, or of this use.
    `after`: the uses that it needs, by number; `before`: with what those need, as bits."""

    unit: int
    number: int
    after: frozenset[int]
    before: int
    saved_bytes: int = 0


@dataclass
class Tracer:
    """Of one step of an engine. `uses`: in the order of the first operation. `in_backward`: units whose weights
    backward read."""

    owner: Any
    uses: list[Use] = field(default_factory=list)
    in_backward: set[int] = field(default_factory=set)
    _last: dict[int, int] = field(default_factory=dict)  # by unit
    _sources: dict[int, tuple[StorageWeakRef, frozenset[int]]] = field(default_factory=dict)  # by storage
    _read: frozenset[int] = frozenset()  # sources of what Python has read
    _now: int = -1  # the use of the last operation
    came_back: bool = False  # a backward began
    _counted: dict[int, StorageWeakRef] = field(default_factory=dict)

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        with _Reads(self), _Operations(self):
            yield

    def saved(self, tensor: torch.Tensor) -> None:
        """Autograd keeps it: its storage counts once, for the use that ran last."""
        storage = tensor.untyped_storage()
        if self._now < 0 or in_backward() or storage._cdata in self._counted:
            return
        self._counted[storage._cdata] = StorageWeakRef(storage)
        self.uses[self._now].saved_bytes += storage.nbytes()

    def read(self, tensors: list[torch.Tensor]) -> None:
        """By Python."""
        for tensor in tensors:
            self._read |= self._of(tensor)

    def operation(self, given: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        """`written`: results, and arguments that it changed."""
        units = {unit for tensor in given if (unit := self._unit(tensor)) is not None}
        written = [tensor for tensor in written if self._unit(tensor) is None]
        if not written:
            return  # a view of a weight
        if in_backward():
            self.in_backward |= units
            self.came_back = True
            return
        if self.came_back and units:
            raise RuntimeError(
                "overspill: engine.graph: the step has a forward after a backward; give one micro-batch of it, and "
                "engine.step()"
            )
        sources = self._read.union(*(self._of(tensor) for tensor in given))
        if units:
            sources = frozenset(self._use(unit, sources) for unit in sorted(units))
        for tensor in written:
            storage = _storage(tensor)
            if storage is not None:
                self._sources[storage._cdata] = StorageWeakRef(storage), self._of(tensor) | sources

    def _use(self, unit: int, sources: frozenset[int]) -> int:
        last = self._last.get(unit)
        if last is not None:
            known = self.uses[last].before | 1 << last
            if all(known >> each & 1 for each in sources):
                self._now = last
                return last
        before = 0
        for each in sources:
            before |= self.uses[each].before | 1 << each
        number = 0 if last is None else self.uses[last].number + 1
        self.uses.append(Use(unit, number, sources, before))
        self._now = self._last[unit] = len(self.uses) - 1
        return self._now

    def _of(self, tensor: torch.Tensor) -> frozenset[int]:
        storage = _storage(tensor)
        found = None if storage is None else self._sources.get(storage._cdata)
        return frozenset() if found is None or found[0].expired() else found[1]

    def _unit(self, tensor: torch.Tensor) -> int | None:
        storage = _storage(tensor)
        found = None if storage is None else leases.of_storage.get(storage._cdata)
        if found is None or found[0].expired() or found[1].residency is not self.owner:
            return None
        return found[1].index


class _Operations(TorchDispatchMode):
    def __init__(self, tracer: Tracer):
        super().__init__()
        self.tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        result = func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            self.tracer.read(given)
        self.tracer.operation(given, [*_tensors(result), *_changed(func, args, kwargs)])
        return result


class _Reads(TorchFunctionMode):
    """What hands values to Python without an operation."""

    def __init__(self, tracer: Tracer):
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READ_BY_PYTHON:
            self.tracer.read(_tensors(args))
        return func(*args, **(kwargs or {}))


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def _changed(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Arguments that the operation writes into."""
    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        found += _tensors(args[i] if i < len(args) else kwargs.get(argument.name))
    return found


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """None for kinds of tensors that have none, such as sparse ones."""
    return tensor.untyped_storage() if tensor.layout is torch.strided else None
