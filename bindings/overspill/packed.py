"""Frozen weights that the engine holds in 4 or 8 bits, as cpu_optim/blockwise.h packs them. To the core they are bytes;
a parameter that is gathered shows what they stand for.

What is written into such a parameter becomes the weight only where the packing can hold it exactly: a weight is rounded
once, when the engine takes it over, and never again without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

import torch
from torch import nn

from ._core import optim as _core
from .config.section import ConfigError
from .divided import is_divided

Packing = Literal["nf4", "int8"]
_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}  # of the values' dtypes


def chosen(model: nn.Module, packing: Packing | None, on_host: bool = True) -> Mapping[int, Packing]:
    """The packing of each frozen parameter that gets one, by its id: the weights of linear layers, as in QLoRA, but not
    what embeddings and the output layer have. `on_host`: the model computes there. Raises ConfigError where there is
    none, or where the model computes on an accelerator."""
    if packing is None:
        return {}
    if not on_host:
        raise ConfigError(
            f"config: frozen.format = {packing!r} is for models that compute on the CPU, where weights are unpacked: "
            'leave it out, or set engine.device to "host"'
        )
    output = getattr(model, "get_output_embeddings", lambda: None)()
    whole = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding) or m is output}
    linear = (m.weight for m in model.modules() if isinstance(m, nn.Linear))
    found = {
        id(weight): packing
        for weight in linear
        if not weight.requires_grad
        and not is_divided(weight)
        and weight.dtype in _NAMES
        and id(weight) not in whole
    }
    if not found:
        raise ConfigError(
            f"config: frozen.format = {packing!r}: {type(model).__name__} has no frozen weight of a linear layer in "
            "bf16 or fp32: freeze the base first (PEFT does), or leave frozen.format out"
        )
    return found


def of_units(names: Iterable[str]) -> str:
    """The packings that units' names end with (units.py), for people; "" where none is packed."""
    return ", ".join(sorted({end for name in names if (end := name.rpartition(":")[2]) in get_args(Packing)}))


def size(packing: Packing, dtype: torch.dtype, elements: int) -> int:
    """Bytes of so many values."""
    count: int = _core.packed_bytes(packing, _NAMES[dtype], elements)
    return count


def pack(packing: Packing, values: torch.Tensor) -> torch.Tensor:
    """The bytes of values that lie in one run of memory, on the CPU. Raises ValueError for an inf or a NaN."""
    packed = torch.empty(size(packing, values.dtype, values.numel()), dtype=torch.uint8)
    _core.pack(packing, _NAMES[values.dtype], _memory(values), _memory(packed))
    return packed


def unpack_into(packing: Packing, packed: torch.Tensor, values: torch.Tensor) -> None:
    """Fills `values`, which lie in one run of memory, on the CPU."""
    _core.unpack(packing, _NAMES[values.dtype], _memory(packed), _memory(values))


def rounded(packing: Packing, values: torch.Tensor) -> torch.Tensor:
    """A copy of `values` as the engine would give them back."""
    out = torch.empty_like(values)
    unpack_into(packing, pack(packing, values), out)
    return out


def pack_exactly(packing: Packing, name: str, values: torch.Tensor) -> torch.Tensor:
    """As `pack`. Raises ValueError where the bytes would stand for other values."""
    packed = pack(packing, values)
    back = torch.empty_like(values)
    unpack_into(packing, packed, back)
    if not torch.equal(back, values):
        raise ValueError(
            f"overspill: {name} is held in {packing}, and what was written into it would be rounded: merge adapters "
            "and edit frozen weights in a model that engine.give_back() has left, whose weights are whole, or leave "
            "frozen.format out"
        )
    return packed


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()
