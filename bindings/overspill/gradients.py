"""Gradients as scripts have them: `p.grad` of a parameter whose gradient the engine holds.

The engine has one gradient of each parameter, in memory or on NVMe. `p.grad` is a copy of it (copies.py); what the
script writes there, or assigns, becomes the gradient before anything else uses it.

If torch trains a parameter (units.py), its `grad` is autograd's own, and the engine has none.

By torch's rule gradients stay until they are cleared: after `optimizer.step()` they can be read, new gradients are
added to them, and a further step applies them again. `engine.step()` and `train_batch` clear them, as DeepSpeed does.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C import DisableTorchFunction

from . import calls, given, place, reading
from .boundary import counts
from .calls import books
from .copies import Copies
from .divided import part_of
from .loss_scaling import Course, LossScaler
from .parts import Part, groups_of
from .ranks import RankError
from .residency import Residency
from .segments import Segment, get_grad, registry, set_grad
from .units import DTYPES


class Gradients:
    """Of one engine. `used`: by the optimizer's last step, and not cleared since. `clears`: the core's counts before an
    update that clears, until it has. `clipped`: by the script, in place of the configured limit. `graphs`: gradients
    with a graph of their own, which the engine has not. `by_torch`: the segments whose gradients are torch's. Torch
    functions must be off in all calls, which are made inside calls.Alone, or by backward."""

    def __init__(self, core: Any, where: place.Place, ranks: int):
        self.core, self.place, self.ranks = core, where, ranks
        self.used = False
        self.clears: tuple[int, int] | None = None
        self.clipped = False
        self.scaler: LossScaler | None = None  # set where engine.backward scales losses
        self.graphs: set[Segment] = set()
        self.by_torch: list[Segment] = []
        self.copies = Copies(_as_held, self._replace, self._give)

    @property
    def loss_scale(self) -> float:
        """What the engine's gradients are to be divided by; 1 where engine.backward scales no losses."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def go_on(self, course: Course | None, outcome: Any) -> None:
        """With the scale of a checkpoint, if it has one. `outcome`: of the last update before."""
        if self.scaler is not None and course is not None:
            self.scaler.go_on(course, outcome)

    def are_touched(self) -> bool:
        """Whether a gradient that arrives meets anything here."""
        return self.used or self.clears is not None or bool(self.copies)

    # ---- p.grad

    def read(self, s: Segment) -> torch.Tensor | None:
        self._finish_clearing()
        copy = self.copies.get(s)
        if copy is not None:
            return copy
        if not (self.used or s.has_gradient()):
            return None
        self._require_unscaled(f"reading the gradient of {s.name}")
        self._require_one_rank(f"reading the gradient of {s.name}")
        self._take_up()
        if not s.has_gradient():
            return None
        if s in self.graphs:
            raise RuntimeError(
                f"overspill: backward(create_graph=True) made a gradient of {s.name} with a graph, and the engine has "
                "the values alone: take torch.autograd.grad(loss, parameters, create_graph=True), which keeps it"
            )
        gradient = s.as_parameter(self._fetch(s).to(self.place.device))
        return self.copies.keep(s, gradient, part_of(gradient, s.parameter))

    def take_out(self, s: Segment) -> torch.Tensor | None:
        """The gradient, for a script that goes on without the engine; a large one in a file, if there is a folder for
        large tensors."""
        found = self.read(s) if s.unit.trainable else None
        if found is None:
            return None
        self.copies.settle(s)
        kept = s.unit.residency.folder.tensor(
            found.shape, found.stride(), found.dtype, f"the gradient of {s.name}"
        )
        self.copies.drop(s)
        return found if kept is None else kept.copy_(found)

    def write(self, s: Segment, value: torch.Tensor | None) -> None:
        """Raises as torch does for what is no gradient of the parameter."""
        if value is None and not (self.used or s.has_gradient()):
            self.copies.drop(s)
            return
        self._require_unscaled(f"setting the gradient of {s.name}")
        self._require_one_rank(f"setting the gradient of {s.name}")
        _check(s, value)
        if id(value) in registry:  # a parameter, which may be released
            value = reading.weight(registry[id(value)])
        self._take_up()
        self.copies.drop(s)
        self.graphs.discard(s)
        if value is None:
            self.core.replace_gradient(s.unit.index, s.index, 0, 0, "")
        else:
            self._replace(s, _as_held(s, value))
            self.copies.keep(s, value, part_of(value, s.parameter))

    def _require_one_rank(self, what: str) -> None:
        if self.ranks > 1:
            raise RankError(
                f"overspill: {what}: gradients of {self.ranks} ranks are summed in pieces, and no rank has a whole "
                "one; their norm is engine.last_step.norm, this rank's own passes parameter.register_hook"
            )

    def _require_unscaled(self, what: str) -> None:
        if self.scaler is not None:
            raise RuntimeError(
                f"overspill: {what}: it is that of a loss times {self.scaler.scale:g} (loss_scaling): engine.grad(p) "
                "gives the loss's own, engine.clip_grad_norm_ clips it, and engine.last_step.norm is its norm"
            )

    # ---- what the engine does with gradients

    def arriving(self, s: Segment) -> None:
        self._take_up()
        self.copies.settle(s)

    def arrived(self, s: Segment) -> None:
        """Called when a gradient arrived: as in torch, a `p.grad` that the script has shows the sum."""
        self.copies.renew(s)

    def update(self, call: Callable[[], Any], keeps: bool) -> Any:
        """Makes an update by `call`. Afterwards gradients are kept by torch's rule, or cleared, also after Ctrl-C."""
        self.settle()
        if keeps:
            self.used = True
        else:
            self.clears = counts(self.core)
        try:
            return call()
        except Exception:
            self.used, self.clears = False, None  # nothing was used
            raise

    def updated(self, skipped: bool, part: Part | None = None) -> None:
        """After `update`."""
        self.clipped = False
        self._finish_clearing()
        if skipped:
            self.forget(part)  # the core has cleared them

    def settle(self) -> None:
        """Called before gradients are used as a whole: hands what the script wrote to the engine."""
        self._take_up()
        self.copies.settle_all()

    def clip_norm(self, limit: float) -> float:
        """Clips for the script; an infinite limit only returns the norm."""
        self.clipped = self.clipped or limit != math.inf
        return self.scale(limit)

    def clip_by_hand(self) -> None:
        """Notes that the script clips gradients itself."""
        self.clipped = True
        self.core.clipped_by_caller()

    def scale(self, limit: float) -> float:
        self.settle()
        norm = self._scale(limit)
        self.copies.renew_all()
        return norm

    def _scale(self, limit: float) -> float:
        torchs = self._torchs()
        if not torchs:
            return self.core.clip_grad_norm(limit)
        cores = self.core.clip_grad_norm(math.inf)
        norm = math.hypot(cores, *(torch.linalg.vector_norm(gradient).item() for gradient in torchs))
        factor = limit / (norm + 1e-6)
        if math.isfinite(norm) and factor < 1:  # else the step is left out
            if cores > 0:
                self.core.clip_grad_norm(given.max_norm(factor * (cores + 1e-6)))
            for gradient in torchs:
                gradient.mul_(factor)
        return norm

    def norm(self, part: Part | None) -> float:
        self.settle()
        norms = [torch.linalg.vector_norm(gradient).item() for gradient in self._torchs(part)]
        return math.hypot(self.core.grad_norm(groups_of(part)), *norms)

    def _torchs(self, part: Part | None = None) -> list[torch.Tensor]:
        segments = self._torch_segments(part)
        return [gradient for s in segments if (gradient := get_grad(s.parameter)) is not None]

    def _torch_segments(self, part: Part | None) -> list[Segment]:
        return self.by_torch if part is None else [s for s in self.by_torch if part.has(s)]

    def first_not_finite(self, part: Part | None = None) -> str | None:
        """Where the norm is not finite: the name of the first parameter of torch's to blame; None: the engine's are."""
        if not math.isfinite(self.core.grad_norm(groups_of(part))):
            return None
        for s in self._torch_segments(part):
            gradient = get_grad(s.parameter)
            if gradient is not None and not torch.linalg.vector_norm(gradient).isfinite():
                return s.name
        return None

    def clear(self, set_to_none: bool = True, part: Part | None = None) -> None:
        """Clears gradients: copies that the script has are its own from now on; or sets them and the engine's to zero.
        `part`: only those of one optimizer of several."""
        if part is not None:
            self.settle()  # what the others' steps have used is there again, and what the script wrote
        if set_to_none:
            self.forget(part)
            self.core.clear_gradients(groups_of(part))
            return
        self.core.zero_gradients(groups_of(part))
        for gradient in self._torchs(part):
            gradient.zero_()
        self.used = self.clipped = False
        self.copies.renew_all()

    def forget(self, part: Part | None = None) -> None:
        """Called when the engine has no gradients any more."""
        self.used, self.clears, self.clipped = False, None, False
        self.copies.clear(None if part is None else part.has)
        self.graphs = set() if part is None else {s for s in self.graphs if not part.has(s)}
        for s in self._torch_segments(part):
            set_grad(s.parameter, None)

    # ----

    def _take_up(self) -> None:
        """Torch's rule, after a step."""
        self._finish_clearing()
        if not self.used:
            return
        if self.ranks > 1:
            raise RankError(
                f"overspill: the gradients of {self.ranks} ranks were not cleared after optimizer.step(), and torch "
                "would add to them, or apply them again; the engine has used them up: call optimizer.zero_grad() after "
                "each step"
            )
        self.core.reuse_gradients()
        self.used = False

    def _finish_clearing(self) -> None:
        """What Ctrl-C kept an update from, if the core has made it."""
        if self.clears is not None:
            before, self.clears = self.clears, None
            if counts(self.core) != before:
                self.clear()

    def _give(self, s: Segment, tensor: torch.Tensor) -> bool:
        if not s.has_gradient():
            return False
        part_of(tensor, s.parameter).detach().copy_(self._fetch(s))
        return True

    def _fetch(self, s: Segment) -> torch.Tensor:
        with torch.inference_mode(False):
            gradient = torch.empty_strided(s.shape, s.stride, dtype=s.unit.dtype, device="cpu")
        self.core.read_gradient(s.unit.index, s.index, gradient.data_ptr(), s.bytes, DTYPES[s.unit.dtype])
        return gradient

    def _replace(self, s: Segment, gradient: torch.Tensor) -> None:
        self.core.replace_gradient(s.unit.index, s.index, gradient.data_ptr(), s.bytes, DTYPES[s.unit.dtype])


def _as_held(s: Segment, value: torch.Tensor) -> torch.Tensor:
    """The value as the engine takes it from the CPU; copied only if it is not in that form already."""
    return _in_order(s, part_of(value.detach(), s.parameter).cpu())


def _in_order(s: Segment, value: torch.Tensor) -> torch.Tensor:
    """Dense, in the memory order in which the engine has it."""
    if value.layout is not torch.strided:
        value = value.to_dense()
    if value.stride() != s.stride:
        like = torch.empty_strided(s.shape, s.stride, dtype=value.dtype, device=value.device)
        value = like.copy_(value)
    return value


def _check(s: Segment, value: Any) -> None:
    """Raises as torch does where the value can be no gradient of the parameter."""
    if s.memory is not s.parameter:
        try:
            set_grad(s.parameter, value)
        finally:
            set_grad(s.parameter, None)
    else:
        set_grad(s.blank.detach(), value)  # the parameter's own would be taken for what autograd left there


def take_in(s: Segment) -> None:
    """Adds the gradient that autograd has left in the parameter to the engine's."""
    gradient = get_grad(s.parameter)
    if gradient is None:  # requires_grad was switched off since forward: torch drops it, too
        return
    gradients, where = s.unit.residency.gradients, s.unit.residency.place
    _require_scaled(s)
    if gradient.requires_grad:
        gradients.graphs.add(s)
    gradient = part_of(gradient.detach(), s.parameter)
    set_grad(s.parameter, None)
    gradient = _in_order(s, gradient)
    touched = gradients.are_touched()
    if touched:
        gradients.arriving(s)
    if where.on_host:
        s.unit.core.add_gradient(
            s.unit.index,
            s.index,
            gradient.data_ptr(),
            gradient.numel() * gradient.element_size(),
            DTYPES[gradient.dtype],
        )
    else:
        s.unit.core.add_device_gradient(s.unit.index, s.index, where.take(gradient), where.queue())
    if touched:
        gradients.arrived(s)
    _note(s, gradient.nbytes)


def _require_scaled(s: Segment) -> None:
    scaler = s.unit.residency.gradients.scaler
    if scaler is not None and not scaler.inside:
        set_grad(s.parameter, None)
        raise RuntimeError(
            f"overspill: loss_scaling.enabled: {s.name} got a gradient from a backward that is not "
            "engine.backward(loss), and the engine scales losses there alone: call engine.backward(loss); or leave "
            "loss_scaling out, and scale with torch.amp.GradScaler. Where a framework or a schedule of pipeline stages "
            "calls backward, train in bf16"
        )


def _note(s: Segment, size: int) -> None:
    """A gradient of so many bytes has arrived."""
    owner = s.unit.residency
    if owner.planner is not None:
        owner.planner.arrived()
    if owner.watch is not None:
        owner.watch.came(size)


class InParts:
    """Adds a gradient that nobody has whole to the engine's, part by part in the order of its elements, inside a
    `with`. Where that ends with an error, and some parts have come, the segment has no gradient; and where they were
    added to those of earlier micro-batches, the next step is refused until gradients are cleared."""

    def __init__(self, s: Segment):
        self._segment = s
        self._parts: Any = None
        self._touched = False

    def __enter__(self) -> InParts:
        s = self._segment
        owner, gradients = s.unit.residency, s.unit.residency.gradients
        with DisableTorchFunction():
            _require_scaled(s)
            if owner.closed:
                raise RuntimeError(f"overspill: {s.name}: {owner.closed}")
            calls.work(sys._getframe())
            books.open = False
            self._touched = gradients.are_touched()
            if self._touched:
                gradients.arriving(s)
        self._parts = s.unit.core.begin_gradient(s.unit.index, s.index, DTYPES[s.unit.dtype])
        return self

    def add(self, part: torch.Tensor) -> None:
        """On the CPU, in the unit's dtype."""
        part = part.contiguous()
        self._parts.add(part.data_ptr(), part.nbytes)
        _note(self._segment, part.nbytes)

    def __exit__(self, kind: Any, *rest: Any) -> None:
        parts, s, gradients = self._parts, self._segment, self._segment.unit.residency.gradients
        self._parts = None
        try:
            if kind is None:
                parts.finish()
        finally:
            with DisableTorchFunction():
                parts.break_off()  # nothing where it has ended
                if self._touched:
                    gradients.arrived(s)


def clip_value(parameters: list[Any], limit: float, owners: Iterable[Residency]) -> None:
    """As torch.nn.utils.clip_grad_value_, one gradient at a time."""
    for owner in owners:
        owner.gradients.clip_by_hand()
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            gradient.clamp_(-limit, limit)


def clip_norm(
    parameters: list[Any],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    owners: Iterable[Residency],
) -> torch.Tensor:
    """As torch.nn.utils.clip_grad_norm_, one gradient at a time."""
    norms = [
        torch.linalg.vector_norm(gradient, norm_type)
        for parameter in parameters
        if (gradient := parameter.grad) is not None
    ]
    if not norms:
        return torch.tensor(0.0)
    total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped."
        )
    for owner in owners:
        owner.gradients.clip_by_hand()
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            gradient.mul_(factor.to(gradient.device))
    return total
