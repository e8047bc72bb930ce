"""Whether a parameter's memory is there: the life cycle of units, seen from PyTorch.

A parameter keeps its identity and its strides for ever; what changes is the memory under it:

    released   p.data lies over one process-wide mapping that reads as NaN in full length; no memory is held
    held       a lease on the unit's memory is kept, p.data still reads as NaN (backward: saved tensors are
    views of the lease)
    shown      the lease is kept and p.data is a view of it (forward, `gathered`)

Of a DTensor, all of that is true of its part on this rank. A parameter that is not shown has a class of its own
(`released_class`), so that torch asks before it reads it (released.py).

A unit is lent while the script may have a tensor or an array over its memory: what it writes there becomes the weight,
and what changes the weight is written there. Digests tell, since numpy counts no versions.

A lease is a DLPack capsule of the core; it ends when the last tensor over it dies. Nothing here is
thread-safe: calls.py lets one thread at a time in. An interrupt may strike between any two lines; so each function
publishes what it made last, can run again from its start, and leaves nothing that `recount` does not put right.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction, TensorBase
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack

from . import _core, files, forked, heap, packed, place, ranks
from .divided import as_divided, memory_of
from .memory import free_bytes, human
from .nan_memory import nan_like
from .parts import Part
from .units import DTYPES, UnitSpec, memory_order

# The attributes below Parameter's: patches.py puts properties in front of `data` and `grad`.
get_data, set_data = TensorBase.data.__get__, TensorBase.data.__set__
get_grad, set_grad = TensorBase.grad.__get__, TensorBase.grad.__set__

RECENT_UNITS = (
    2  # leases kept in backward beyond those that tensors hold: neighbours in the graph share units
)


def _ask(func: Callable, args: tuple, kwargs: dict) -> Any:
    raise NotImplementedError


ask = _ask  # released.py's: what torch is about to do to parameters that are released


def _torch_function(
    cls: type, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
) -> Any:
    return ask(func, args, kwargs or {})


_released_classes: dict[type, type] = {}


def released_class(kind: type) -> type:
    """The class of a released parameter whose own class is `kind`: a child of it; `kind` itself where that is no child
    of nn.Parameter, such as DTensor, or looks at functions itself."""
    if not issubclass(kind, nn.Parameter) or kind.__torch_function__ is not nn.Parameter.__torch_function__:
        return kind
    if kind not in _released_classes:
        namespace = {
            "__torch_function__": classmethod(_torch_function),
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
        }
        _released_classes[kind] = type(kind)(kind.__name__, (kind,), namespace)
    return _released_classes[kind]


def is_released_class(kind: type) -> bool:
    return kind in _released_classes.values()


class Segment:
    """One parameter in one unit. `kind`: its class while it is shown; `released_kind`: else. `memory`: the tensor whose
    memory comes and goes, the parameter itself unless it is a DTensor; `shape` and `stride` are its. `version`: of all
    three when they were last looked at. `alias`: what `p.data` returned since the memory last changed. `given`: a weak
    reference to the last state_dict's copy, and its `given_version`."""

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
        return values if packing is None else packed.pack_exactly(packing, self.name, _run(values))

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


def _run(values: torch.Tensor) -> torch.Tensor:
    """Its elements in the order of memory, which they fill without a gap."""
    return values.as_strided((values.numel(),), (1,))


class Unit:
    """`flat`: the lease, one-dimensional in the unit's dtype, or None; `holders`: how many references its storage has
    when nobody else has any; `lease`: on an accelerator, the core's. `pins`: calls under way that need it shown.
    `shown`: some parameters may be views of the lease. `edited`: the core has edits of since then. `lent`: the segments
    that the script may have memory of, with the digest of what is the weight there. `places`: bytes at which the core
    has the segments. `packing`: how its bytes there stand for the weights (packed.py), which `flat` has unpacked."""

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
        "lent",
        "name",
        "packing",
        "part",
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
        self.name, self.dtype, self.trainable = spec.name, spec.dtype, spec.trainable
        self.packing = spec.packing
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


Take = Callable[[Unit], torch.Tensor]  # gives what `Unit.flat` becomes

BROKEN_OFF = "engine.give_back() was broken off: call it again, it goes on where it was"
registry: dict[int, Segment] = {}  # id of a parameter -> its segment, which keeps the parameter alive
leases: dict[
    int, tuple[StorageWeakRef, Unit]
] = {}  # storage of a lease that some tensor still holds -> its unit
_lingering: list[int] = []  # leases let go here while somebody's view lives on
_recent: list[Unit] = []  # held without a call that needs them, least recently used first
_living: weakref.WeakSet[Residency] = weakref.WeakSet()
accelerators: set[torch.device] = set()  # of which autograd runs on a thread of its own


def hold(unit: Unit, take: Take | None = None) -> torch.Tensor:
    """The unit's memory, one-dimensional in its dtype; blocks until the weights are there, or, on an accelerator, on
    their way before what its current stream is given next. Torch functions must be off. `take`: of a unit that is not
    held, where that memory comes from; None: a lease."""
    if unit.flat is None:
        _sweep()
        take = take or acquire
        if torch.is_inference_mode_enabled():
            with torch._C._InferenceMode(False):
                flat = take(unit)
        else:
            flat = take(unit)
        storage = flat.untyped_storage()
        unit.key = storage._cdata
        leases[unit.key] = (StorageWeakRef(storage), unit)
        del storage  # which older versions of PyTorch count as long as it is here
        unit.holders = torch._C._storage_Use_Count(unit.key)
        unit.flat = flat
    elif unit.lease is not None:
        use(unit)
    return unit.flat


def acquire(unit: Unit) -> torch.Tensor:
    """A lease; of a packed unit what it unpacks to, in memory of torch's."""
    where = unit.residency.place
    if where.on_host:
        capsule = unit.core.acquire(unit.index)
    else:
        capsule, unit.lease = unit.core.acquire_on(unit.index, where.queue(), *where.dlpack)
    leased = from_dlpack(capsule)
    return leased.view(unit.dtype) if unit.packing is None else _unpacked(unit, leased)


def _unpacked(unit: Unit, leased: torch.Tensor) -> torch.Tensor:
    last = unit.segments[-1]
    flat = torch.empty(last.offset + last.memory.numel(), dtype=unit.dtype)
    for s, begin in zip(unit.segments, unit.places, strict=True):
        values = flat[s.offset : s.offset + s.memory.numel()]
        packed.unpack_into(unit.packing, leased[begin : begin + s.packed_bytes], values)
    return flat


def acquire_copy(unit: Unit) -> torch.Tensor:
    """As a lease, in memory of torch's, which no budget counts."""
    flat = acquire(unit)
    if unit.packing is None:
        flat = flat.clone()
    unit.lease = None
    return flat


def acquire_to_edit(unit: Unit) -> torch.Tensor:
    """For a script that may change it in place. Other ranks are sent the weights from the memory that a lease is of,
    maybe after this rank has changed it there; so where there are others the script gets memory of its own. Raises
    MemoryError where the machine has less available."""
    if not unit.residency.puts_off:
        return acquire(unit)
    needed = sum(s.bytes for s in unit.segments)
    if needed > (available := free_bytes()):
        raise MemoryError(
            f"overspill: {unit.name} outside forward needs {human(needed)} beside the budgets, since other ranks may "
            f"be sent the weights meanwhile, and {human(available)} are available. What was edited through views "
            "(p.data) lies there until all ranks call forward, step or engine.weight: edit the parameters themselves, "
            "drop views that are kept, or gather fewer at once"
        )
    return acquire_copy(unit)


def use(unit: Unit) -> None:
    """On an accelerator: the current stream, maybe another one than before, uses the lease."""
    unit.lease.use_on(unit.residency.place.queue())


def drop(unit: Unit) -> None:
    """Lets the lease go; the memory is free when the last view of it dies. It is not lent."""
    unit.flat = unit.lease = None
    if leases[unit.key][0].expired():
        del leases[unit.key]
    else:
        _lingering.append(unit.key)


def _relist_leases() -> None:
    """Lists as lingering each lease that no unit has."""
    held = {u.key for owner in _living for u in owner.units if u.flat is not None}
    _lingering[:] = [key for key in leases if key not in held]
    _sweep()


def _sweep() -> None:
    if _lingering:
        dead = [key for key in _lingering if leases[key][0].expired()]
        for key in dead:
            del leases[key]
            _lingering.remove(key)


def lingering_leases() -> int:
    """Leases that only views outside the engine keep alive (a query for tests and statistics)."""
    return sum(not leases[key][0].expired() for key in _lingering)


def show(unit: Unit, take: Take | None = None) -> None:
    """released or held -> shown; `take` as of `hold`. Raises RuntimeError naming parameters that were written while
    released."""
    if unit.residency.puts_off:
        for s in unit.lent:
            s.accept()
    elif unit.lent or unit.residency.given:
        settle(unit)
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
    view = hold(unit, take).as_strided
    if unit.residency.puts_off and unit.residency.given:
        _put_in_what_was_given(unit)
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
    """shown -> held. What was edited in place becomes the new weight."""
    failure = _hand_over(unit)
    for s in unit.segments:
        s.release()
    unit.shown = unit.edited = False
    if failure is not None:
        raise failure


def hand_over(unit: Unit) -> None:
    """What was edited in place becomes the new weight, and the unit stays shown. An edit that the core does not take
    is handed over again later."""
    failure = _hand_over(unit)
    if failure is not None:
        raise failure


def _hand_over(unit: Unit) -> Exception | None:
    """The first error; the other segments are handed over nevertheless."""
    failure: Exception | None = None
    for s in unit.segments:
        if s.edited():
            unit.edited = True
            try:
                _write_back(s)
                s.look()
            except Exception as error:
                failure = failure or error
    return failure


def _write_back(s: Segment) -> None:
    """What the lease has becomes the weight."""
    unit = s.unit
    written = s.stored(s.leased().cpu())
    unit.core.written(unit.index, s.index, written.data_ptr(), written.nbytes)
    if s in unit.lent:
        unit.lent[s] = s.digest()


def put_back(units: Iterable[Unit], touched: Iterable[Segment]) -> None:
    """After a function of torch outside forward: units that it needed, and that nobody pins now, are hidden, and stay
    among the recent ones. Those are lent where somebody else has memory of them, which may be that of `touched`."""
    idle = [unit for unit in units if unit.pins == 0]
    for unit in idle:
        if unit.shown:
            hide(unit)
    for s in touched:
        unit = s.unit
        if unit in idle and s not in unit.lent and _is_used(unit):
            unit.lent[s] = s.digest()
            unit.residency.lent.add(unit)
    for unit in idle:
        remember(unit)


def settle(unit: Unit) -> None:
    """What the script wrote into memory that it was lent, or into a state_dict's copies, becomes the weight, and what
    autograd saved before is out of date. Nothing is lent any more where nobody has the memory. The unit is not shown.
    """
    owner = unit.residency
    if unit.lent:
        if not owner.current:  # Ctrl-C has kept an update from telling
            _renew(unit)
        written = sorted(_edited_where_lent(unit), key=lambda s: s.index)  # all ranks in one order
        for s in written:
            _write_back(s)
        for s in unit.lent:
            s.accept()  # of a view that shares the parameter's count of versions
        if written:
            outdate(unit)
        if not _is_used(unit):
            unit.lent.clear()
    if not unit.lent:
        owner.lent.discard(unit)
    if owner.given:
        for s in unit.segments:
            _take_back(s)


def _edited_where_lent(unit: Unit) -> list[Segment]:
    """Through views, by their digests."""
    return [s for s, before in unit.lent.items() if s.digest() != before]


def put_off(unit: Unit) -> None:
    """In place of `settle` where other ranks have to write with this one: a rank may use a unit alone, and whoever
    waited then for the others might keep them from coming. What the script edited stays where it is, not yet the
    weight, until a call that all ranks make (settle_all); so they all write equally often."""
    if not _is_used(unit) and not _edited_where_lent(unit):
        for s in unit.lent:
            s.accept()
        unit.lent.clear()
        unit.residency.lent.discard(unit)


def settle_all(owner: Residency) -> None:
    """What the script wrote outside forward, into lent memory or into what a state_dict gave it, becomes the weight."""
    if not (owner.lent or owner.given):
        return
    with DisableTorchFunction():
        for unit in sorted(owner.lent, key=lambda unit: unit.index):  # all ranks in one order
            if unit.shown:  # what was edited in the block itself becomes the weight at its end
                for s in sorted(_edited_where_lent(unit), key=lambda s: s.index):
                    _write_back(s)
                    s.look()
                    unit.edited = True
            elif unit in _recent or unit.flat is None:
                settle(unit)
            elif unit.pins == 0:
                _let_go(unit, settle)
        for s in sorted(owner.given, key=lambda s: (s.unit.index, s.index)):
            _take_back(s)


def go_on(owner: Residency) -> None:
    """`settle_all`, where a forward or an update begins: from now on what a state_dict gave is the script's alone."""
    settle_all(owner)
    owner.given.clear()


def give(s: Segment, value: torch.Tensor) -> None:
    """A state_dict has `value`, a copy of the weight. What is written into it until `go_on` becomes the weight."""
    s.given, s.given_version = weakref.ref(value), value._version
    s.unit.residency.given.add(s)


def _take_back(s: Segment) -> None:
    unit = s.unit
    if s not in unit.residency.given:
        return
    value = None if s.given is None else s.given()
    if value is None:
        unit.residency.given.discard(s)
    elif value._version != s.given_version:
        edited = memory_of(value).detach()
        stored = s.stored(edited)
        unit.core.load_weight(unit.index, s.index, stored.data_ptr(), stored.nbytes, DTYPES[stored.dtype])
        s.given_version = value._version
        outdate(unit)
        if unit.flat is not None:  # of before
            s.leased().copy_(edited.as_strided((edited.numel(),), (1,)))
            if s in unit.lent:
                unit.lent[s] = s.digest()


def _put_in_what_was_given(unit: Unit) -> None:
    """Where writes are put off: what the script wrote into a state_dict's copy is seen in the unit, which is held."""
    for s in unit.segments:
        value = s.given() if s in unit.residency.given and s.given is not None else None
        if value is None or value._version == s.given_version:
            continue
        edited = memory_of(value).detach()
        s.stored(edited)  # refuses what would be rounded
        unit.lent.setdefault(s, s.digest())
        unit.residency.lent.add(unit)
        s.leased().copy_(edited.as_strided((edited.numel(),), (1,)))
        s.given_version = value._version


def _is_used(unit: Unit) -> bool:
    """Whether a tensor or an array beside `flat` is over the lease."""
    return torch._C._storage_Use_Count(unit.key) > unit.holders


def _renew(unit: Unit) -> None:
    """The weight has changed: it is what the script has now in the memory that it was lent, and views of it that
    autograd saved are out of date."""
    lease = unit.lease
    try:
        new = acquire(unit)
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


def pin(unit: Unit, take: Take | None = None) -> None:
    """One more call needs the unit shown; `take` as of `hold`."""
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
            _retire(unit)
        else:
            remember(unit)
            hide(unit)


def edited(unit: Unit) -> bool:
    """Whether it was edited since it was shown."""
    return unit.shown and (unit.edited or any(s.edited() for s in unit.segments))


def outdate(unit: Unit) -> None:
    """An edit outside forward has become the weight: what autograd saved of it before is out of date."""
    if not unit.residency.closed:
        unit.generation = unit.core.generation(unit.index)


def remember(unit: Unit, needed: Sequence[Unit] = ()) -> None:
    """Makes a unit the most recent one, about to be held or held already. Older ones are let go first, but none
    of `needed`, so that no more leases than RECENT_UNITS pile up beside those of calls under way."""
    if _recent and _recent[-1] is unit:
        return
    if unit in _recent:
        _recent.remove(unit)
    _recent.append(unit)
    _trim(RECENT_UNITS, needed)


def forget() -> None:
    """Forward or backward is over: nothing is kept for it."""
    _trim(0, ())
    _sweep()


def _trim(count: int, needed: Sequence[Unit]) -> None:
    """Lets the least recent units go, but none of `needed`, until `count` are left."""
    if len(_recent) > count:
        latest = _recent[-1] if count else None
        old = [u for u in _recent if u is not latest and u not in needed][: len(_recent) - count]
        for unit in old:
            _recent.remove(unit)
            _retire(unit)


def recount(calls: Iterable[Any]) -> None:
    """Pins and `Residency.calls` become those of `calls` (calls.Call), the ones under way; what nobody pins is
    released. Gradients that an interrupted backward left in parameters are dropped: the engine takes what arrives."""
    for owner in _living:
        owner.calls = 0
        for unit in owner.units:
            unit.pins = 0
    for call in calls:
        if call.owner is not None:
            call.owner.calls += 1
        for unit in call.units:
            unit.pins += 1
    _recent.clear()
    failure: Exception | None = None
    with DisableTorchFunction():
        for owner in [each for each in _living if not each.closed]:
            for unit in owner.units:
                try:
                    if unit.pins == 0:
                        _retire(unit)
                    elif not unit.shown:
                        show(unit, acquire_to_edit)
                except Exception as error:
                    failure = failure or error
            for s in owner.segments:
                if get_grad(s.parameter) is not None and not s.unit.trained_by_torch:
                    set_grad(s.parameter, None)
    _relist_leases()
    if failure is not None:
        raise failure


def _retire(unit: Unit) -> None:
    if unit.pins == 0 and unit.flat is not None:
        _let_go(unit, put_off if unit.lent and unit.residency.puts_off else settle)


def _let_go(unit: Unit, keep_edits: Callable[[Unit], None]) -> None:
    """Its lease ends, unless it is lent then. What `keep_edits` refuses is lost, with its error."""
    try:
        if unit.shown:
            hide(unit)
        keep_edits(unit)
    except Exception:
        unit.lent.clear()
        unit.residency.lent.discard(unit)
        if unit.flat is not None:
            drop(unit)
        raise
    if not unit.lent and unit.flat is not None:
        drop(unit)


def _size(memory: torch.Tensor) -> int:
    return memory.numel() * memory.element_size()


class Residency:
    """The units of one engine, and its gradients (gradients.py). `folder`: for files of tensors that are the script's.
    Hooks and parameters refer to it, never to the engine.
    It refers to nothing that holds the engine's Life (engine.py), whose end closes it."""

    def __init__(self, core: Any, specs: list[UnitSpec], where: place.Place, held: Any, folder: files.Folder):
        self.core, self.place, self.calls = core, where, 0
        self.gradients, self.folder = held, folder
        self.freed = heap.Freed()
        self.closed: str | None = None  # why it cannot be used any more
        self.why_closed = (
            "the engine of this model is closed; its weights are gone: make model and engine anew, and load a "
            "checkpoint (engine.give_back() in place of close() leaves the weights in the model)"
        )
        self.leaving = False  # give_back gives weights: some may be the model's
        self.given_out: list[Any] | None = None  # what it gives
        self.current = True  # units know the generation of their weights
        self.puts_off = False  # edits outside forward are written when all ranks come to a call (put_off)
        self.spoiled = False  # a train_batch that was broken off has left gradients
        self.expect_step: Callable[[], None] | None = None  # before each training pass, with speculation
        self.clearing: weakref.WeakMethod | None = None  # Engine._clear_gradients
        self.lent: set[Unit] = set()
        self.given: set[Segment] = set()  # what state_dicts have (`give`)
        self.hooked: list[weakref.ref[nn.Module]] = []  # modules that have hooks of the engine
        self.gradient_hooks: list[
            Any
        ] = []  # torch keeps them where the garbage collector does not see the cycle
        self.units = [Unit(self, i, spec) for i, spec in enumerate(specs)]
        self.segments = [s for unit in self.units for s in unit.segments]
        held.by_torch = [s for s in self.segments if s.unit.trained_by_torch]
        _living.add(self)
        accelerators.update(() if where.on_host else (where.device,))
        forked.watch(self)

    def nan_like(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return nan_like(shape, stride, dtype, self.place, self.core)

    def clear_gradients(self, call: str, set_to_none: bool = True, part: Part | None = None) -> None:
        """For a call of the script, by name. Where the engine lives its step begins anew, with a warning; not so where
        the call is about the part of one optimizer of several."""
        if self.closed:
            raise RuntimeError(f"overspill: {self.closed}")
        clear = None if self.clearing is None else self.clearing()
        if clear is None or part is not None:
            self.gradients.clear(set_to_none, part)
        else:
            clear(call, set_to_none)

    def take_weights(
        self,
        source: Any = None,
        group: ranks.Group | None = None,
        values: MutableMapping[int, torch.Tensor] | None = None,
    ) -> None:
        """Copies the weights into the core, one after the other, and drops the model's own memory at once. `source`
        has them in place of the model (a pretrained.Folder); each rank has read the same there, or RankError. `values`,
        which is used up, has those of parameters that are new, by id."""
        values = {} if values is None else values
        read = ranks.Checksums()
        for s in self.segments:
            own = values.pop(id(s.parameter), s.memory)
            taken = own.detach().cpu() if source is None else source.read(s.names, s.unit.dtype)
            del own
            if taken.stride() != s.stride:
                taken = torch.empty_strided(s.shape, s.stride, dtype=taken.dtype).copy_(taken)
            if group is not None and source is not None and taken.numel():
                read.add(s.name, taken)
            if s.unit.packing is not None:
                taken = packed.pack(s.unit.packing, _run(taken))
            self.core.load_weight(s.unit.index, s.index, taken.data_ptr(), taken.nbytes, DTYPES[taken.dtype])
            del taken
            registry[id(s.parameter)] = s
            with DisableTorchFunction():
                s.release()
            self.freed.add(s.bytes)
        heap.give_back()
        if group is not None:
            read.compare(group)
        self.refresh()

    def refresh(self) -> None:
        """Weights changed outside forward: saved handles of before are out of date."""
        for unit in self.units:
            unit.generation = self.core.generation(unit.index)
        for unit in sorted(self.lent, key=lambda unit: unit.index):
            if unit.flat is not None:
                with DisableTorchFunction():
                    _renew(unit)
        self.current = True

    def forget_model(self) -> None:
        """Nothing here keeps the model's memory any more."""
        for unit in self.units:
            unit.segments = []
        self.segments, self.given_out = [], None

    def leave(self, elsewhere: forked.Elsewhere) -> None:
        """In a forked child: leased memory is not there, and the core is not to be called."""
        self.core = self.gradients.core = elsewhere
        self.gradients.forget()
        _recent.clear()
        _lingering.clear()
        for unit in self.units:
            unit.core = elsewhere
            leases.pop(unit.key, None)
            unit.flat, unit.lease, unit.shown, unit.edited, unit.pins = None, None, False, False, 0
            unit.lent.clear()
        self.lent.clear()
        self.given.clear()
        with DisableTorchFunction():
            for s in self.segments:
                s.release()

    def is_of_a_parent(self) -> bool:
        """Whether this is a forked child of the process that has the engine."""
        return isinstance(self.core, forked.Elsewhere)

    def close(self) -> None:
        """The parameters stay NaN; their hooks refuse. Leases of living tensors stay valid. In a forked child nothing
        ends. The first error, or Ctrl-C, of what is let go is raised once all of it is gone and the core has ended.
        May be called again: it does what Ctrl-C kept it from."""
        if self.is_of_a_parent():
            return
        self.closed = self.why_closed
        failure: BaseException | None = None
        self.gradients.forget()
        try:
            for hook in self.gradient_hooks:
                hook.remove()
            for unit in self.units:
                if unit in _recent:
                    _recent.remove(unit)
                unit.lent.clear()
                unit.pins = 0
                while unit.flat is not None:  # what Ctrl-C broke off is taken up again
                    try:
                        with DisableTorchFunction():
                            _retire(unit)
                    except BaseException as error:
                        failure = failure or error
            for s in self.segments:
                registry.pop(id(s.parameter), None)
        finally:
            self.core.close()
        if failure is not None:
            raise failure
