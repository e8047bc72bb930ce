"""Which parameters are gathered and dropped together: a partition of a module tree into units.

Units depend on the model alone, never on budgets, so that every placement computes the same thing. One unit has
one format, one dtype and one optimizer, and is all trainable or all frozen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from .divided import memory_of
from .packed import Packing

BLOCK_ELEMENTS = 4 << 20  # an element of a ModuleList or Sequential up to this size is one unit
MODULE_ELEMENTS = 256 << 10  # a module with this many elements of its own has a unit of its own

DTYPES = {
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.bool: "BOOL",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}  # safetensors' names
_ALL: Mapping[int, int] = {}
# Of trainable parameters.
FORMATS = {
    torch.bfloat16: "bf16_split",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "float64",
}


@dataclass
class ParameterSpec:
    """One parameter, once; `aliases` are the other names it is tied to."""

    name: str
    parameter: nn.Parameter
    aliases: list[str] = field(default_factory=list)

    @property
    def memory(self) -> torch.Tensor:
        """What the engine holds of it: this rank's part of a DTensor."""
        return memory_of(self.parameter)


@dataclass
class UnitSpec:
    """`block` is the module whose call needs the whole unit, None where each parameter's own module does. `part`: the
    number of the optimizer that trains it, where there are several. `packing`: of a frozen one, how the engine holds
    it in fewer bits (packed.py). `part_bytes`: above 0, its weights are read in tiles of so many (tiled_layers.py)."""

    name: str
    format: str
    dtype: torch.dtype
    parameters: list[ParameterSpec]
    block: nn.Module | None = None
    part: int = 0
    packing: Packing | None = None
    part_bytes: int = 0

    @property
    def trainable(self) -> bool:
        """By the engine's update, from gradients that the engine holds."""
        return self.format not in ("frozen", "float64")

    @property
    def trained_by_torch(self) -> bool:
        """The engine holds the weights alone, as those of a frozen unit: gradients stay where autograd puts them, and
        the optimizer's own code makes the steps (foreign.py)."""
        return self.format == "float64"


def partition(
    model: nn.Module,
    place: torch.device | None = None,
    parts: Mapping[int, int] = _ALL,
    packings: Mapping[int, Packing] | None = None,
) -> list[UnitSpec]:
    """The units of `model`, in order of registration. Parameters without elements belong to none. `parts`: the number
    of each parameter's optimizer, by the parameter's id, where there are several. `packings`: of frozen ones, by id.

    Parameters may be on the meta device: their shapes are enough; or on `place`, where the model will compute.
    Raises ValueError for a parameter that cannot be held: not materialised, or of a trainable dtype that is
    not supported.
    """
    found = _Partition(place, parts, packings or {})
    found.walk(model, "", "*", None, None)
    _check_memory(found.specs.values())
    return list(found.units.values())


class _Partition:
    """The units found so far. A class, because recursive closures would keep the model alive until the garbage
    collector runs."""

    def __init__(self, place: torch.device | None, parts: Mapping[int, int], packings: Mapping[int, Packing]):
        self.place, self.parts, self.packings = place, parts, packings
        self.units: dict[tuple, UnitSpec] = {}
        self.specs: dict[int, ParameterSpec] = {}

    def own(self, module: nn.Module, prefix: str, key: str, block: nn.Module | None) -> None:
        units, specs = self.units, self.specs
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if isinstance(parameter, nn.parameter.UninitializedTensorMixin):
                raise ValueError(
                    f"parameter {prefix}{name} is not initialised yet: run the model once before"
                )
            if memory_of(parameter).numel() == 0:
                continue
            full = prefix + name
            if id(parameter) in specs:
                if full not in (specs[id(parameter)].name, *specs[id(parameter)].aliases):
                    specs[id(parameter)].aliases.append(full)
                continue
            spec = specs[id(parameter)] = ParameterSpec(full, parameter)
            form = _format(full, parameter, self.place)
            part = self.parts.get(id(parameter), 0)
            packing = self.packings.get(id(parameter))
            slot = (key, form, parameter.dtype, part, packing)
            if slot not in units:
                marks = (f":{part}" if part else "") + (f":{packing}" if packing else "")
                unit = f"{key}:{form}:{DTYPES[parameter.dtype]}{marks}"
                units[slot] = UnitSpec(unit, form, parameter.dtype, [], block, part, packing)
            units[slot].parameters.append(spec)

    def walk(
        self, module: nn.Module, prefix: str, small: str, key: str | None, block: nn.Module | None
    ) -> None:
        """`small`: key of the enclosing block's small parameters. `key`: the unit everything below belongs
        to, if any."""
        mine = key
        if mine is None:
            large = _fresh(module._parameters.values(), self.specs) >= MODULE_ELEMENTS
            mine = (prefix.rstrip(".") or "(root)") if large else small
        self.own(module, prefix, mine, block if key is not None else None)
        for name, child in module._modules.items():
            if child is None:
                continue
            path = f"{prefix}{name}"
            if key is not None or not isinstance(module, (nn.ModuleList, nn.Sequential)):
                self.walk(child, path + ".", small, key, block)
            elif _fresh(child.parameters(), self.specs) <= BLOCK_ELEMENTS:
                self.walk(child, path + ".", small, path, child)
            else:
                self.walk(child, path + ".", path + ".*", None, None)


def _fresh(parameters, specs: dict[int, ParameterSpec]) -> int:
    """Elements of the parameters that no unit owns yet."""
    return sum(
        memory_of(p).numel()
        for p in parameters
        if p is not None and id(p) not in specs and not isinstance(p, nn.parameter.UninitializedTensorMixin)
    )


def _format(name: str, parameter: nn.Parameter, place: torch.device | None) -> str:
    if parameter.device.type not in ("cpu", "meta") and parameter.device != place:
        raise ValueError(f"parameter {name} is on {parameter.device}: build the model on the CPU")
    if parameter.layout is not torch.strided or parameter.dtype not in DTYPES:
        raise ValueError(
            f"parameter {name} ({parameter.dtype}, {parameter.layout}) cannot be offloaded: not supported"
        )
    if not parameter.requires_grad:
        return "frozen"
    if parameter.dtype not in FORMATS:
        raise ValueError(
            f"parameter {name} is trainable in {parameter.dtype}, which is not supported yet: "
            "use model.bfloat16() or model.float(), or freeze it with requires_grad_(False)"
        )
    if parameter.dtype is torch.float64 and place is not None and place.type != "cpu":
        raise ValueError(
            f"parameter {name} is trainable in {parameter.dtype}, which is not supported on {place}: "
            "use model.float(), freeze it with requires_grad_(False), or train on the CPU"
        )
    return FORMATS[parameter.dtype]


def _check_memory(specs) -> None:
    """Two parameters over the same memory would drift apart silently."""
    seen: dict[int, str] = {}
    for spec in specs:
        if spec.parameter.is_meta:
            continue
        other = seen.setdefault(spec.memory.data_ptr(), spec.name)
        if other != spec.name:
            raise ValueError(
                f"parameters {other} and {spec.name} share memory but are two objects: "
                "tie them by assigning the same Parameter"
            )


def memory_order(parameter: torch.Tensor) -> tuple[int, ...]:
    """The strides a parameter is kept with: its own where they are dense and without overlap
    (channels_last), else contiguous."""
    expected = 1
    shape, stride = parameter.shape, parameter.stride()
    for dim in sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: stride[d]):
        if stride[dim] != expected:
            return tuple(torch.empty(shape, device="meta").stride())
        expected *= shape[dim]
    return stride
