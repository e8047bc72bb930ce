"""What argument of load_checkpoint opens a checkpoint that the strict load refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import parts
from ..segments import Unit
from ..units import DTYPES
from .asked import CONVERTED, NEW
from .taking import format_of

if TYPE_CHECKING:
    from ..engine import Engine


def for_strict_load(engine: Engine, manifest: dict[str, Any]) -> str:
    """Empty where the checkpoint is of this model, held as it is here: no argument would change anything then."""
    there = {s["name"]: (unit, s) for unit in manifest["units"] for s in unit["segments"]}
    here = {s.name: s for unit in engine._residency.units for s in unit.segments}
    shapes = {name: (s.packed_bytes,) if s.unit.packing else tuple(s.shape) for name, s in here.items()}
    if there.keys() != here.keys() or any(tuple(there[name][1]["shape"]) != shapes[name] for name in here):
        return (
            "or load what both models have: load_checkpoint(folder, only=[names]); rename={there: here} finds what has "
            "another name there"
        )
    units = [(there[name][0], s.unit) for name, s in here.items()]
    optimizers = parts.each(engine.optimizer)
    if any(own.trainable and unit["optimizer"] != optimizers[own.part].groups.core for unit, own in units):
        return (
            f"or take weights and counts, and begin the states anew: load_checkpoint(folder, states={NEW!r}); or the "
            "weights alone: load_checkpoint(folder, weights_only=True)"
        )
    if any(_held(engine, own) != (unit["optimizer"], unit["format"], unit["dtype"]) for unit, own in units):
        return f"or convert it: load_checkpoint(folder, states={CONVERTED!r})"
    return ""


def _held(engine: Engine, unit: Unit) -> tuple[str, str, str]:
    """Optimizer, format and dtype, as a manifest has them."""
    dtype = "U8" if unit.packing else DTYPES[unit.dtype]
    if not unit.trainable:
        return "", "frozen", dtype
    return parts.each(engine.optimizer)[unit.part].groups.core, format_of(engine, unit), dtype
