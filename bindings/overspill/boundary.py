"""What follows an update: a run's counts and a step of its scheduler. Ctrl-C may strike between the core's update and
these, or inside the scheduler; then the engine's next call completes them, once. The updating thread is alone
(calls.Alone) until then, so no other thread finds a boundary half done. Code that runs inside the update (hooks of its
optimizer, signal handlers) leaves the boundary open until the core has made the update."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch


def keep(results: list | deque, function: Callable, *arguments: Any) -> None:
    """Calls the function, and appends what it returns. Python delivers Ctrl-C where a call has returned, and the result
    would be lost; this one is in `results` by then."""
    results.extend(itertools.starmap(function, (arguments,)))


class SchedulerState:
    """A scheduler as it is now, and the groups that it drives."""

    def __init__(self, scheduler: Any, groups: Sequence[dict]):
        self.scheduler, self.groups = scheduler, groups
        self.values, self.names = scheduler.state_dict(), set(vars(scheduler))
        self.options = [
            {name: _copied(value) for name, value in group.items() if name != "params"} for group in groups
        ]

    def restore(self) -> None:
        for added in vars(self.scheduler).keys() - self.names:
            delattr(self.scheduler, added)
        self.scheduler.load_state_dict(dict(self.values))
        for group, options in zip(self.groups, self.options, strict=True):
            for name, value in options.items():
                if isinstance(group.get(name), torch.Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = value


class Boundary:
    """An update that an engine has begun. `micro_steps`, `global_steps`: the run's counts once it is made."""

    def __init__(self, core: Any, micro_steps: int, global_steps: int):
        self.micro_steps, self.global_steps = micro_steps, global_steps
        self._before = counts(core)
        self._stepped: list[Any] = []
        self._tried = False
        self._state: SchedulerState | None = None

    def is_made(self, core: Any) -> bool:
        """Skipped ones included."""
        return counts(core) != self._before

    def is_skipped(self, core: Any) -> bool:
        return counts(core)[1] != self._before[1]

    def make(self, update: Callable[[], Any]) -> None:
        update()

    def is_under_way(self) -> bool:
        """Whether the caller runs inside `make`, from a hook or a signal handler."""
        return self._calls(Boundary.make)

    def is_scheduling(self) -> bool:
        """Whether the caller runs inside the scheduler's step that began here."""
        return self._calls(Boundary.step_scheduler)

    def _calls(self, method: Callable) -> bool:
        """Whether that method of this object is on the stack of this thread. No flag says so, since Ctrl-C may keep
        whoever set one from taking it back."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and not (frame.f_code is method.__code__ and frame.f_locals["self"] is self):
            frame = frame.f_back
        return frame is not None

    def step_scheduler(self, scheduler: Any, groups: Sequence[dict]) -> None:
        """Steps the scheduler. May be called again if Ctrl-C interrupted it: a completed step is not repeated, half a
        step is undone first. A scheduler without a state_dict is not called again."""
        if self._stepped:
            return
        if not self._tried:
            self._state = _state_of(scheduler, groups)
            self._tried = True
        elif self._state is None:
            return
        else:
            self._state.restore()
        keep(self._stepped, scheduler.step)


def _state_of(scheduler: Any, groups: Sequence[dict]) -> SchedulerState | None:
    try:
        return SchedulerState(scheduler, groups)
    except Exception:  # of a class that nobody here knows: steps do not depend on its state_dict
        return None


def counts(core: Any) -> tuple[int, int]:
    """How many updates the core has made, and how many it has skipped."""
    stats = core.stats()
    return stats["step"], stats["skipped_steps"]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
