"""DeepSpeed's learning rate schedules: the same names, arguments, defaults and rates as its `runtime/lr_schedules.py`.

A schedule sets the rate when it is made, and at each `step` after an update. `last_batch_iteration` counts the steps
from 0; -1 is before the first. As there, the rate of iteration 0 counts for the second update.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from .. import given

Rates = float | Sequence[float]
_SECOND_BETA = 0.99  # what OneCycle sets there, whatever the optimizer has


def _of_each_group(optimizer: Any, value: Any, name: str) -> list[Any]:
    """One value for each parameter group."""
    count = len(optimizer.param_groups)
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} values, and the optimizer has {count} parameter groups")
    return list(value)


def _positive(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} = {value!r}: a whole number from 1 is expected")
    return value


class Schedule(ABC):
    """What the schedules share. `optimizer` has `param_groups`."""

    def __init__(self, optimizer: Any, last_batch_iteration: int):
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        if last_batch_iteration == -1:
            self._set(self.first_lr())

    def first_lr(self) -> list[float]:
        """Before the first step, one rate for each parameter group."""
        return self.get_lr()

    @abstractmethod
    def get_lr(self) -> list[float]:
        """At `last_batch_iteration`, one rate for each parameter group."""

    def get_last_lr(self) -> list[float]:
        """The rates that the optimizer has now."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Goes on to the next iteration, or to the one that is named, and sets its rates."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._set(self.get_lr())

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the iteration; the rates are the optimizer's, until the next step."""
        self.last_batch_iteration = state["last_batch_iteration"]

    def _set(self, rates: list[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


class LRRangeTest(Schedule):
    """Rises from a smallest rate, by lr_range_test_step_rate of it every lr_range_test_step_size steps, to find the
    largest rate that trains (Smith 2018, arXiv 1803.09820)."""

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ):
        self.min_lr = _of_each_group(optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = _positive(lr_range_test_step_size, "lr_range_test_step_size")
        self.step_rate, self.staircase = lr_range_test_step_rate, lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def first_lr(self) -> list[float]:
        return self.min_lr

    def get_lr(self) -> list[float]:
        steps = float(self.last_batch_iteration + 1) / self.step_size
        rise = 1 + self.step_rate * (math.floor(steps) if self.staircase else steps)
        return [least * rise for least in self.min_lr]


class OneCycle(Schedule):
    """Up from cycle_min_lr to cycle_max_lr and down again, the first of betas the other way, then decay (Smith 2018,
    arXiv 1803.09820)."""

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rates = 0.8,
        cycle_max_mom: Rates = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ):
        first = float(cycle_first_step_size)
        second = first if cycle_second_step_size is None else float(cycle_second_step_size)
        if first <= 0 or second < 0:
            raise ValueError(
                f"cycle_first_step_size = {first:g} has to be above 0, cycle_second_step_size = {second:g} not below"
            )
        self.first_step_size, self.second_step_size = first, second
        self.total_size = first + second
        self.first_stairs = cycle_first_stair_count
        self.second_stairs = (
            cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        )
        self.lr_decay = 0.0 if decay_step_size == 0 else decay_lr_rate / decay_step_size  # a step
        self.mom_decay = 0.0 if decay_step_size == 0 else decay_mom_rate / decay_step_size
        self.min_lrs = _of_each_group(optimizer, cycle_min_lr, "cycle_min_lr")
        self.max_lrs = _of_each_group(optimizer, cycle_max_lr, "cycle_max_lr")
        self.cycle_momentum = cycle_momentum and all("betas" in group for group in optimizer.param_groups)
        if cycle_momentum and not self.cycle_momentum:
            warnings.warn(
                "overspill: OneCycle: cycle_momentum does nothing, since the optimizer has no betas",
                stacklevel=2,
            )
        self.min_moms = _of_each_group(optimizer, cycle_min_mom, "cycle_min_mom")
        self.max_moms = _of_each_group(optimizer, cycle_max_mom, "cycle_max_mom")
        super().__init__(optimizer, last_batch_iteration)
        if self.cycle_momentum and last_batch_iteration == -1:
            self._set_moms(self.min_moms)

    def first_lr(self) -> list[float]:
        return self.min_lrs

    def step(self, last_batch_iteration: int | None = None) -> None:
        super().step(last_batch_iteration)
        if self.cycle_momentum:
            self._set_moms(self._moms())

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < self.total_size:
            height = self._height()
            return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        return [low / (1 + self.lr_decay * self._after_cycle()) for low in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas at `last_batch_iteration`, for each parameter group; None where they do not cycle."""
        if not self.cycle_momentum:
            return None
        return [(mom, _SECOND_BETA) for mom in self._moms()]

    def _moms(self) -> list[float]:
        if self.last_batch_iteration < self.total_size:
            height = self._height()
            return [
                high - (high - low) * height for low, high in zip(self.min_moms, self.max_moms, strict=True)
            ]
        return [high * (1 + self.mom_decay * self._after_cycle()) for high in self.max_moms]

    def _set_moms(self, moms: list[float]) -> None:
        for group, mom in zip(self.optimizer.param_groups, moms, strict=True):
            group["betas"] = (mom, _SECOND_BETA)

    def _after_cycle(self) -> float:
        return self.last_batch_iteration - self.total_size + 1

    def _height(self) -> float:
        """Of the way from the lower to the upper bound, how much was gone. Stairs hold it for some steps."""
        at = (self.last_batch_iteration + 1) % self.total_size
        if at <= self.first_step_size:
            part, stairs = at / self.first_step_size, self.first_stairs
            stair = at * stairs / self.first_step_size
        else:
            part, stairs = (self.total_size - at) / self.second_step_size, self.second_stairs
            stair = (self.total_size - at) * stairs / self.second_step_size
        return math.floor(stair) / stairs if stairs > 0 else part


class _Warmup(Schedule):
    """From 0 to 1 in warmup_num_steps steps."""

    def __init__(self, optimizer: Any, warmup_num_steps: int, warmup_type: str, last_batch_iteration: int):
        self.warmup_num_steps = max(2, _positive(warmup_num_steps, "warmup_num_steps"))
        if warmup_type not in ("log", "linear"):
            warnings.warn(
                f"overspill: warmup_type = {warmup_type!r}: log is taken, as in DeepSpeed; give log or linear",
                stacklevel=given.script_level(),
            )
            warmup_type = "log"
        self.warmup_type = warmup_type
        super().__init__(optimizer, last_batch_iteration)

    def warmed(self) -> float | None:
        """How far the warm-up is; None after it."""
        at = self.last_batch_iteration
        if at >= self.warmup_num_steps:
            return None
        if self.warmup_type == "linear":
            return at / self.warmup_num_steps
        return 1.0 / math.log(self.warmup_num_steps) * math.log(at + 1)


class WarmupLR(_Warmup):
    """From warmup_min_lr to warmup_max_lr (by default the optimizer's rate), and then as it is."""

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in optimizer.param_groups]
        self.min_lrs = _of_each_group(optimizer, warmup_min_lr, "warmup_min_lr")
        self.max_lrs = _of_each_group(optimizer, warmup_max_lr, "warmup_max_lr")
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)

    def first_lr(self) -> list[float]:
        return self.min_lrs

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return self.first_lr()
        warmed = self.warmed()
        height = self.after_warmup() if warmed is None else warmed
        return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def after_warmup(self) -> float:
        """Where the rate is between its bounds, from the end of the warm-up on."""
        return 1.0


class WarmupDecayLR(WarmupLR):
    """WarmupLR, and then down to warmup_min_lr in a line, at step total_num_steps."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration
        )

    def after_warmup(self) -> float:
        left = float(self.total_num_steps - self.last_batch_iteration)
        return max(0.0, left / float(max(1.0, self.total_num_steps - self.warmup_num_steps)))


class WarmupCosineLR(_Warmup):
    """Parts of the optimizer's own rate: from warmup_min_ratio to 1, and then by half a cosine to cos_min_ratio at step
    total_num_steps (Loshchilov and Hutter 2017, arXiv 1608.03983, without restarts)."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.org_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)

    def first_lr(self) -> list[float]:
        return [0.0] * len(self.org_lrs)

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self.org_lrs]

    def get_lr_ratio(self) -> float:
        """What part of the optimizer's own rate counts at `last_batch_iteration`; 0 before the first step."""
        if self.last_batch_iteration < 0:
            return 0.0
        warmed = self.warmed()
        if warmed is not None:
            return self.warmup_min_ratio + warmed * (1.0 - self.warmup_min_ratio)
        steps = max(1, self.total_num_steps - self.warmup_num_steps)
        gone = min(1.0, (self.last_batch_iteration - self.warmup_num_steps + 1) / steps)
        fall = (1 + math.cos(math.pi * gone)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * fall)


SCHEDULES: dict[str, type[Schedule]] = {
    each.__name__: each for each in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def find(name: str) -> type[Any]:
    """The class of a schedule: one of these, else of torch.optim.lr_scheduler. Raises ValueError."""
    if name in SCHEDULES:
        return SCHEDULES[name]
    from torch.optim import lr_scheduler

    found = getattr(lr_scheduler, name, None)
    if (
        not isinstance(found, type)
        or not issubclass(found, lr_scheduler.LRScheduler)
        or name == "LRScheduler"
    ):
        raise ValueError(f"one of {', '.join(SCHEDULES)} is expected, or a class of torch.optim.lr_scheduler")
    if found is lr_scheduler.ReduceLROnPlateau:
        raise ValueError("ReduceLROnPlateau needs a metric: make it in the script, and step it there")
    return found
