"""An engine takes weights and states out of a checkpoint, parameter by parameter: all is looked through and read first,
which changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunction

from .. import moments, packed, parts, showing, state
from .._core import CheckpointError
from ..extra import Extra
from ..groups import Groups, unit_format
from ..opened import FLOATS, Opened, Stored
from ..pretrained import some
from ..segments import Segment, Unit
from ..units import DTYPES, FORMATS
from . import sayings
from .asked import CONVERTED, NEW, Asked, renamed, selected

if TYPE_CHECKING:
    from ..engine import Engine

_STATES_NEW = f"states={NEW!r}"


@dataclass(frozen=True)
class Pair:
    """A parameter here, and what the checkpoint has for it. `dtype`: of safetensors, that the weight is read in.
    `with_states`: they are taken too."""

    segment: Segment
    name: str  # there
    dtype: str
    with_states: bool


class Transfer:
    """`check` comes first. All ranks do all of it; each reads all of what is taken."""

    def __init__(self, engine: Engine, folder: Path, asked: Asked):
        self.engine, self.folder, self.asked = engine, folder, asked
        self.there = Opened(folder)
        self.extra = Extra.read(self.there.extra_json, folder)
        self.optimizers = parts.each(engine.optimizer)
        self.buffers = state.persistent_buffers(engine.module)
        self.values: dict[str, torch.Tensor] = {}  # of those that are taken
        self.pairs: list[Pair] = []
        self.said: list[str] = []
        names = {
            alias: name for name, stored in self.there.tensors.items() for alias in (name, *stored.aliases)
        }
        self.names = {new: names[old] for new, old in renamed(asked.rename, names, folder).items()}

    def refuse(self, why: str) -> CheckpointError:
        return CheckpointError(f"overspill: load_checkpoint: {self.folder}: {why}; nothing was changed")

    # ---- looking through

    def check(self) -> None:
        """Raises CheckpointError where something does not fit what was asked for."""
        segments = {s.name: s for unit in self.engine._residency.units for s in unit.segments}
        all_names = {name: s.names for name, s in segments.items()} | {name: (name,) for name in self.buffers}
        wanted = selected(self.asked.only, all_names)
        self._check_optimizers()
        for name, segment in segments.items():
            if name in wanted:
                self.pairs.append(self._pair(segment))
        for name, buffer in self.buffers.items():
            if name in wanted:
                self.values[name] = self._value(name, buffer)
        if self.asked.only is None:
            self._check_rest({name for names in all_names.values() for name in names})
        if self.asked.takes_course:
            replace(self.extra, buffers=self.buffers).check(self.buffers, self.engine.optimizer.param_groups)
        self._say(len(wanted), len(all_names))

    def read(self, first: int, step: int) -> None:
        """Every `step`-th of the parameters, so that ranks may share the work. Raises CheckpointError for damage."""
        for pair in self.pairs[first::step]:
            self.there.read(pair.name, pair.dtype)
            if pair.with_states:
                for component in self._names(pair.segment.unit):
                    self.there.state(pair.name, component)

    def _check_optimizers(self) -> None:
        for optimizer in self.optimizers:
            groups = optimizer.groups
            if groups.foreign and (self.asked.takes_states or optimizer.state):
                raise self.refuse(
                    f"this engine's optimizer, {groups.foreign}, runs its own code and keeps its own states, which a "
                    "load that is not of the whole neither takes nor begins anew: make the engine with one of "
                    "overspill.optim, or load into an engine that has made no step, with weights_only=True"
                )

    def _pair(self, segment: Segment) -> Pair:
        found = {self.names[name]: name for name in segment.names if name in self.names}
        if not found:
            raise self.refuse(
                f"it lacks {segment.name}, which this model has. What both have, only=[names] loads; what has another "
                "name there, rename={there: here} finds"
            )
        if len(found) > 1:
            raise self.refuse(f"{' and '.join(found.values())} are one parameter here, and two there")
        (name,) = found
        stored = self.there.tensors[name]
        self._check_packing(segment, stored)
        here = (segment.packed_bytes,) if segment.unit.packing else tuple(segment.shape)
        if stored.shape != here:
            raise self.refuse(
                f"{segment.name} has shape {stored.shape} there, {here} here: leave it out, with only=[names of others]"
            )
        takes = segment.unit.trainable and self.asked.takes_states
        if takes:
            self._check_states(segment, stored)
        return Pair(segment, name, self._dtype(segment, stored), takes)

    def _check_packing(self, segment: Segment, stored: Stored) -> None:
        packings = [packed.of_units([name]) for name in (stored.unit, segment.unit.name)]
        if packings[0] != packings[1]:
            there, here = (f"in {packing}" if packing else "whole" for packing in packings)
            raise self.refuse(
                f"{segment.name} is held {there} there, {here} here: give initialize the frozen.format that it was "
                "saved with, or leave it out, with only=[names of others]"
            )

    def _check_states(self, segment: Segment, stored: Stored) -> None:
        own = self._groups(segment.unit).core
        if not stored.optimizer:
            raise self.refuse(
                f"it has no states of {segment.name}, which was frozen there and is trained here: {_STATES_NEW} begins "
                "all states anew"
            )
        if self.extra.own_states is not None or stored.optimizer != own:
            other = (
                stored.optimizer if self.extra.own_states is None else "an optimizer that runs its own code"
            )
            raise self.refuse(
                f"{segment.name} was trained by {other}, and here by {own}: give initialize the optimizer of that run; "
                f"or {_STATES_NEW}, with which states begin anew"
            )
        format = format_of(self.engine, segment.unit)
        if stored.format != format and self.asked.states != CONVERTED:
            raise self.refuse(
                f"the states of {segment.name} are in the format {stored.format} there, {format} here: "
                f"states={CONVERTED!r} converts them"
            )

    def _dtype(self, segment: Segment, stored: Stored) -> str:
        unit = segment.unit
        own = "U8" if unit.packing else DTYPES[unit.dtype]
        if unit.trainable and stored.dtype in FLOATS and stored.value is None:
            return "F32"
        if stored.dtype == own or (
            stored.dtype in FLOATS and own in ("BF16", "F16", "F32") and stored.value is None
        ):
            return own
        kind = f"a buffer in {stored.dtype}" if stored.value is not None else stored.dtype
        raise self.refuse(f"{segment.name} is {kind} there and {own} here, to which it cannot be converted")

    def _value(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        stored = self.there.tensors.get(self.names.get(name, ""))
        if stored is None or stored.value is None:
            raise self.refuse(
                f"it lacks the buffer {name}, which this model has: only=[names] loads what both have"
            )
        value = stored.value
        if value.shape != buffer.shape:
            raise self.refuse(
                f"buffer {name} has shape {tuple(value.shape)} there, {tuple(buffer.shape)} here: leave it out, with "
                "only=[names of others]"
            )
        if value.dtype != buffer.dtype and not (value.is_floating_point() and buffer.is_floating_point()):
            raise self.refuse(f"buffer {name} is {value.dtype} there, {buffer.dtype} here")
        return value

    def _check_rest(self, here: set[str]) -> None:
        """Nothing of the checkpoint is left out unasked."""
        strange = [
            new
            for new, old in self.names.items()
            if new not in here and self.there.tensors[old].shape.count(0) == 0
        ]
        if strange:
            raise self.refuse(
                f"it has {some(sorted(strange))}, and this model has not: only=[names] loads what both have"
            )

    def _say(self, taken: int, all_: int) -> None:
        if self.asked.only is not None:
            self.said.append(
                f"{taken} of {all_} parameters and buffers are loaded, the others stay as they are"
            )
        trained = [pair for pair in self.pairs if pair.segment.unit.trainable]
        formats = {
            (self.there.tensors[pair.name].format, format_of(self.engine, pair.segment.unit))
            for pair in trained
            if pair.with_states
        }
        self.said += [
            f"states are converted {sayings.conversion(there, here)}"
            for there, here in sorted(formats)
            if there != here
        ]
        if any(not pair.with_states for pair in trained):
            self.said.append("the optimizer's states of what is loaded begin anew")

    @property
    def sentence(self) -> str:
        """What there is to say."""
        return f"load_checkpoint: {self.folder}: {'; '.join(self.said)}"

    # ---- taking

    def apply(self) -> None:
        """Returns when all that is taken is the checkpoint's. An engine that has taken a part of it is closed."""
        try:
            with torch.inference_mode(False), DisableTorchFunction():
                showing.settle_all(self.engine._residency)
                showing.forget()
                for pair in self.pairs:
                    self._take(pair)
        except Exception as error:
            self.engine.close()
            raise CheckpointError(
                f"overspill: load_checkpoint: {self.folder} was taken over in part ({error}). The engine is closed, "
                "since its weights are of two checkpoints: make a new one"
            ) from error

    def _take(self, pair: Pair) -> None:
        segment, unit = pair.segment, pair.segment.unit
        self._write(segment, self.there.read(pair.name, pair.dtype), pair.dtype)
        if not unit.trainable:
            return
        names = self._names(unit)
        if pair.with_states:
            for component in names:
                moments.write(segment, component, self.there.state(pair.name, component))
            unit.core.set_updates_of(unit.index, segment.index, self.there.tensors[pair.name].updates)
        else:
            moments.restart(segment, names, self._group(segment))

    def _write(self, segment: Segment, value: torch.Tensor, dtype: str) -> None:
        unit = segment.unit
        flat = value if unit.packing else moments.as_held(value, value.dtype, segment)
        unit.core.load_weight(unit.index, segment.index, flat.data_ptr(), flat.nbytes, dtype)

    def _groups(self, unit: Unit) -> Groups:
        found: Groups = self.optimizers[unit.part].groups
        return found

    def _names(self, unit: Unit) -> Iterable[str]:
        """The core's, of its optimizer's states; none where the optimizer keeps them itself."""
        groups = self._groups(unit)
        return () if groups.foreign else groups.states()

    def _group(self, segment: Segment) -> dict[str, Any]:
        groups = self.optimizers[segment.unit.part].param_groups
        return next(group for group in groups if any(p is segment.parameter for p in group["params"]))


def format_of(engine: Engine, unit: Unit) -> str:
    """How the core holds a trainable unit."""
    groups = parts.each(engine.optimizer)[unit.part].groups
    return unit_format(FORMATS[unit.dtype], engine._settings.format or groups.format)
