"""What a script may have of a unit's weights outside forward, and what it wrote there: one owner of both.

lent    the script may have a tensor or an array over the unit's memory. What it writes there becomes the weight, and
        what changes the weight is written there. Digests tell, since numpy counts no versions
given   a state_dict has a copy of the weight. What is written into it until the next forward or update becomes the
        weight
put off with several ranks an edit is no weight before all of them come to a call; until then it stays where it is

Who shows, hides and lets go of units is showing.py; nothing here does. Torch functions must be off.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch

from . import leases
from .divided import memory_of
from .segments import Segment, Unit, run_of
from .units import DTYPES


class Lending:
    """Of one engine. `lent`: units of which the script may have memory; `given`: segments of which a state_dict may
    have a copy. `puts_off`: edits outside forward are written when all ranks come to a call."""

    def __init__(self) -> None:
        self.lent: set[Unit] = set()
        self.given: set[Segment] = set()
        self.puts_off = False

    def has_any(self) -> bool:
        return bool(self.lent or self.given)

    def in_order(self) -> list[Unit]:
        """The lent units, as all ranks sort them."""
        return sorted(self.lent, key=lambda unit: unit.index)

    def copied(self) -> list[Segment]:
        """The given segments, as all ranks sort them."""
        return sorted(self.given, key=lambda s: (s.unit.index, s.index))


def is_used(unit: Unit) -> bool:
    """Whether a tensor or an array beside `flat` is over the lease."""
    return torch._C._storage_Use_Count(unit.key) > unit.holders


def lend(s: Segment) -> None:
    """The script has memory of it from now on; what lies there now is the weight."""
    s.unit.lending.lent.add(s.unit)
    s.unit.lent[s] = s.digest()


def take_all_back(unit: Unit) -> None:
    """Nothing of it is lent any more."""
    unit.lent.clear()
    unit.lending.lent.discard(unit)


def write_back(s: Segment) -> None:
    """What the lease has becomes the weight."""
    unit = s.unit
    written = s.stored(s.leased().cpu())
    unit.core.written(unit.index, s.index, written.data_ptr(), written.nbytes)
    if s in unit.lent:
        unit.lent[s] = s.digest()


def settle(unit: Unit) -> None:
    """What the script wrote into memory that it was lent, or into a state_dict's copies, becomes the weight, and what
    autograd saved before is out of date. Nothing is lent any more where nobody has the memory. The unit is not shown.
    """
    if unit.lent:
        if not unit.residency.current:  # Ctrl-C has kept an update from telling
            renew(unit)
        written = list(write_edits(unit))
        _accept(unit)
        if written:
            outdate(unit)
        if not is_used(unit):
            unit.lent.clear()
    if not unit.lent:
        unit.lending.lent.discard(unit)
    if unit.lending.given:
        for s in unit.segments:
            take_back(s)


def write_edits(unit: Unit) -> Iterator[Segment]:
    """What was edited through views of the lease becomes the weight, in one order on all ranks; each segment, once its
    edit is."""
    for s in sorted(_edited_where_lent(unit), key=lambda s: s.index):
        write_back(s)
        yield s


def _edited_where_lent(unit: Unit) -> list[Segment]:
    """Through views, by their digests."""
    return [s for s, before in unit.lent.items() if s.digest() != before]


def put_off(unit: Unit) -> None:
    """In place of `settle` where other ranks have to write with this one: a rank may use a unit alone, and whoever
    waited then for the others might keep them from coming. What the script edited stays where it is, not yet the
    weight, until a call that all ranks make (showing.settle_all); so they all write equally often."""
    if not is_used(unit) and not _edited_where_lent(unit):
        _accept(unit)
        take_all_back(unit)


def before_show(unit: Unit) -> None:
    """What was edited outside forward is the weight, or is put off, and is no write to released memory."""
    if unit.lending.puts_off:
        _accept(unit)
    elif unit.lent or unit.lending.given:
        settle(unit)


def _accept(unit: Unit) -> None:
    for s in unit.lent:
        s.accept()  # of a view that shares the parameter's count of versions


def give(s: Segment, value: torch.Tensor) -> None:
    """A state_dict has `value`, a copy of the weight; what is written into it until showing.go_on becomes it too."""
    s.given, s.given_version = weakref.ref(value), value._version
    s.unit.lending.given.add(s)


def copy_of(s: Segment) -> torch.Tensor | None:
    """What a state_dict got last, while somebody has it."""
    return None if s.given is None else s.given()


def _edited_copy(s: Segment) -> torch.Tensor | None:
    """A state_dict's copy that was edited since it was given, or taken back."""
    value = copy_of(s) if s in s.unit.lending.given else None
    return None if value is None or value._version == s.given_version else value


def take_back(s: Segment) -> None:
    """What was written into a state_dict's copy becomes the weight."""
    value, unit = _edited_copy(s), s.unit
    if value is not None:
        edited = memory_of(value).detach()
        stored = s.stored(edited)
        unit.core.load_weight(unit.index, s.index, stored.data_ptr(), stored.nbytes, DTYPES[stored.dtype])
        s.given_version = value._version
        outdate(unit)
        if unit.flat is not None:  # of before
            s.leased().copy_(run_of(edited))
            if s in unit.lent:
                unit.lent[s] = s.digest()
    elif copy_of(s) is None:
        unit.lending.given.discard(s)


def put_in_what_was_given(unit: Unit) -> None:
    """Where writes are put off: what the script wrote into a state_dict's copy is seen in the unit, which is held."""
    for s in unit.segments:
        if (value := _edited_copy(s)) is None:
            continue
        edited = memory_of(value).detach()
        s.stored(edited)  # refuses what would be rounded
        if s not in unit.lent:
            lend(s)
        s.leased().copy_(run_of(edited))
        s.given_version = value._version


def renew(unit: Unit) -> None:
    """The weight has changed: it is what the script has now in the memory that it was lent, and views of it that
    autograd saved are out of date."""
    lease = unit.lease
    try:
        new = leases.acquire(unit)
    finally:
        unit.lease = lease
    if new.data_ptr() != unit.flat.data_ptr():  # else the weights are used where they live
        unit.flat.copy_(new)
    for s in unit.lent:
        now = s.digest()
        if now != unit.lent[s]:
            torch.autograd.graph.increment_version(s.parameter)
            s.accept()
            unit.lent[s] = now


def outdate(unit: Unit) -> None:
    """An edit outside forward has become the weight: what autograd saved of it before is out of date."""
    if not unit.residency.closed:
        unit.generation = unit.core.generation(unit.index)
