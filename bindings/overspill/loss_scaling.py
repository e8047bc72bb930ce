"""Loss scaling: backward begins with the loss times a scale, so that small gradients do not become zero in fp16
(Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section 3.2). The core divides by it what it computes
with: norms, limits, updates. Where a gradient is not finite, the core leaves the step out, and the scale falls.

Two scalers: the engine's own, with DeepSpeed's rule (LossScaler), and torch.amp.GradScaler, by the protocol of torch's
fused optimizers: it gives its scale with each step, and asks before whether a gradient is not finite."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .config import Config, LossScaling

PROTOCOL = "_step_supports_amp_scaling"  # what GradScaler looks for in an optimizer
_FACTOR = 2.0


@dataclass(frozen=True)
class Course:
    """Where a scaler is, for a checkpoint: its scale, steps since the last overflow, and overflows until it falls."""

    scale: float
    good: int
    left: int

    def to_json(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Course | None:
        """Raises ValueError for what no scaler has been at."""
        if value is None:
            return None
        scale, good, left = float(value["scale"]), value["good"], value["left"]
        if not (
            2.0**-100 <= scale <= 2.0**127 and type(good) is type(left) is int and good >= 0 and left >= 1
        ):
            raise ValueError(f"a scale {scale:g} with {good!r:.20} and {left!r:.20}")
        return cls(scale, good, left)


class LossScaler:
    """`scale`: of the next backward. DeepSpeed's rule (deepspeed/runtime/fp16/loss_scaler.py): it doubles after
    `loss_scale_window` steps in a row without overflow, and halves at an overflow, of which the first `hysteresis` - 1
    only count. Only the thread that trains uses it."""

    def __init__(self, settings: LossScaling):
        self.settings = settings
        self.is_dynamic = settings.loss_scale == 0
        self.scale = 2.0**settings.initial_scale_power if self.is_dynamic else settings.loss_scale
        self.inside = 0  # calls of engine.backward under way
        self._followed: Any = None  # the last outcome that counted
        self._good = 0  # steps since the last overflow
        self._left = settings.hysteresis  # overflows until the scale falls

    def follow(self, outcome: Any) -> bool:
        """After an update, and before what needs the scale: Ctrl-C may have come between. `outcome`: of the last
        update. False: it was left out now, and the scale cannot fall further."""
        if outcome is None or outcome is self._followed:
            return True
        self._followed = outcome
        return self.stepped(outcome.skipped)

    def stepped(self, skipped: bool) -> bool:
        if not self.is_dynamic:
            return True
        if skipped:
            self._good = 0
            if self._left > 1:
                self._left -= 1
                return True
            fell = self.scale > self.settings.min_loss_scale
            self.scale = max(self.scale / _FACTOR, self.settings.min_loss_scale)
            return fell
        self._good += 1
        grows = self._good % self.settings.loss_scale_window == 0
        if grows or self.settings.consecutive_hysteresis:
            self._left = self.settings.hysteresis
        if grows and math.isfinite(_FACTOR * self.scale):
            self.scale *= _FACTOR
        return True

    @property
    def course(self) -> Course:
        return Course(self.scale, self._good, self._left)

    def go_on(self, course: Course) -> None:
        """A fixed scale stays the configuration's."""
        if self.is_dynamic:
            self.scale = max(course.scale, self.settings.min_loss_scale)
            self._good, self._left = course.good, min(course.left, self.settings.hysteresis)


def check(config: Config, several: bool, foreign: str | None) -> None:
    """Raises ValueError where something beside the engine's own update would use scaled gradients. `several`: there is
    a list of optimizers; `foreign`: the class of an optimizer whose own code makes the steps."""
    why = None
    if several:
        why = "a list of optimizers steps at different times: give one optimizer with a group for each"
    elif foreign is not None:
        why = (
            f"{foreign} makes its steps with its own code, which knows no scale (all optimizers do over float64 "
            "weights): take torch.optim.AdamW, or another of the engine's (docs/scripts.md, Optimizers), over fp32 or "
            "fp16 weights"
        )
    elif config.on_nonfinite != "skip":
        why = (
            f'on_nonfinite = "{config.on_nonfinite}", and a step that overflows has to be left out: give "skip", or '
            "leave it out (in DeepSpeed's JSON it is bf16.check_grad_overflow)"
        )
    if why is not None:
        raise ValueError(f"overspill: loss_scaling.enabled: {why}")


def take_scale(*stepped: Any) -> tuple[float, bool]:
    """What GradScaler has put on the optimizer that it stepped, the script's own or the engine's: the scale of the
    loss, and whether a gradient is not finite."""
    given = next((vars(each) for each in stepped if "found_inf" in vars(each)), {})
    scale, found = given.get("grad_scale"), given.get("found_inf")
    return (
        1.0 if scale is None else float(scale),
        isinstance(found, torch.Tensor) and bool(found.item()),
    )


def find_overflow(norm: float, found_inf: torch.Tensor) -> dict[torch.device, torch.Tensor]:
    """What GradScaler keeps of an optimizer. `found_inf`: zero, on the scaler's device."""
    return {found_inf.device: found_inf.fill_(float(not math.isfinite(norm)))}
