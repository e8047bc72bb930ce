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
from .segments import registry

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
        scale, good, left = value["scale"], value["good"], value["left"]
        counts = type(good) is type(left) is int and 0 <= good < 2**63 and 1 <= left < 2**63
        if type(scale) not in (int, float) or not (2.0**-100 <= scale <= 2.0**127) or not counts:
            raise ValueError(f"a scale {scale!r:.20} with {good!r:.20} and {left!r:.20}")
        return cls(float(scale), good, left)


class LossScaler:
    """`scale`: of the next backward. DeepSpeed's rule (deepspeed/runtime/fp16/loss_scaler.py): it doubles after
    `loss_scale_window` steps in a row without overflow, and halves at an overflow, of which the first `hysteresis` - 1
    only count. Only the thread that trains uses it."""

    def __init__(self, settings: LossScaling):
        self.settings = settings
        self.is_dynamic = settings.loss_scale == 0
        self.scale = 2.0**settings.initial_scale_power if self.is_dynamic else settings.loss_scale
        self.inside = 0  # calls of engine.backward under way
        self.looked = False  # at what the loss reaches
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

    def go_on(self, course: Course, outcome: Any) -> None:
        """From there. `outcome`: of the last update before, which counts no more. A fixed scale stays the
        configuration's."""
        self._followed = outcome
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


def take_scale(*stepped: Any) -> tuple[float, bool] | None:
    """What GradScaler has put on the optimizer that it stepped, the script's own or the engine's: the scale of the
    loss, 1 where its unscale_ has divided, and whether a gradient is not finite. None where it has not."""
    given = next((vars(each) for each in stepped if "found_inf" in vars(each)), None)
    if given is None:
        return None
    scale, found = given.get("grad_scale"), given["found_inf"]
    return (
        1.0 if scale is None else float(scale),
        isinstance(found, torch.Tensor) and bool(found.item()),
    )


def drop_given(*stepped: Any) -> None:
    """Where an exception ended a step, GradScaler's are still there, and the next step would take them for its own."""
    for each in stepped:
        if vars(each).pop("found_inf", None) is not None:
            vars(each).pop("grad_scale", None)


def check_reach(loss: torch.Tensor, owner: Any) -> None:
    """Raises RuntimeError where backward would leave gradients of the scaled loss in a weight that is not the engine's:
    nobody would divide them. `owner`: the engine's Residency. It looks at each node of the graph once, and not into
    blocks that reentrant checkpoints compute again."""
    seen, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += (each for each, _ in node.next_functions)
        leaf = node.variable if type(node).__name__ == "AccumulateGrad" else None  # type: ignore[attr-defined]
        if not isinstance(leaf, torch.nn.Parameter) or leaf.numel() == 0:
            continue
        segment = registry.get(id(leaf))
        if segment is None or segment.unit.residency is not owner:
            what = f"a weight of shape {list(leaf.shape)}, which no engine trains"
            if segment is not None:
                what = f"{segment.name}, which another engine trains"
            raise RuntimeError(
                f"overspill: loss_scaling.enabled: the loss of engine.backward reaches {what}. Its gradient would stay "
                "multiplied by the scale: switch its gradients off "
                "(weight.requires_grad_(False), or forward under torch.no_grad()), have this engine train it too, or "
                "leave loss_scaling out, and scale with torch.amp.GradScaler"
            )


def check_none(model: torch.nn.Module, config: Config) -> None:
    """Raises RuntimeError where the model has gradients already, which are not those of a loss that was scaled."""
    name = next((name for name, p in model.named_parameters() if p.grad is not None), None)
    if config.loss_scaling.enabled and name is not None:
        raise RuntimeError(
            f"overspill: initialize: loss_scaling.enabled: {name} has a gradient already, of a loss that nobody has "
            "scaled: call model.zero_grad() before"
        )


def find_overflow(norm: float, found_inf: torch.Tensor) -> dict[torch.device, torch.Tensor]:
    """What GradScaler keeps of an optimizer. `found_inf`: zero, on the scaler's device."""
    return {found_inf.device: found_inf.fill_(float(not math.isfinite(norm)))}
