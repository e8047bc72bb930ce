"""The life cycle of units as PyTorch sees it: when a parameter's memory holds its weight.

A parameter keeps its identity and its strides for ever; what changes is the memory under it:

    released   p.data lies over one process-wide mapping that reads as NaN in full length; no memory is held
    held       a lease on the unit's memory is kept, p.data still reads as NaN (backward: saved tensors are
    views of the lease)
    shown      the lease is kept and p.data is a view of it (forward, `gathered`)

For a DTensor all of this applies to its part on this rank. A parameter that is not shown has a class of its own
(`released_class`), so that torch asks before it reads it (released.py).

The parts: segments.py describes units and parameters, leases.py holds memory, lending.py tracks memory that a script
may use and what it wrote there, showing.py changes the three states. `Residency`, here, has all units of one engine: it
makes, fills and ends them. This module imports the others at run time, never the reverse.

Nothing of it is thread-safe: calls.py lets one thread at a time in. An interrupt may strike between any two lines. So
each function publishes its result last, can run again from its start, and leaves nothing that `recount` cannot repair.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction

from . import files, forked, heap, leases, lending, packed, place, ranks, showing
from .activations import moving, recompute_plan
from .nan_memory import nan_like
from .parts import Part
from .segments import Unit, get_grad, registry, run_of, set_grad
from .units import DTYPES, UnitSpec

BROKEN_OFF = "engine.give_back() was broken off: call it again, it goes on where it was"
_living: weakref.WeakSet[Residency] = weakref.WeakSet()
accelerators: set[torch.device] = set()  # of which autograd runs on a thread of its own


def recount(calls: Iterable[Any]) -> None:
    """Sets pins and `Residency.calls` from `calls` (calls.Call), the calls under way; releases units without a pin.
    Gradients that an interrupted backward left in parameters are dropped: the engine takes what arrives."""
    for owner in _living:
        owner.calls = 0
        for unit in owner.units:
            unit.pins = 0
    for call in calls:
        if call.owner is not None:
            call.owner.calls += 1
        for unit in call.units:
            unit.pins += 1
    showing.forget_recent()
    failure: Exception | None = None
    with DisableTorchFunction():
        for owner in [each for each in _living if not each.closed]:
            for unit in owner.units:
                try:
                    if unit.pins == 0:
                        showing.retire(unit)
                    elif not unit.shown:
                        showing.show(unit, leases.acquire_to_edit)
                except Exception as error:
                    failure = failure or error
            for s in owner.segments:
                if get_grad(s.parameter) is not None and not s.unit.trained_by_torch:
                    set_grad(s.parameter, None)
    leases.relist(unit for owner in _living for unit in owner.units)
    if failure is not None:
        raise failure


class Residency:
    """The units of one engine, and its gradients (gradients.py). `folder`: for files of tensors that are the script's.
    Hooks and parameters refer to it, never to the engine.
    It refers to nothing that holds the engine's Life (engine.py), whose end closes it."""

    def __init__(self, core: Any, specs: list[UnitSpec], where: place.Place, held: Any, folder: files.Folder):
        self.core, self.place, self.calls = core, where, 0
        self.gradients, self.folder = held, folder
        self.freed = heap.Freed()
        self.moving: moving.Moving | None = None  # set where the engine keeps activations
        self.told_what_is_kept = False  # of blocks that recompute.py was to compute again
        self.tiled: str | None = None  # which logits are made in tiles, in words
        self.tiled_layers: str | None = None  # which layers are computed in tiles, in words
        self.recording = False  # engine.trace or engine.timeline is
        self.told_whole: set[int] = set()  # units that are read in tiles, and were used whole
        self.told_of_compiler = False  # of the script's, which gains nothing
        self.recomputes: str | None = None  # what of the model, in words
        self.tracer: Any = None  # graph.trace.Tracer, while a step is traced
        self.watch: Any = None  # watch.Watch, where the whole process has a budget
        self.partitioning: Any = None  # partitioned.Partitioning, where ranks keep slices of activations
        self.compiler: Any = None  # compiled.Compiler, where the model's blocks are compiled
        self.planner: recompute_plan.Planner | None = None  # until it has chosen what is computed again
        self.closed: str | None = None  # why it cannot be used any more
        self.why_closed = (
            "the engine of this model is closed; its weights are gone: make model and engine anew, and load a "
            "checkpoint (engine.give_back() in place of close() leaves the weights in the model)"
        )
        self.leaving = False  # give_back gives weights: some may be the model's
        self.given_out: list[Any] | None = None  # what it gives
        self.current = True  # units know the generation of their weights
        self.spoiled = False  # a train_batch that was broken off has left gradients
        self.expect_step: Callable[[], None] | None = None  # before each training pass, with speculation
        self.clearing: weakref.WeakMethod | None = None  # Engine._clear_gradients
        self.lending = lending.Lending()
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
        """For a call of the script, by name. The engine's step, if the engine lives, begins anew with a warning, unless
        the call concerns one optimizer of several."""
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
                taken = packed.pack(s.unit.packing, run_of(taken))
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
        """Called when weights changed outside forward: handles that autograd saved before are out of date."""
        for unit in self.units:
            unit.generation = self.core.generation(unit.index)
        for unit in self.lending.in_order():
            if unit.flat is not None:
                with DisableTorchFunction():
                    lending.renew(unit)
        self.current = True

    def forget_model(self) -> None:
        """Nothing here keeps the model's memory any more."""
        for unit in self.units:
            unit.segments = []
        self.segments, self.given_out = [], None

    def leave(self, elsewhere: forked.Elsewhere) -> None:
        """For a forked child, which has no leased memory and must not call the core."""
        self.core = self.gradients.core = elsewhere
        self.gradients.forget()
        showing.forget_recent()
        leases.forget_lingering()
        for unit in self.units:
            unit.core = elsewhere
            leases.forget(unit)
            unit.shown, unit.edited, unit.pins = False, False, 0
            unit.lent.clear()
        self.lending.lent.clear()
        self.lending.given.clear()
        with DisableTorchFunction():
            for s in self.segments:
                s.release()

    def is_of_a_parent(self) -> bool:
        """Whether this is a forked child of the process that has the engine."""
        return isinstance(self.core, forked.Elsewhere)

    def close(self) -> None:
        """Ends the core. The parameters stay NaN, and their hooks raise. Leases of living tensors stay valid. In a
        forked child nothing ends. The first error, or Ctrl-C, is raised after everything is released and the core has
        ended. If Ctrl-C interrupted it, a further call completes it."""
        if self.is_of_a_parent():
            return
        self.closed = self.why_closed
        failure: BaseException | None = None
        self.gradients.forget()
        try:
            for hook in self.gradient_hooks:
                hook.remove()
            for unit in self.units:
                showing.forget_unit(unit)
                unit.lent.clear()
                unit.pins = 0
                while unit.flat is not None:  # what Ctrl-C broke off is taken up again
                    try:
                        with DisableTorchFunction():
                            showing.retire(unit)
                    except BaseException as error:
                        failure = failure or error
            for s in self.segments:
                registry.pop(id(s.parameter), None)
        finally:
            self.core.close()
        if failure is not None:
            raise failure
