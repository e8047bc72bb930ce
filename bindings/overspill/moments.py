"""The optimizer's states in the layout of torch's state_dict: out of the engine and back, one tensor at a time.

    {"state": {number: {"step", "exp_avg", "exp_avg_sq", "master"}}, "param_groups": [{..., "params": [number, ...]}]}

Parameters are numbered in the order of the groups. Tensors are fp32 and on the CPU, whatever format holds the states;
`master`, of bf16 and fp16 weights alone, is the fp32 value of which the weight is the rounded one. A parameter that was
never updated has no entry (Adagrad's has: it starts with sums). Reading is exact in every format, so what was read
comes back bit for bit; values of another origin are rounded to the nearest that the engine's format has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunction

from . import files, momenta, reading, showing
from .residency import Residency
from .segments import Segment, registry

_PIECE = 1 << 20  # elements of a master that are compared at a time
_STEPS = 2**53  # below it a step, which torch keeps as a float, is exact
MASTER = "master"
SCALARS = ("step", momenta.NAME)  # of a parameter; they follow from its number of updates


def states_of(
    groups: Sequence[dict],
    names: Mapping[str, str],
    residency: Residency,
    folder: str,
    has: Callable[[Segment], bool],
) -> dict[int, dict]:
    """The "state" of a state_dict, of the parameters that `has` states. `names`: the core's names of the states ->
    torch's. Large tensors lie in files without a name in `folder`, so that the kernel may write them out: host memory
    grows with the largest one alone. Raises OSError where the folder has no room."""
    found: dict[int, dict] = {}
    with torch.inference_mode(False), DisableTorchFunction():
        owners = [group for group in groups for _ in group["params"]]
        for number, segment in enumerate(_segments(groups)):
            if segment is None:
                continue
            unit = segment.unit
            updates = residency.core.updates_of(unit.index, segment.index)
            if not (updates or has(segment)):
                continue
            entry = found[number] = {"step": momenta.scalar(float(updates))}
            entry |= momenta.following(owners[number], updates)
            for ours, theirs in names.items():
                out = entry[theirs] = _room(segment, folder)
                residency.core.read_state(unit.index, segment.index, ours, out.data_ptr(), out.numel() * 4)
            if unit.dtype is not torch.float32:
                entry["master"] = _room(segment, folder)
                reading.read(segment, entry["master"])
    return found


class Loading:
    """The "state" of a state_dict for the parameters of `groups`: looked through by `check`, which changes nothing,
    then taken over by `apply`."""

    def __init__(self, groups: Sequence[dict], names: Mapping[str, str], residency: Residency, state: dict):
        self.groups, self.names, self.residency = groups, names, residency
        self.segments = list(_segments(groups))
        self.entries = {number: present(entry) for number, entry in state.items()}
        for number, entry in self.entries.items():
            if number in range(len(self.segments)):
                self.entries[number] = with_buffer(entry, names, self._group_of(number))

    def check(self) -> None:
        """Raises ValueError that names the parameter and what is wrong."""
        known = {n: s for n, s in enumerate(self.segments) if s is not None}
        strange = [n for n, entry in self.entries.items() if entry and n not in known]
        if strange:
            raise ValueError(
                f"overspill: the state dict has states of parameter {strange[0]!r}, and there is no such trainable "
                "parameter here: it belongs to another model"
            )
        if self.names and not any(self.entries.values()) and any(map(self._updates, known.values())):
            raise ValueError(
                "overspill: the state dict has no states, and this optimizer has made updates: loading it would set "
                "its moments to zero. To start without moments, make a new engine"
            )
        for number, segment in known.items():
            entry = self.entries.get(number)
            if entry:
                check_entry(segment.name, segment.shape, entry, self.names, self._group_of(number))
                if MASTER in entry and segment.unit.dtype is not torch.float32:
                    self._check_master(segment, entry[MASTER])

    def _check_master(self, segment: Segment, master: torch.Tensor) -> None:
        """The weights that the model has now must be the master's, rounded: else it would replace them unasked."""
        if not is_rounded(reading.weight(segment), master):
            raise ValueError(
                f"overspill: the state dict has the fp32 master of other weights than {segment.name} has now: load "
                "the model's state_dict of the same moment first, then the optimizer's"
            )

    def apply(self) -> None:
        """Tensor by tensor. A parameter without an entry starts anew, as in torch."""
        with torch.inference_mode(False), DisableTorchFunction():
            showing.settle_all(self.residency)
            for number, segment in enumerate(self.segments):
                if segment is None:
                    continue
                entry = self.entries.get(number)
                if entry:
                    self._take(segment, entry)
                elif self._updates(segment):
                    restart(segment, self.names, self._group_of(number))
        self.residency.refresh()

    def _take(self, segment: Segment, entry: dict) -> None:
        unit, core = segment.unit, self.residency.core
        for ours, theirs in self.names.items():
            write(segment, ours, entry[theirs])
        core.set_updates_of(unit.index, segment.index, int(_step_of(entry)))
        if "master" in entry and unit.dtype is not torch.float32:
            flat = as_held(entry["master"], torch.float32, segment)
            core.load_weight(unit.index, segment.index, flat.data_ptr(), flat.numel() * 4, "F32")

    def _updates(self, segment: Segment) -> int:
        return self.residency.core.updates_of(segment.unit.index, segment.index)

    def _group_of(self, number: int) -> dict:
        for group in self.groups:
            if number < len(group["params"]):
                return group
            number -= len(group["params"])
        raise IndexError(number)


def check_entry(name: str, shape: Sequence[int], entry: dict, names: Mapping[str, str], group: dict) -> None:
    """Raises ValueError where this is no state of that parameter, of that group. `names`: the core's names of the
    states -> torch's."""
    derived = {momenta.NAME} if momenta.has(group) else set()
    given, expected = set(entry) - {"step", MASTER}, set(names.values()) | derived
    if given != expected:
        raise ValueError(
            f"overspill: the state dict has {_listed(given)} of {name}, this optimizer has {_listed(expected)}: "
            "another optimizer made it; give initialize that one"
        )
    if "step" not in entry and expected != {"momentum_buffer"}:
        raise ValueError(
            f'overspill: the state dict has no "step" of {name}, which counts its updates: add it, or load what this '
            "optimizer's state_dict gave"
        )
    updates = count_of(_step_of(entry), name, entry.get("step"))
    if derived:
        momenta.check(group, updates, entry[momenta.NAME], name)
    for state, value in entry.items():
        if state not in SCALARS and (
            not isinstance(value, torch.Tensor) or tuple(value.shape) != tuple(shape)
        ):
            what = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(
                f"overspill: {state} of {name} is {what} in the state dict, {tuple(shape)} here: the state dict "
                "belongs to another model, or is damaged"
            )


def is_rounded(weight: torch.Tensor, master: torch.Tensor) -> bool:
    """Whether the weight is the fp32 master as the engine rounds it: to the nearest, ties away from zero in bf16, to
    even in fp16."""
    with DisableTorchFunction():
        if master.dtype is not torch.float32 or master.shape != weight.shape:
            return False
        bits = weight.detach().cpu().contiguous().view(-1).view(torch.int16)
        values = master.detach().cpu().contiguous().view(-1).view(torch.int32)
        return all(
            torch.equal(_rounded(values[at : at + _PIECE], weight.dtype), bits[at : at + _PIECE])
            for at in range(0, len(bits), _PIECE)
        )


def _rounded(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bits of fp32 values as those of the engine's weights."""
    if dtype is torch.float16:
        return bits.view(torch.float32).to(dtype).view(torch.int16)
    return ((bits + 0x8000) >> 16).to(torch.int16)


def write(segment: Segment, name: str, value: torch.Tensor) -> None:
    """The value becomes a state, by the core's name."""
    flat, unit = as_held(value, torch.float32, segment), segment.unit
    unit.core.write_state(unit.index, segment.index, name, flat.data_ptr(), flat.numel() * 4)


def restart(segment: Segment, names: Iterable[str], group: dict) -> None:
    """States, by the core's names, as before the first update."""
    start = float(group.get("initial_accumulator_value", 0.0))
    for name in names:
        write(segment, name, torch.full(tuple(segment.shape), start))
    segment.unit.core.set_updates_of(segment.unit.index, segment.index, 0)


def count_of(step: float, name: str, given: Any = None) -> int:
    """Raises ValueError that names what was `given` where `step`, which it was read as, is no count of updates."""
    if not (math.isfinite(step) and 0 <= step < _STEPS and step == int(step)):
        raise ValueError(
            f"overspill: step = {step if given is None else given!r:.60} of {name} is not a count of updates; "
            "a whole number from 0 on, below 2**53, is expected"
        )
    return int(step)


def names_of(group: dict) -> list[str | None]:
    """The parameters' names in the model; None for what the engine does not hold."""
    return [segment.name if segment else None for segment in map(registry.get, map(id, group["params"]))]


def _segments(groups: Sequence[dict]) -> list[Segment | None]:
    """Of each parameter of the groups; None where it has no states."""
    found = [registry.get(id(parameter)) for group in groups for parameter in group["params"]]
    return [s if s is not None and s.unit.trainable else None for s in found]


def present(entry: Any) -> dict:
    if not isinstance(entry, Mapping):
        raise ValueError(
            f"overspill: a state dict has a dict of states for each parameter, this one a {type(entry).__name__}"
        )
    return {name: value for name, value in entry.items() if value is not None}


def with_buffer(entry: dict, names: Mapping[str, str], group: dict) -> dict:
    """RMSprop's states as the engine holds them: where one group has a momentum, all have a buffer, which torch has not
    in a group without one; and what is left of a momentum that is gone is dropped."""
    held = set(names.values())
    if "square_avg" not in held or "square_avg" not in entry:
        return entry
    if "momentum_buffer" not in held:
        return {name: value for name, value in entry.items() if name != "momentum_buffer"}
    if "momentum_buffer" not in entry and "momentum" in group and not float(group["momentum"]):
        return entry | {"momentum_buffer": torch.zeros_like(entry["square_avg"])}
    return entry


def _step_of(entry: dict) -> float:
    """NaN where it is no number. SGD's states have none; its updates do not depend on it."""
    return number(entry.get("step", 1))


def number(value: Any) -> float:
    """NaN for what is no number, nor a tensor of one."""
    try:
        return float(value)
    except (
        TypeError,
        ValueError,
        OverflowError,
        RuntimeError,
    ):  # of a tensor with several elements, RuntimeError
        return math.nan


def _listed(names: set) -> str:
    return ", ".join(sorted(map(str, names))) or "no states"


def as_held(value: torch.Tensor, dtype: torch.dtype, segment: Segment) -> torch.Tensor:
    """The elements in the order in which the engine holds them; a copy only where they are not so already."""
    with DisableTorchFunction():
        if value.dtype is not dtype or value.device.type != "cpu" or value.stride() != segment.stride:
            value = torch.empty_strided(segment.shape, segment.stride, dtype=dtype).copy_(value.detach())
        return value.detach().as_strided((value.numel(),), (1,))


def _room(segment: Segment, folder: str) -> torch.Tensor:
    """An fp32 tensor of the segment's shape and memory order."""
    return files.tensor(
        segment.shape,
        segment.stride,
        torch.float32,
        folder,
        f"optimizer.state_dict() keeps states of {segment.name}",
        "free space there, or use engine.save_checkpoint, which needs none of it",
    )
