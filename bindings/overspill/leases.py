"""Who holds the memory of units: leases of the core, and memory of torch's in their place.

A lease is a DLPack capsule of the core. It ends when the last tensor over it dies: that may be a script's view long
after the unit has given the lease up (`lingering`). `of_storage` finds the unit of a tensor that lies over a lease.
Torch functions must be off.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack

from . import given, packed
from .memory import free_bytes, human
from .segments import Unit

Take = Callable[[Unit], torch.Tensor]  # gives what `Unit.flat` becomes

# Storage of a lease that some tensor still holds -> its unit.
of_storage: dict[int, tuple[StorageWeakRef, Unit]] = {}
_lingering: list[int] = []  # leases let go here while somebody's view lives on


def hold(unit: Unit, take: Take | None = None) -> torch.Tensor:
    """Returns the unit's memory as one-dimensional tensor of its dtype. Blocks until the weights are there; on an
    accelerator, until the current stream will have them before its next work. Torch functions must be off. `take`
    provides the memory of a unit that is not held; None: a lease."""
    if unit.flat is None:
        sweep()
        take = take or acquire
        if torch.is_inference_mode_enabled():
            with torch._C._InferenceMode(False):
                flat = take(unit)
        else:
            flat = take(unit)
        storage = flat.untyped_storage()
        unit.key = storage._cdata
        of_storage[unit.key] = (StorageWeakRef(storage), unit)
        del storage  # which older versions of PyTorch count as long as it is here
        unit.holders = torch._C._storage_Use_Count(unit.key)
        unit.flat = flat
    elif unit.lease is not None:
        use(unit)
    return unit.flat


def acquire(unit: Unit) -> torch.Tensor:
    """Takes a lease; a packed unit is unpacked into memory of torch's, and one that is read in tiles copied there."""
    if unit.part_bytes:
        return _whole(unit)
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


def _whole(unit: Unit) -> torch.Tensor:
    """Of a unit that layers read in tiles, for something else that uses its weights. No budget counts the copy."""
    needed = sum(s.bytes for s in unit.segments)
    if unit.index not in unit.residency.told_whole:
        unit.residency.told_whole.add(unit.index)
        warnings.warn(
            f"overspill: budget.tile: something other than its layer uses {unit.segments[0].name}, and gets it whole: "
            f"a copy of {human(needed)}, which no budget counts",
            stacklevel=given.script_level(),
        )
    last = unit.segments[-1]
    flat = torch.empty(last.offset + last.memory.numel(), dtype=unit.dtype)
    for s in unit.segments:
        values = flat[s.offset : s.offset + s.memory.numel()]
        unit.core.read_part(unit.index, s.index, 0, values.data_ptr(), values.nbytes)
    return flat


def acquire_copy(unit: Unit) -> torch.Tensor:
    """Takes a copy in place of a lease, in memory of torch's, which no budget counts."""
    flat = acquire(unit)
    if unit.packing is None and not unit.part_bytes:
        flat = flat.clone()
    unit.lease = None
    return flat


def acquire_to_edit(unit: Unit) -> torch.Tensor:
    """For a script that may edit weights in place. This rank sends weights to other ranks from leased memory, maybe
    after such an edit; so with several ranks the script gets a copy. Raises MemoryError where the machine has less
    available."""
    if not unit.lending.puts_off:
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
    """On an accelerator: says that the current stream, which may be a new one, uses the lease."""
    unit.lease.use_on(unit.residency.place.queue())


def drop(unit: Unit) -> None:
    """Gives the lease up; the memory is free when its last view dies. The unit must not be lent."""
    unit.flat = unit.lease = None
    if of_storage[unit.key][0].expired():
        del of_storage[unit.key]
    else:
        _lingering.append(unit.key)


def forget(unit: Unit) -> None:
    """For a forked child, which does not have the memory."""
    of_storage.pop(unit.key, None)
    unit.flat = unit.lease = None


def forget_lingering() -> None:
    """As `forget`, of leases that no unit has."""
    _lingering.clear()


def relist(units: Iterable[Unit]) -> None:
    """Lists as lingering each lease that none of `units`, all that there are, has."""
    held = {unit.key for unit in units if unit.flat is not None}
    _lingering[:] = [key for key in of_storage if key not in held]
    sweep()


def sweep() -> None:
    """Forgets leases that ended."""
    if _lingering:
        dead = [key for key in _lingering if of_storage[key][0].expired()]
        for key in dead:
            del of_storage[key]
            _lingering.remove(key)


def lingering() -> int:
    """Leases that only views outside the engine keep alive (a query for tests and statistics)."""
    return sum(not of_storage[key][0].expired() for key in _lingering)
