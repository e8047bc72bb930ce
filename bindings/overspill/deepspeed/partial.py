"""What stays as it was where a checkpoint is not loaded whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import moments, parts, state
from ..boundary import SchedulerState
from ..segments import registry

if TYPE_CHECKING:
    from .engine import DeepSpeedEngine


class Kept:
    """Made before the checkpoint is loaded; `restore` after it."""

    def __init__(self, engine: DeepSpeedEngine, with_states: bool, with_scheduler: bool):
        """Raises RuntimeError where the states that would have to stay are more than a beginning."""
        self.engine = engine
        optimizers: list[Any] = []
        if not with_states:
            several = isinstance(engine.optimizer, parts.Several)
            optimizers = list(engine.optimizer) if several else [engine.optimizer]
            if any(optimizer.groups.foreign or _updates(optimizer) for optimizer in optimizers):
                raise RuntimeError(
                    "overspill: load_checkpoint without the optimizer's states is not supported once the engine has "
                    "made updates, nor with an optimizer that runs its own code: make a new engine with one of "
                    "overspill.optim, and load into that"
                )
        self._numbers = [(each, each.hyper_parameters()) for each in optimizers]
        keeps = not with_scheduler and engine.lr_scheduler is not None
        self._scheduler = SchedulerState(engine.lr_scheduler, []) if keeps else None
        scaler = engine._residency.gradients.scaler
        self._course = None if with_states or scaler is None else scaler.course  # a part of the states
        # DeepSpeed restores no generator; here a load of the whole does, as a part of the run that goes on.
        self._random = None if with_states and with_scheduler else state.random_states()

    def restore(self) -> None:
        for optimizer, numbers in self._numbers:
            names = optimizer.groups.states()
            for group, segment in _segments(optimizer):
                moments.restart(segment, names, group)
            optimizer.restore_hyper_parameters(numbers)
        self.engine._residency.gradients.go_on(self._course, self.engine.last_step)
        if self._scheduler is not None:
            self._scheduler.restore()
        if self._random is not None:
            state.restore_random_states(self._random)


def _segments(optimizer: Any) -> list[tuple[dict[str, Any], Any]]:
    """Group and segment of each parameter that the engine updates."""
    return [
        (group, segment)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if (segment := registry.get(id(parameter))) is not None and segment.unit.trainable
    ]


def _updates(optimizer: Any) -> int:
    core = optimizer.residency.core
    return sum(core.updates_of(segment.unit.index, segment.index) for _, segment in _segments(optimizer))
