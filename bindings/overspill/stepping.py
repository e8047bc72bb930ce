"""Micro-batches and the updates that end them: what of an engine a training loop calls, and its counts."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch._C import DisableTorchFunction

from . import calls, given, loss_scaling, parts, vertical
from .boundary import Boundary
from .config import Config
from .place import Place
from .residency import Residency
from .stand_in import StandIn


class Stepping(StandIn):
    """The part of an engine that counts. `micro_steps`: micro-batches that were ended, `global_steps`: updates, skipped
    ones included."""

    _settings: Config
    _residency: Residency
    _place: Place
    _unopened = False  # resume_from was given, and nothing was loaded yet

    def __init__(self) -> None:
        """Counts of a run that has not begun. nn.Module's own __init__ is not called: it would make parts, and an
        engine's are those of its module."""
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        self.global_steps = self.micro_steps = 0
        self._boundary: Boundary | None = None  # an update whose bookkeeping is not finished

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Computes gradients of loss / gradient_accumulation_steps, which add up until `step`. The engine keeps them:
        in bf16 for one micro-batch, in fp32 for several. `loss.backward()` means the same without the division. With
        `loss_scaling` the engine multiplies the loss by `current_loss_scale` first, and refuses `loss.backward()`.

        Args:
            loss: one element, on `device`, that the model's output led to; keywords are Tensor.backward's

        Returns: the loss / gradient_accumulation_steps.

        Raises:
            TypeError: the loss is no tensor
            EngineFailed, StoreError: the engine, a disk or another rank failed
        """
        return self._backward(loss, self._settings.gradient_accumulation_steps, kwargs)

    def _backward(self, loss: torch.Tensor, divisor: int, kwargs: dict[str, Any]) -> torch.Tensor:
        self._settle()
        given.loss(loss)
        watch = self._residency.watch
        if watch is not None:
            watch.look("forward, at its end")
        self._core.begin_backward()
        share = loss / divisor if divisor > 1 else loss
        scaler = self._residency.gradients.scaler
        if scaler is None:
            share.backward(**kwargs)  # type: ignore[no-untyped-call]
            return share
        scaler.follow(self.last_step)
        if not scaler.looked:
            loss_scaling.check_reach(loss, self._residency)
            scaler.looked = True
        self._core.set_loss_scale(scaler.scale)
        scaler.inside += 1
        try:
            (share.float() * scaler.scale).backward(**kwargs)
        finally:
            scaler.inside -= 1
        return share

    def step(self) -> None:
        """Ends a micro-batch; the last of gradient_accumulation_steps updates the weights and steps the scheduler.
        Without managed_gradient_accumulation every call updates. If the update is refused, or interrupted before it is
        made, the micro-batch has not ended."""
        parts.require_one(self.optimizer, "engine.step")
        with calls.Alone():
            self._settle()
            if self._ends_step():
                self._warn_of_unopened()
                self._update(self._ending())
            else:
                self.micro_steps += 1

    def _warn_of_unopened(self) -> None:
        """Whoever gives resume_from wants to go on."""
        if self._unopened:
            self._unopened = False
            warnings.warn(
                "overspill: resume_from was given, and no checkpoint was loaded, so training begins with the model's "
                "own weights: call engine.load_checkpoint before the first step, or leave resume_from out",
                stacklevel=5,
            )

    def _ends_step(self) -> bool:
        """Whether the micro-batch that is under way is the last of its step."""
        return (self.micro_steps + 1) % self._counted() == 0

    def _begun(self) -> int:
        """How many micro-batches of the present step have ended."""
        return self.micro_steps % self._counted()

    def _counted(self) -> int:
        """How many calls of `step` make one update."""
        settings = self._settings
        return settings.gradient_accumulation_steps if settings.managed_gradient_accumulation else 1

    def _ending(self) -> int:
        """How many micro-batches end with an updating `step`."""
        return 1

    def _update(self, micro_batches: int) -> None:
        """Makes an update, which ends so many micro-batches. Inside `Alone`, which keeps other threads out until the
        counts are settled."""
        if self._boundary is not None:
            raise RuntimeError(
                "overspill: engine.step or train_batch inside an update of the same engine (a hook of its optimizer, "
                "its scheduler, a handler of a signal): call it when that update is over"
            )
        begun = self._boundary = Boundary(self._core, self.micro_steps + micro_batches, self.global_steps + 1)
        try:
            begun.make(self.optimizer.step)
        finally:
            self._settle()

    def _settle(self) -> None:
        """Completes what Ctrl-C interrupted: if the core has made the update that had begun, counts it and steps the
        scheduler; clears the gradients that a train_batch left. Calls of the engine that depend on these begin with
        this. Raises RuntimeError while another thread is inside the update."""
        if self._residency.closed:
            raise RuntimeError(f"overspill: {self._residency.closed}")
        if self._boundary is not None:
            self._count()
        calls.clear_spoiled(self._residency)

    def _count(self) -> None:
        with calls.Alone():
            begun = self._boundary
            if begun is None or begun.is_scheduling():
                return
            if begun.is_made(self._core):
                self._residency.spoiled = False  # the update has used what there was
                self.micro_steps, self.global_steps = begun.micro_steps, begun.global_steps
                if self.lr_scheduler is not None and not begun.is_skipped(self._core):
                    try:
                        begun.step_scheduler(self.lr_scheduler, self.optimizer.param_groups)
                    except Exception:
                        self._boundary = None  # the scheduler's own error, which is told once
                        raise
            elif begun.is_under_way():
                return
            self._boundary = None

    def train_batch(
        self, batches: Iterable[Any], loss: Callable[[Any], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """One whole step: the next gradient_accumulation_steps micro-batches, forward, backward, update. With
        vertical_accumulation they pass each unit together (vertical.py). After an exception the gradients are cleared
        and no micro-batch counts, unless the update had already been made; `micro_steps` tells.

        Args:
            batches: an iterator, of which every call takes the next ones, such as iter(loader); or as many
                micro-batches as one step takes, in a list
            loss: of one micro-batch, by calls of this engine or its module; None: the model's own (a mapping is given
                as keywords, a tuple or list as arguments; what has a `loss` gives that)

        Returns: the mean loss, detached, of no dimension, in fp32.

        Raises:
            ValueError: there are too few micro-batches, or what begins anew at each call
            TypeError: the model gives no loss of one element
            RuntimeError: in the middle of a step, or with several optimizers
        """
        parts.require_one(self.optimizer, "engine.train_batch")
        self._settle()
        count, before = self._settings.gradient_accumulation_steps, self.micro_steps
        if begun := self._begun():
            raise RuntimeError(
                f"overspill: train_batch in the middle of a step: {begun} of {count} micro-batches "
                "were ended by engine.step()"
            )
        micro_batches = list(itertools.islice(given.micro_batches(batches, count), count))
        if len(micro_batches) < count:
            raise ValueError(
                f"overspill: train_batch needs gradient_accumulation_steps = {count} micro-batches, there are "
                f"{len(micro_batches)}"
            )
        own = loss or self._own_loss
        forwards: list[Callable[[], torch.Tensor]] = [
            functools.partial(own, batch) for batch in micro_batches
        ]
        with calls.Alone():
            try:
                losses = self._losses(forwards)
                self._update(count)
            except BaseException:
                # Before any call: there a second Ctrl-C may strike, and the next pass or update clears them.
                self._residency.spoiled = self.micro_steps == before
                self._settle()
                raise
        return torch.stack(losses).float().mean()

    def _losses(self, forwards: list[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
        """Forward and backward of each micro-batch."""
        if self._settings.vertical_accumulation and len(forwards) > 1:
            return [found.detach() for found in vertical.run(forwards, self.backward, self._place)]
        losses = []
        for forward in forwards:
            found = forward()
            self.backward(found)
            losses.append(found.detach())
            del found
        return losses

    def _own_loss(self, batch: Any) -> torch.Tensor:
        if isinstance(batch, Mapping):
            out = self(**batch)
        else:
            out = self(*batch) if isinstance(batch, (tuple, list)) else self(batch)
        found = getattr(out, "loss", out)
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            raise TypeError(
                f"overspill: the model returned {type(out).__name__} and no loss of one element: give train_batch "
                "loss=callable(batch)"
            )
        return found

    @property
    def current_loss_scale(self) -> float:
        """What the next `backward` multiplies the loss by; 1 without `loss_scaling`."""
        scale: float = self._residency.gradients.loss_scale
        return scale

    @property
    def last_step(self) -> Any:
        """Of the last update: step (updates so far), norm, clip, skipped. None before the first."""
        return self.optimizer.last_step

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, or makes them zero, as torch does. In the middle of a step, such as after an interrupt,
        the step begins anew: its micro-batches do not count, and a warning says how many they were.

        Args:
            set_to_none: False keeps zeros where there were gradients

        Raises: RuntimeError where another thread is at work.
        """
        self._clear_gradients("engine.zero_grad()", set_to_none)

    def _leaves_gradients(self) -> bool:
        """Whether the update that is under way is the script's own `optimizer.step()`. The next gradients may have
        another scale."""
        return self._boundary is None and self._residency.gradients.scaler is None

    def _clear_gradients(self, call: str, set_to_none: bool) -> None:
        """`call`: the script's, by name; optimizer.zero_grad and model.zero_grad mean the same."""
        count = self._settings.gradient_accumulation_steps
        with calls.Alone(), DisableTorchFunction():
            self._settle()
            self._residency.gradients.clear(set_to_none)
            begun = self._begun()
            self.micro_steps -= begun
        if not begun:
            return
        warnings.warn(
            f"overspill: {call} in the middle of a step: {begun} of {count} micro-batches were ended by "
            "engine.step(), their gradients are gone, and the step begins anew. A script that clears gradients before "
            "every micro-batch never updates: clear them where engine.micro_steps is a multiple of "
            "gradient_accumulation_steps",
            stacklevel=given.script_level(),
        )

    @property
    def _core(self) -> Any:
        return self._residency.core
