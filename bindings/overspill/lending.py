"""Tracks the memory of a unit's weights that a script may use outside forward, and what the script wrote there.

lent    the script may have a tensor or an array over the unit's memory. What it writes there becomes the weight, and
        what changes the weight is written there. Digests tell, since numpy counts no versions
given   a state_dict has a copy of the weight. What is written into it until the next forward or update becomes the
        weight
put off with several ranks an edit is no weight before all of them come to a call; until then it stays where it is

showing.py shows, hides and releases units; nothing here does. Torch functions must be off.
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
    """Whether a tensor or an array other than `flat` uses the lease's memory."""
    return torch._C._storage_Use_Count(unit.key) > unit.holders


def lend(s: Segment) -> None:
    """Marks the unit as lent: the script may use its memory, which now holds the weight."""
    s.unit.lending.lent.add(s.unit)
    s.unit.lent[s] = s.digest()


def take_all_back(unit: Unit) -> None:
    """Ends all lending."""
    unit.lent.clear()
    unit.lending.lent.discard(unit)


def write_back(s: Segment) -> None:
    """Makes the lease's content the weight."""
    unit = s.unit
    written = s.stored(s.leased().cpu())
    unit.core.written(unit.index, s.index, written.data_ptr(), written.nbytes)
    if s in unit.lent:
        unit.lent[s] = s.digest()


def settle(unit: Unit) -> None:
    """Makes what the script wrote into lent memory, or into a state_dict's copies, the weight; what autograd saved
    before is then out of date. Ends lending if nothing uses the memory any more. The unit must not be shown.
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
    """Used in place of `settle` if other ranks have to write with this one. A rank may use a unit alone, and a rank
    that then waited for the others could block them. So an edit stays where it is, not yet the weight, until a call
    that all ranks make (showing.settle_all); thus all ranks write equally often."""
    if not is_used(unit) and not _edited_where_lent(unit):
        _accept(unit)
        take_all_back(unit)


def before_show(unit: Unit) -> None:
    """Makes edits outside forward the weight, or puts them off, so that they do not count as writes to released
    memory."""
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
    """The copy that a state_dict got last, if it still exists."""
    return None if s.given is None else s.given()


def _edited_copy(s: Segment) -> torch.Tensor | None:
    """A state_dict's copy, if it was edited since it was given or taken back."""
    value = copy_of(s) if s in s.unit.lending.given else None
    return None if value is None or value._version == s.given_version else value


def take_back(s: Segment) -> None:
    """Makes what was written into a state_dict's copy the weight."""
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
    """If writes are put off: copies what the script wrote into a state_dict's copy into the unit's memory, which is
    held."""
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
    """Called when the weight has changed: copies it into lent memory; views that autograd saved are out of date."""
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
