"""What an optimizer says of steps that the core leaves out, because a gradient is not finite, and of gradients that
fp16 may have made zero."""

from __future__ import annotations

import warnings
from collections import deque
from typing import Any

import torch

from . import _core, given
from .residency import Residency


class NonFiniteError(_core.OverspillError, FloatingPointError):
    """A gradient has an inf or a NaN, and on_nonfinite is "raise", or the loss scale is at its least. The engine left
    the step out and cleared its gradients."""


class LeavingOut:
    """The part of an optimizer that reports steps that the core left out. `outcomes`: the last one, of the update that
    was made last. `on_nonfinite`: the configuration's."""

    residency: Residency
    outcomes: deque[Any]
    on_nonfinite = "skip"
    _told = False  # of a skipped step
    _told_of_fp16 = False
    _overflowed = False  # by the last step, at the least loss scale
    _expected = False  # GradScaler found that the step has to be left out

    @property
    def last_step(self) -> Any:
        """The outcome of the last step: `step` (updates so far), `norm` of the gradients over all ranks, `clip` (what
        they were multiplied by), `skipped`. None before the first."""
        return self.outcomes[0] if self.outcomes else None

    def _tell_skipped(self) -> None:
        if self._told or self.on_nonfinite == "raise":
            return
        self._told = True
        warnings.warn(
            f"overspill: a step is skipped, because {self._culprit()} has an inf or a NaN: weights and states stay as "
            "they are. This warning comes once; engine.last_step.skipped tells it for every step, "
            'engine.stats()["skipped_steps"] counts such steps',
            stacklevel=given.script_level(),
        )

    def _raise_skipped(self) -> None:
        if self._overflowed:
            raise NonFiniteError(
                f"overspill: {self._culprit()} has an inf or a NaN, and the loss scale is the least that "
                f"loss_scaling.min_loss_scale allows, {self.residency.gradients.scaler.scale:g}: the step is left out, "
                "weights and states are as they were. The loss itself may be too large for fp16: train in bf16, or "
                "with a smaller learning rate"
            )
        if self.on_nonfinite == "raise" and self.last_step.skipped and not self._expected:
            raise NonFiniteError(
                f"overspill: {self._culprit()} has an inf or a NaN: the step is left out, weights and states are as "
                'they were, and its gradients are gone (on_nonfinite = "raise"; "skip" goes on with a warning)'
            )

    def _culprit(self) -> str:
        where = self.last_step.not_finite
        return f"the gradient of {where}" if where else "a gradient of another rank"

    def _tell_of_fp16(self) -> None:
        """Called for a step of a loss that nobody has scaled."""
        if self._told_of_fp16:
            return
        self._told_of_fp16 = True
        if any(unit.trainable and unit.dtype is torch.float16 for unit in self.residency.units):
            warnings.warn(
                "overspill: weights in fp16 are trained without loss scaling: gradients below 6e-8 become zero. Give "
                'loss_scaling = {"enabled": true} and call engine.backward(loss), or use torch.amp.GradScaler '
                "(docs/scripts.md, fp16); bf16 needs neither",
                stacklevel=given.script_level(),
            )
