"""Units and their parameters, as one engine has them: the memory, the class and the counts of edits of each.

Data alone: who takes leases is leases.py, who shows and hides showing.py, who follows what a script may write
lending.py. Nothing here calls one of those. `registry` finds the segment of a parameter that an engine has.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._C import TensorBase

from . import _core, packed
from .divided import as_divided, memory_of
from .released_class import released_class
from .units import UnitSpec, memory_order

if TYPE_CHECKING:
    from .residency import Residency

# The attributes below Parameter's: patches.py puts properties in front of `data` and `grad`.
get_data, set_data = TensorBase.data.__get__, TensorBase.data.__set__
get_grad, set_grad = TensorBase.grad.__get__, TensorBase.grad.__set__

registry: dict[int, Segment] = {}  # id of a parameter -> its segment, which keeps the parameter alive


class Segment:
    """One parameter in one unit. `kind`: its class while it is shown; `released_kind`: else. `memory`: the tensor whose
    memory comes and goes, the parameter itself unless it is a DTensor; `shape` and `stride` are its. `version`: of all
    three when they were last looked at. `alias`: what `p.data` returned since the memory last changed. `given`: a weak
    reference to the last state_dict's copy, and its `given_version` (lending.py)."""

    __slots__ = (
        "alias",
        "blank",
        "given",
        "given_version",
        "index",
        "kind",
        "memory",
        "name",
        "names",
        "offset",
        "parameter",
        "released_kind",
        "shape",
        "stride",
        "unit",
        "version",
    )

    def __init__(
        self, unit: Unit, index: int, name: str, aliases: list[str], parameter: nn.Parameter, offset: int
    ):
        self.unit, self.index, self.name, self.names = unit, index, name, (name, *aliases)
        self.parameter, self.offset = parameter, offset  # in elements
        self.kind = type(parameter)
        self.released_kind = released_class(self.kind)
        self.memory = memory_of(parameter)
        self.shape, self.stride = self.memory.shape, memory_order(self.memory)
        self.given: weakref.ref[torch.Tensor] | None = None
        self.given_version = 0
        self.accept()
        self.blank = unit.residency.nan_like(self.shape, self.stride, parameter.dtype)

    @property
    def bytes(self) -> int:
        return self.memory.numel() * self.memory.element_size()

    def is_shown(self) -> bool:
        """Unlike the unit's `shown`, also true where Ctrl-C broke off what shows or hides it."""
        return self.unit.shown and type(self.parameter) is self.kind

    def has_gradient(self) -> bool:
        """Whether the engine has one that no step has used; where torch trains, whether there is one."""
        if self.unit.trained_by_torch:
            return get_grad(self.parameter) is not None
        return self.unit.trainable and self.unit.core.has_gradient(self.unit.index, self.index)

    def edited(self) -> bool:
        """In place, through the parameter or a `.data` of it, since `accept` or `look`."""
        return self._version() != self.version

    def accept(self) -> None:
        """The memory is about to change, or did: what `p.data` returned is no longer the parameter's."""
        self.alias = None
        self.look()

    def look(self) -> None:
        """The memory stays, and edits that follow are noticed, those through a `.data` of before among them."""
        self.version = self._version()

    def _version(self) -> int:
        alias = 0 if self.alias is None else self.alias._version
        return self.parameter._version + self.memory._version + alias

    def release(self) -> None:
        """Torch asks before it reads the parameter, and its memory reads as NaN. Torch functions must be off."""
        self.parameter.__class__ = self.released_kind
        self.accept()
        set_data(self.memory, self.blank)

    @property
    def packed_bytes(self) -> int:
        """What the core holds of a parameter of a packed unit."""
        return packed.size(self.unit.packing, self.unit.dtype, self.memory.numel())

    def stored(self, values: torch.Tensor) -> torch.Tensor:
        """What the core holds of `values`, which lie as the segment does. Raises ValueError where the unit is packed
        and they would be rounded."""
        packing = self.unit.packing
        return values if packing is None else packed.pack_exactly(packing, self.name, run_of(values))

    def leased(self) -> torch.Tensor:
        """Its elements in the unit's lease, one-dimensional."""
        return self.unit.flat[self.offset : self.offset + self.memory.numel()]

    def digest(self) -> int:
        """Of the leased memory."""
        elements = self.leased().cpu()
        return _core.digest(elements.data_ptr(), self.bytes)

    def as_parameter(self, value: torch.Tensor) -> torch.Tensor:
        """A value of the segment's shape in the form that the parameter has."""
        return value if self.memory is self.parameter else as_divided(self.parameter, value)


def run_of(values: torch.Tensor) -> torch.Tensor:
    """Its elements in the order of memory, which they fill without a gap."""
    return values.as_strided((values.numel(),), (1,))


class Unit:
    """`flat`: the lease, one-dimensional in the unit's dtype, or None; `holders`: how many references its storage has
    when nobody else has any; `lease`: on an accelerator, the core's. `pins`: calls under way that need it shown.
    `shown`: some parameters may be views of the lease. `edited`: the core has edits of since then. `lent`: the segments
    that the script may have memory of, with the digest of what is the weight there (lending.py).
    `places`: bytes at which the core has the segments. `packing`: how its bytes there stand for the weights
    (packed.py), which `flat` has unpacked. `part_bytes`: of UnitSpec."""

    __slots__ = (
        "core",
        "dtype",
        "edited",
        "flat",
        "generation",
        "holders",
        "index",
        "is_trained",
        "key",
        "lease",
        "lending",
        "lent",
        "name",
        "packing",
        "part",
        "part_bytes",
        "pins",
        "places",
        "residency",
        "segments",
        "shown",
        "trainable",
        "trained_by_torch",
    )

    def __init__(self, residency: Residency, index: int, spec: UnitSpec):
        self.residency, self.core, self.index = residency, residency.core, index
        self.lending = residency.lending
        self.name, self.dtype, self.trainable = spec.name, spec.dtype, spec.trainable
        self.packing, self.part_bytes = spec.packing, spec.part_bytes
        self.trained_by_torch, self.part = spec.trained_by_torch, spec.part
        self.is_trained = self.trainable or self.trained_by_torch
        self.flat, self.key, self.shown, self.pins, self.generation = None, 0, False, 0, 0
        self.lease: Any = None
        self.holders = 0
        self.edited = False
        self.lent: dict[Segment, int] = {}
        self.places = self.core.layout(index)
        offsets = [place // spec.dtype.itemsize for place in self.places]
        if spec.packing is not None:
            offsets = _unpacked_offsets(spec)
        self.segments = [
            Segment(self, i, p.name, p.aliases, p.parameter, offsets[i])
            for i, p in enumerate(spec.parameters)
        ]


def _unpacked_offsets(spec: UnitSpec) -> list[int]:
    """Where the parameters of a packed unit lie, unpacked, each at a multiple of 64 elements."""
    offsets, end = [], 0
    for p in spec.parameters:
        offsets.append(end)
        end += -(-p.memory.numel() // 64) * 64
    return offsets
