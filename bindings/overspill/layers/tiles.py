"""The loss of logits in tiles of tokens: logits.py says of which, this computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

Change = tuple[Callable, tuple, dict]  # of a tile's logits: a function, its further arguments


class Modes(NamedTuple):
    """Autograd and autocast as they were when the layer was called."""

    gradients: bool
    device: str
    autocast: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: torch.device) -> Modes:
        kind = device.type
        return cls(
            torch.is_grad_enabled(), kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        )

    def again(self) -> torch.autocast:
        return torch.autocast(self.device, self.dtype, self.autocast)


class Job(NamedTuple):
    tokens: int  # of a tile
    changes: tuple[Change, ...]
    modes: Modes  # of the layer's call
    loss_modes: Modes
    ignore_index: int
    label_smoothing: float

    def product(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        with self.modes.again():
            return functional.linear(hidden, weight, bias)

    def losses(self, product: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with self.modes.again():
            for function, args, kwargs in self.changes:
                product = function(product, *args, **kwargs)
        with self.loss_modes.again():
            return self._losses(product, target)

    def _losses(self, product: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(
            product,
            target,
            ignore_index=self.ignore_index,
            reduction="none",
            label_smoothing=self.label_smoothing,
        )


def refused_again(graph: bool, gradient: torch.Tensor) -> torch.Tensor:
    """What once_differentiable is given. It refuses gradients of gradients only where this one has a graph; of a
    constant one, as a sum has, it would lose them without a word."""
    return gradient.detach().requires_grad_() if graph and not gradient.requires_grad else gradient


class Losses(torch.autograd.Function):
    """The losses of all tokens. Tensors of one tile live at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        job: Job,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
    ) -> torch.Tensor:
        ctx.job = job
        ctx.save_for_backward(hidden, weight, bias, target)
        step = job.tokens
        tiles = [
            job.losses(job.product(some, weight, bias), wanted)
            for some, wanted in zip(hidden.split(step), target.split(step), strict=True)
        ]
        return torch.cat(tiles)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return Losses._backward(ctx, refused_again(torch.is_grad_enabled(), gradient))

    @staticmethod
    @once_differentiable
    def _backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, weight, bias, target = ctx.saved_tensors
        job, step = ctx.job, ctx.job.tokens
        wants = ctx.needs_input_grad
        of_hidden = torch.empty_like(hidden) if wants[1] else None
        sums = [
            torch.zeros(each.shape, dtype=torch.promote_types(each.dtype, torch.float32), device=each.device)
            if wanted
            else None
            for each, wanted in ((weight, wants[2]), (bias, bias is not None and wants[3]))
        ]
        for at in range(0, len(hidden), step):
            some, tile = hidden[at : at + step], slice(at, at + step)
            product = job.product(some, weight, bias).detach().requires_grad_()
            with torch.enable_grad():
                losses = job.losses(product, target[tile])
            (slope,) = torch.autograd.grad(losses, product, gradient[tile])
            if of_hidden is not None:
                of_hidden[tile].copy_(slope @ weight.to(slope.dtype))
            if sums[0] is not None:
                _add_product(sums[0], slope, some)
            if sums[1] is not None:
                sums[1].add_(slope.sum(0))
        grads = [
            None if each is None else each.to(of.dtype) for each, of in zip(sums, (weight, bias), strict=True)
        ]
        return None, of_hidden, *grads, None


def _add_product(sum_: torch.Tensor, slope: torch.Tensor, hidden: torch.Tensor) -> None:
    """Adds a tile's part of the weight's gradient: in place, where the dtypes are one."""
    hidden = hidden.to(slope.dtype)
    if sum_.dtype == slope.dtype:
        sum_.addmm_(slope.t(), hidden)
    else:
        sum_.add_(slope.t() @ hidden)
