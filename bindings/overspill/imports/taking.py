"""An engine takes over a checkpoint that another system wrote: looked through first, which changes nothing, then taken
tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunction

from .. import moments, parts, reading, showing, state
from .._core import CheckpointError
from ..extra import load_scheduler
from ..pretrained import some
from ..segments import Segment
from .found import WEIGHT, Checkpoint, Parameter
from .torch_file import Tensor

if TYPE_CHECKING:
    from ..engine import Engine

# Hyper-parameters of a group that go on as they were; which parameters it has is the script's to say.
_HYPER = ("lr", "betas", "eps", "weight_decay", "momentum", "initial_lr")


class Taking:
    """`check` comes first. All ranks do all of it, each reads all of the checkpoint."""

    def __init__(self, engine: Engine, found: Checkpoint):
        parts.require_one(
            engine.optimizer, "engine.load_checkpoint of parts, or of another system's checkpoint,"
        )
        self.engine, self.found = engine, found
        groups = engine.optimizer.groups
        self.names: Mapping[str, str] = {} if groups.foreign else groups.states()  # the core's -> torch's
        self.trained: list[tuple[Segment, Parameter]] = []
        self.frozen: list[tuple[Segment, Callable[[], torch.Tensor]]] = []
        self.buffers = state.persistent_buffers(engine.module)
        self.values: dict[str, torch.Tensor] = {}  # of the buffers
        self.hyper: list[dict[str, Any]] = []  # by group

    def refuse(self, why: str) -> CheckpointError:
        return CheckpointError(f"overspill: {self.found.folder}: {why}; nothing was changed")

    def check(self) -> None:
        """Raises CheckpointError where it is of another model, of another optimizer or with another scheduler."""
        for unit in self.engine._residency.units:
            if unit.packing is not None or unit.trained_by_torch:
                held = "in fewer bits" if unit.packing is not None else "in float64"
                raise self.refuse(
                    f"{unit.segments[0].name} is held {held} here, and weights of parts, or of another system's "
                    "checkpoint, cannot be given to it: make the engine over bf16 or fp32 weights"
                )
        if self.engine.optimizer.groups.foreign:
            raise self.refuse(
                f"this engine's optimizer, {self.engine.optimizer.groups.foreign}, keeps its own states, and those of "
                "parts, or of a checkpoint of another system, cannot be given to it: give initialize AdamW, or "
                "another one of the engine's own"
            )
        taken: set[str] = set()
        for segment in self.segments():
            taken |= self.match(segment)
        strange = sorted((set(self.found.trained) | set(self.found.rest)) - taken - set(self.buffers))
        if strange:
            raise self.refuse(f"it has {some(strange)}, and this model has not: it is of another model")
        missing = sorted(set(self.buffers) - set(self.found.rest))
        if missing:
            raise self.refuse(f"it lacks {some(missing)}, which this model has: it is of another model")
        for name, buffer in self.buffers.items():
            shape, read = self.found.rest[name]
            if shape != tuple(buffer.shape):
                raise self.refuse(f"buffer {name} has shape {shape} there, {tuple(buffer.shape)} here")
            self.values[name] = read()
        self.check_scheduler()
        self.hyper = [
            self.hyper_of(number, group) for number, group in enumerate(self.engine.optimizer.param_groups)
        ]

    def hyper_of(self, number: int, group: dict[str, Any]) -> dict[str, Any]:
        """What a group here takes over: what its parameters had there, all of them the same."""
        of = {id(segment.parameter): parameter for segment, parameter in self.trained}
        each = [of[id(p)] for p in group["params"] if id(p) in of]
        found: dict[str, Any] = {}
        for name in _HYPER:
            values = [_plain(parameter.hyper[name]) for parameter in each if name in parameter.hyper]
            if name in group and values:
                found[name] = values[0]
                if any(value != values[0] for value in values):
                    raise self.refuse(
                        f"parameters that are in one group here, group {number}, had different values of {name} there: "
                        "give initialize the groups that it was saved with"
                    )
        try:
            self.engine.optimizer.groups.hyper_parameters(group | found, number)
        except (TypeError, ValueError) as error:
            raise self.refuse(f"its hyper-parameters are none that a step could use ({error})") from None
        return found

    def segments(self) -> Iterator[Segment]:
        for unit in self.engine._residency.units:
            yield from unit.segments

    def match(self, segment: Segment) -> set[str]:
        """Finds what is there of the parameter. Returns the names that it has taken."""
        names = {
            *segment.names,
            *(self.found.aliases[name] for name in segment.names if name in self.found.aliases),
        }
        parameter = next((self.found.trained[name] for name in names if name in self.found.trained), None)
        if segment.unit.trainable:
            if parameter is None:
                raise self.refuse(
                    f"it has no states of {segment.name}, which is trained here: freeze it with requires_grad_(False), "
                    "or open a checkpoint of the same model"
                )
            self.check_states(segment, parameter)
            self.trained.append((segment, parameter))
            shape = parameter.shape
        elif parameter is not None:
            self.frozen.append((segment, lambda: parameter.read(WEIGHT)))
            shape = parameter.shape
        else:
            read = next((self.found.rest[name] for name in names if name in self.found.rest), None)
            if read is None:
                raise self.refuse(f"it lacks {segment.name}, which this model has: it is of another model")
            shape = read[0]
            self.frozen.append((segment, read[1]))
        if tuple(segment.shape) != tuple(shape):
            raise self.refuse(f"{segment.name} has shape {tuple(shape)} there, {tuple(segment.shape)} here")
        return names

    def check_states(self, segment: Segment, parameter: Parameter) -> None:
        if set(parameter.states) != set(self.names.values()):
            raise self.refuse(
                f"it has {some(sorted(parameter.states))} of {segment.name}, this optimizer has "
                f"{some(sorted(self.names.values()))}: another optimizer made it; give initialize that one"
            )

    def check_scheduler(self) -> None:
        scheduler, there = self.engine.lr_scheduler, self.found.lr_scheduler
        here = {} if scheduler is None else scheduler.state_dict()
        if scheduler is not None and (not isinstance(there, Mapping) or set(there) != set(here)):
            names = sorted(map(str, there)) if isinstance(there, Mapping) else ["nothing"]
            raise self.refuse(
                f"it has {some(names)} of a scheduler, {type(scheduler).__name__} has {some(sorted(here))}: give "
                "initialize the scheduler that it was saved with, or none"
            )

    def restore_scheduler(self, scheduler: Any) -> None:
        """As Extra.restore_scheduler."""
        load_scheduler(self.found.folder, scheduler, dict(self.found.lr_scheduler))

    def apply(self) -> None:
        """Returns when all weights, states and hyper-parameters are the checkpoint's. An engine that has taken a part
        of them over is closed."""
        try:
            self.write_all()
        except Exception as error:
            self.engine.close()
            raise CheckpointError(
                f"overspill: {self.found.folder} was taken over in part ({error}). The engine is closed, since its "
                "weights are of two checkpoints: make a new one"
            ) from error
        for group, saved in zip(self.engine.optimizer.param_groups, self.hyper, strict=True):
            group.update(saved)

    def write_all(self) -> None:
        core = self.engine._core
        with torch.inference_mode(False), DisableTorchFunction():
            showing.settle_all(self.engine._residency)
            showing.forget()
            for segment, parameter in self.trained:
                self.write(segment, parameter.read(WEIGHT), torch.float32)
                for ours, theirs in self.names.items():
                    moments.write(segment, ours, parameter.read(theirs))
                core.set_updates_of(segment.unit.index, segment.index, parameter.step)
            for segment, read in self.frozen:
                self.write(segment, read(), segment.unit.dtype)

    def write(self, segment: Segment, value: torch.Tensor, dtype: torch.dtype) -> None:
        flat, unit = moments.as_held(value, dtype, segment), segment.unit
        size = flat.numel() * flat.element_size()
        self.engine._core.load_weight(unit.index, segment.index, flat.data_ptr(), size, reading.DTYPES[dtype])


def _plain(value: Any) -> Any:
    """A number, or numbers, as a group here has them."""
    if isinstance(value, Tensor):
        value = value.read()
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else tuple(value.tolist())
    return tuple(value) if isinstance(value, (list, tuple)) else value
