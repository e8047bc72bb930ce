"""`optimizer.state` of an optimizer that the engine updates, as torch has it: by parameter, then by name.

The states live in the engine. What a script looks at is a copy (copies.py): what it writes there, or assigns, is the
state before anything else uses it, and after a step it shows what the step made of it. Tensors are fp32, whatever
format holds the states.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction

from . import calls, momenta, moments, reading
from .boundary import counts
from .copies import Copies
from .parts import Part
from .ranks import RankError
from .residency import Residency
from .segments import Segment, registry


class States(MutableMapping):
    """`groups`: the optimizer's, as they are at any time. `names`: the core's names of the states -> torch's. `ranks`:
    that hold parts of them; of several, all but the optimizer's own calls raise RankError. `part`: what the optimizer
    trains, one of several."""

    def __init__(
        self,
        groups: list[dict],
        names: Mapping[str, str],
        residency: Residency,
        ranks: int,
        part: Part | None = None,
    ):
        self.groups, self.residency, self.ranks, self.part = groups, residency, ranks, part
        self.names = {theirs: ours for ours, theirs in names.items()}
        # As in torch, whose SGD counts no steps, and whose NAdam keeps what follows from their number.
        self.counted = () if set(self.names) <= {"momentum_buffer"} else ("step",)
        if momenta.has(groups[0]):
            self.counted = moments.SCALARS
        self.copies = Copies(_as_held, self._take, self._give)
        self._seen = counts(residency.core)  # the updates that copies show
        self._others: dict[Any, dict] = {}  # of parameters that the engine does not train
        self._given: weakref.WeakValueDictionary[Segment, StateOf] = weakref.WeakValueDictionary()
        self._begun: set[Segment] = set()  # given by the script, and not updated since
        self._is_replaced = False

    # ---- as a dict

    def __getitem__(self, parameter: nn.Parameter) -> MutableMapping:
        segment = self._segment(parameter)
        if segment is None:
            return self._others.setdefault(parameter, {})
        given = self._given.get(segment)
        if given is None:
            given = self._given[segment] = StateOf(self, segment)
        return given

    def get(self, parameter: nn.Parameter, default: Any = None) -> Any:
        if parameter not in self:
            return default
        return self[parameter]

    def pop(self, parameter: nn.Parameter, *default: Any) -> Any:
        if parameter not in self and default:
            return default[0]
        found = self[parameter]
        del self[parameter]
        return found

    def setdefault(self, parameter: nn.Parameter, default: Any = None) -> Any:
        if parameter not in self:
            self[parameter] = {} if default is None else default
        return self[parameter]

    def __setitem__(self, parameter: nn.Parameter, state: Mapping) -> None:
        segment = self._segment(parameter)
        if segment is None:
            self._others[parameter] = dict(state)
            return
        values = self._checked(parameter, state)
        self._throw_away(segment)
        self[parameter].update(values)

    def _checked(self, parameter: nn.Parameter, state: Mapping) -> dict:
        """The step first, of which NAdam's product has to be."""
        segment, values = (
            self._segment(parameter),
            dict(sorted(state.items(), key=lambda item: item[0] != "step")),
        )
        for name, value in values.items() if segment is not None else ():
            self.check(segment, name, value, values.get("step"))
        return values

    def __delitem__(self, parameter: nn.Parameter) -> None:
        segment = self._segment(parameter)
        if segment is None:
            del self._others[parameter]
        elif self.has(segment):
            self._throw_away(segment)
        else:
            raise KeyError(parameter)

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter([*(s.parameter for s in self._segments() if self.has(s)), *self._others])

    def __len__(self) -> int:
        return sum(map(self.has, self._segments())) + len(self._others)

    def __contains__(self, parameter: object) -> bool:
        segment = self._segment(parameter)
        return parameter in self._others if segment is None else self.has(segment)

    def clear(self) -> None:
        for segment in self._segments():
            self._throw_away(segment)
        self._others.clear()

    def __repr__(self) -> str:
        return repr({parameter: dict(self[parameter]) for parameter in self})

    def __deepcopy__(self, memo: dict) -> dict:
        return copy.deepcopy({parameter: dict(self[parameter]) for parameter in self}, memo)

    def __reduce__(self) -> Any:
        return _pickled({parameter: dict(self[parameter]) for parameter in self})

    def replaced(self, states: Mapping) -> States:
        """`optimizer.state = states`: the ones that take the place of these."""
        given = {parameter: self._checked(parameter, state) for parameter, state in states.items()}
        self.clear()
        names = {ours: theirs for theirs, ours in self.names.items()}
        new = States(self.groups, names, self.residency, self.ranks, self.part)
        new.update(given)
        self._is_replaced = True
        return new

    def _throw_away(self, segment: Segment) -> None:
        """What the script has of the parameter's dict is its own, with the tensors that are there."""
        given = self._given.pop(segment, None)
        if given is not None:
            given.leave()
        self.restart(segment)

    # ---- what the optimizer does with them; inside calls.Alone

    def settle(self) -> None:
        """The engine has what the script wrote."""
        now = counts(self.residency.core)
        if self.copies:
            with DisableTorchFunction():
                if self._seen == now:
                    self.copies.settle_all()
                else:  # Ctrl-C has kept an update from telling
                    self.copies.renew_all()
        self._seen = now

    def keep(self, parameter: nn.Parameter, state: dict) -> None:
        """The state of a parameter that the engine does not train."""
        self._others[parameter] = state

    def begin(self, segments: Iterable[Segment]) -> None:
        """They have states, though they may never have been updated."""
        self._begun.update(segments)

    def others(self) -> dict[Any, dict]:
        return self._others

    def updated(self) -> None:
        """Scripts see what an update has made of them."""
        if self.copies:
            with DisableTorchFunction():
                self.copies.renew_all()
        self._seen = counts(self.residency.core)

    def leave(self) -> None:
        for given in list(self._given.values()):
            given.leave()
        self._given.clear()

    def forget(self) -> None:
        """States are others now: what scripts have of those of before is their own."""
        self.copies.clear()
        self._begun.clear()
        self._seen = counts(self.residency.core)

    # ---- for StateOf

    def has(self, segment: Segment) -> bool:
        """As torch has them: from the first update on; Adagrad's from the beginning."""
        self.require()
        return self.has_begun(segment)

    def has_begun(self, segment: Segment) -> bool:
        """`has`, with several ranks too, of which each knows it."""
        return bool(self.names) and (
            "sum" in self.names or segment in self._begun or self._updates(segment) > 0
        )

    def require(self) -> None:
        if self._is_replaced:
            raise RuntimeError(
                "overspill: this optimizer.state was replaced by another, and the engine holds one set of states: take "
                "copy.deepcopy(optimizer.state) before you assign optimizer.state"
            )
        if self.residency.closed:
            raise RuntimeError(f"overspill: {self.residency.closed}")
        if self.ranks > 1:
            raise RankError(
                f"overspill: optimizer.state: {self.ranks} ranks hold parts of the states: call "
                "engine.optimizer_state(parameter) on all of them"
            )

    def names_of(self, segment: Segment) -> tuple[str, ...]:
        """The states that there are; none before the first update."""
        return (*self.counted, *self.names) if self.has(segment) else ()

    def read(self, segment: Segment, name: str) -> torch.Tensor:
        key = segment, name
        with calls.Alone(), DisableTorchFunction():
            self.settle()
            found = self.copies.get(key)
            if found is None:
                found = self.fetch(segment, name)
                self.copies.keep(key, found, found)
            return found

    def write(self, segment: Segment, name: str, value: Any) -> None:
        self.check(segment, name, value)
        if value is None:
            return self.restart(segment)
        key = segment, name
        if id(value) in registry:  # a parameter, which may be released
            value = reading.weight(registry[id(value)])
        elif self.copies.get(key) is not value and self.copies.has(value):  # the engine has one for each
            value = value.clone()
        with calls.Alone(), torch.inference_mode(False), DisableTorchFunction():
            calls.refuse_update(self.residency, "a write into optimizer.state")
            self.settle()
            self.copies.drop(key)
            tensor = value if isinstance(value, torch.Tensor) else momenta.scalar(float(value))
            if name != momenta.NAME:  # which `check` has looked at
                self._take(key, _as_held(key, tensor))
            if not self.counted and not self.has(segment):  # SGD: as after a step
                self._set_updates(segment, 1)
            self._begun.add(segment)
            self.copies.keep(key, tensor, tensor)

    def restart(self, segment: Segment) -> None:
        """As before the first update."""
        self.require()
        with calls.Alone(), torch.inference_mode(False), DisableTorchFunction():
            calls.refuse_update(self.residency, "a write into optimizer.state")
            self.settle()
            for name in (*self.counted, *self.names):
                self.copies.drop((segment, name))
            if self.has(segment):
                moments.restart(segment, self.names.values(), self._group_of(segment))
            self._begun.discard(segment)

    def check(self, segment: Segment, name: str, value: Any, step: Any = None) -> None:
        """Raises ValueError for what is no state of the parameter. `step`: what comes with it; None: as it is."""
        self.require()
        names = (*self.counted, *self.names) if self.names else ()
        said = f"overspill: optimizer.state[p][{name!r}] of {segment.name}"
        if name not in names:
            raise ValueError(
                f"{said}: the engine's update has {', '.join(names) or 'no states'}; keep what is yours in a dict of "
                "your own"
            )
        if name == "step":
            moments.count_of(float(value), segment.name)
        elif name == momenta.NAME:
            updates = self._updates(segment) if step is None else moments.count_of(float(step), segment.name)
            momenta.check(self._group_of(segment), updates, value, segment.name)
        elif value is None and names == ("momentum_buffer",):
            return  # torch's SGD starts it anew
        elif not isinstance(value, torch.Tensor) or value.shape != segment.shape:
            what = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(f"{said} is {tuple(segment.shape)}, not {what}")
        elif torch._debug_has_internal_overlap(value) == 1:
            raise ValueError(
                f"{said}: elements of this tensor share memory (expand), and a step writes into each: give "
                "value.clone()"
            )

    def fetch(self, segment: Segment, name: str) -> torch.Tensor:
        if name == "step":
            return momenta.scalar(float(self._updates(segment)))
        if name == momenta.NAME:
            return momenta.following(self._group_of(segment), self._updates(segment))[name]
        return reading.state(segment, self.names[name])

    def _segment(self, parameter: Any) -> Segment | None:
        segment = registry.get(id(parameter))
        if segment is None or segment.unit.residency is not self.residency or not segment.unit.trainable:
            self.require()
            return None
        return segment if self.part is None or self.part.has(segment) else None

    def _segments(self) -> list[Segment]:
        self.require()
        found = [registry.get(id(p)) for group in self.groups for p in group["params"]]
        return [s for s in found if s is not None and s.unit.trainable]

    def _take(self, key: tuple[Segment, str], held: torch.Tensor) -> None:
        segment, name = key
        if name == momenta.NAME:  # nothing holds it; what was written in place is looked at here
            momenta.check(self._group_of(segment), self._updates(segment), held, segment.name)
            return
        if name != "step":
            moments.write(segment, self.names[name], held.as_strided(segment.shape, segment.stride))
            return
        self._set_updates(segment, moments.count_of(held.item(), segment.name))

    def _group_of(self, segment: Segment) -> dict:
        return next(g for g in self.groups if any(p is segment.parameter for p in g["params"]))

    def _updates(self, segment: Segment) -> int:
        return self.residency.core.updates_of(segment.unit.index, segment.index)

    def _set_updates(self, segment: Segment, count: int) -> None:
        self.residency.core.set_updates_of(segment.unit.index, segment.index, count)

    def _give(self, key: tuple[Segment, str], tensor: torch.Tensor) -> bool:
        segment, name = key
        if not self.has(segment) or torch._debug_has_internal_overlap(tensor) == 1:
            return False
        tensor.detach().copy_(self.fetch(segment, name))
        return True


class _There(MutableMapping):
    """The states of one parameter that the engine has. It has the names that torch's optimizer of the class gives
    states, and no others."""

    def __init__(self, states: States, segment: Segment):
        self._states, self._segment = states, segment

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._states.names_of(self._segment):
            raise KeyError(name)
        return self._states.read(self._segment, name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._states.write(self._segment, name, value)

    def __delitem__(self, name: str) -> None:
        raise ValueError(
            f"overspill: del optimizer.state[p][{name!r}] of {self._segment.name}: the engine has all states of a "
            "parameter, or none: optimizer.state[p].clear() starts them anew"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._states.names_of(self._segment))

    def __len__(self) -> int:
        return len(self._states.names_of(self._segment))

    def clear(self) -> None:
        self._states.restart(self._segment)


class StateOf(MutableMapping):
    """What a script has as `optimizer.state[p]`: the states that the engine has, and a dict of the script's own once
    those were thrown away."""

    def __init__(self, states: States, segment: Segment):
        self._entries: MutableMapping = _There(states, segment)

    def leave(self) -> None:
        self._entries = dict(self._entries)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._entries[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._entries[name] = value

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        self._entries.clear()

    def copy(self) -> dict:
        return dict(self)

    __copy__ = copy

    def __deepcopy__(self, memo: dict) -> dict:
        return copy.deepcopy(dict(self), memo)

    def __reduce__(self) -> Any:
        return _pickled(dict(self))

    def __ior__(self, other: Mapping) -> StateOf:
        self.update(other)
        return self

    def __repr__(self) -> str:
        return repr(dict(self))


def _pickled(entries: dict) -> Any:
    """As a dict that torch.load opens without a permission of its own."""
    return OrderedDict, (), None, None, iter(entries.items())


def _as_held(key: tuple[Segment, str], tensor: torch.Tensor) -> torch.Tensor:
    segment, name = key
    if name in moments.SCALARS:
        return tensor.detach().to("cpu", torch.float32).reshape(1)
    return moments.as_held(tensor, torch.float32, segment)
