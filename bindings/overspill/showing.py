"""The changes of a unit between released, held and shown (residency.py says what those are), and which units stay held
for a while after the call that needed them.

calls.py counts who needs a unit (`pin`, `unpin`), backward keeps the units that it used last (`remember`, `forget`),
and after an interrupt `recount` puts pins and leases right. Hiding a unit hands edits over to the core; lending.py
handles edits outside forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch._C import DisableTorchFunction

from . import leases, lending
from .leases import Take
from .segments import Segment, Unit, set_data

if TYPE_CHECKING:
    from .residency import Residency

RECENT_UNITS = (
    2  # leases kept in backward beyond those that tensors hold: neighbours in the graph share units
)
_recent: list[Unit] = []  # held without a call that needs them, least recently used first


def show(unit: Unit, take: Take | None = None) -> None:
    """released or held -> shown; `take` as of leases.hold. Raises RuntimeError naming parameters that were written
    while released."""
    before_use(unit)
    view = leases.hold(unit, take).as_strided
    if unit.lending.puts_off and unit.lending.given:
        lending.put_in_what_was_given(unit)
    unit.shown = True
    for s in unit.segments:
        s.accept()
        set_data(s.memory, view(s.shape, s.stride, s.offset))
        s.parameter.__class__ = s.kind


def _refuse_writes(stale: list[Segment]) -> None:
    for s in stale:
        s.accept()
        torch.as_strided(s.blank, (s.bytes // s.blank.element_size(),), (1,)).view(torch.uint8).fill_(255)
    names = ", ".join(s.name for s in stale)
    raise RuntimeError(
        f"overspill: {names} was written while its memory was released, by an address or through a view that was taken "
        "inside a forward or a `gathered` block which has ended; the write is lost. Write through the parameter, or "
        "inside `with engine.gathered([parameter]):`"
    )


def hide(unit: Unit) -> None:
    """shown -> held. Edits in place become the new weight."""
    failure = _hand_over(unit)
    for s in unit.segments:
        s.release()
    unit.shown = unit.edited = False
    if failure is not None:
        raise failure


def hand_over(unit: Unit) -> None:
    """Makes edits in place the new weight; the unit stays shown. An edit that the core refuses is handed over again
    later."""
    failure = _hand_over(unit)
    if failure is not None:
        raise failure


def _hand_over(unit: Unit) -> Exception | None:
    """Hands all segments over, and returns the first error."""
    failure: Exception | None = None
    for s in unit.segments:
        if s.edited():
            unit.edited = True
            try:
                lending.write_back(s)
                s.look()
            except Exception as error:
                failure = failure or error
    return failure


def before_use(unit: Unit) -> None:
    """Of a unit that is not shown, before its weights are used: edits outside forward are the weight. Raises
    RuntimeError, which names them, for parameters that were written while released, or that do not train here and are
    to."""
    lending.before_show(unit)
    stale = [s for s in unit.segments if s.edited()]
    if stale:
        _refuse_writes(stale)
    if not unit.is_trained and any(s.parameter.requires_grad for s in unit.segments):
        names = ", ".join(s.name for s in unit.segments if s.parameter.requires_grad)
        raise RuntimeError(
            f"overspill: {names}: frozen at overspill.initialize, but requires_grad is True now: set requires_grad "
            "before initialize; or call engine.give_back(), set it, give the optimizer that was given to initialize a "
            "group with the parameters unless it has one, and initialize again (docs/scripts.md, Optimizers)"
        )


def put_back(units: Iterable[Unit], touched: Iterable[Segment]) -> None:
    """After a function of torch outside forward: units that it needed, and that nobody pins now, are hidden, and stay
    among the recent ones. Those are lent where somebody else has memory of them, which may be that of `touched`."""
    idle = [unit for unit in units if unit.pins == 0]
    for unit in idle:
        if unit.shown:
            hide(unit)
    for s in touched:
        unit = s.unit
        if unit in idle and s not in unit.lent and lending.is_used(unit):
            lending.lend(s)
    for unit in idle:
        remember(unit)


def settle_all(owner: Residency) -> None:
    """What the script wrote outside forward, into lent memory or into what a state_dict gave it, becomes the weight."""
    if not owner.lending.has_any():
        return
    with DisableTorchFunction():
        for unit in owner.lending.in_order():
            if unit.shown:  # what was edited in the block itself becomes the weight at its end
                for s in lending.write_edits(unit):
                    s.look()
                    unit.edited = True
            elif unit in _recent or unit.flat is None:
                lending.settle(unit)
            elif unit.pins == 0:
                _let_go(unit, lending.settle)
        for s in owner.lending.copied():
            lending.take_back(s)


def go_on(owner: Residency) -> None:
    """`settle_all`, where a forward or an update begins: from now on what a state_dict gave is the script's alone."""
    settle_all(owner)
    owner.lending.given.clear()


def pin(unit: Unit, take: Take | None = None) -> None:
    """One more call needs the unit shown; `take` as of leases.hold."""
    if not unit.shown:
        if _recent:
            _trim(RECENT_UNITS - 1, (unit,))
        show(unit, take)
    unit.pins += 1


def unpin(unit: Unit, keep: bool) -> None:
    """One call less. The last one hides the unit and lets its lease go, or keeps it among the recent ones."""
    unit.pins -= 1
    if unit.pins == 0:
        if not keep:
            retire(unit)
        else:
            remember(unit)
            hide(unit)


def edited(unit: Unit) -> bool:
    """Whether it was edited since it was shown."""
    return unit.shown and (unit.edited or any(s.edited() for s in unit.segments))


def remember(unit: Unit, needed: Sequence[Unit] = ()) -> None:
    """Makes a unit the most recent one, about to be held or held already. Older ones are let go first, but none
    of `needed`, so that no more leases than RECENT_UNITS pile up beside those of calls under way."""
    if _recent and _recent[-1] is unit:
        return
    forget_unit(unit)
    _recent.append(unit)
    _trim(RECENT_UNITS, needed)


def forget() -> None:
    """Called when forward or backward is over: keeps no unit for it any more."""
    _trim(0, ())
    leases.sweep()


def forget_unit(unit: Unit) -> None:
    """Removes a unit from the recent ones; its lease stays."""
    if unit in _recent:
        _recent.remove(unit)


def forget_recent() -> None:
    """Empties the list of recent units; leases stay."""
    _recent.clear()


def _trim(count: int, needed: Sequence[Unit]) -> None:
    """Lets the least recent units go, but none of `needed`, until `count` are left."""
    if len(_recent) > count:
        latest = _recent[-1] if count else None
        old = [u for u in _recent if u is not latest and u not in needed][: len(_recent) - count]
        for unit in old:
            _recent.remove(unit)
            retire(unit)


def retire(unit: Unit) -> None:
    """Gives up the lease of a unit that no call pins."""
    if unit.pins == 0 and unit.flat is not None:
        _let_go(unit, lending.put_off if unit.lending.puts_off else lending.settle)


def _let_go(unit: Unit, keep_edits: Callable[[Unit], None]) -> None:
    """Its lease ends, unless it is lent then. What `keep_edits` refuses is lost, with its error."""
    try:
        if unit.shown:
            hide(unit)
        keep_edits(unit)
    except Exception:
        lending.take_all_back(unit)
        if unit.flat is not None:
            leases.drop(unit)
        raise
    if not unit.lent and unit.flat is not None:
        leases.drop(unit)
