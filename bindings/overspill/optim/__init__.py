"""Optimizers for plain CPU tensors: the engine's update, alone, as torch.optim.Optimizer.

    optimizer = overspill.optim.AdamW(model.parameters(), lr=1e-3)

Groups, schedulers and closures work as with torch's own. `format` says how weights and states are held
(docs/update.md):

    fp32      fp32 weights and states; state_dict is torch's, both ways           fp32 parameters
    exact     bf16 weights, what is missing to the fp32 master beside them        bf16 parameters, the default
    compact   as exact, states in bf16 with stochastic rounding                   bf16 parameters
    8bit      as exact to 24 bits, states of 8 bits with a scale a block          bf16 parameters
    fp16      fp16 weights and an fp32 master                                     fp16 parameters

Results do not depend on `threads`. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .base import Optimizer

__all__ = ["SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Lion", "NAdam", "Optimizer", "RMSprop"]


class AdamW(Optimizer):
    """Decoupled weight decay (Loshchilov and Hutter 2017), as torch.optim.AdamW.

    Args:
        params: parameters on the CPU in fp32, bf16 or fp16, dense; or groups (dicts with "params"), as in torch
        lr: learning rate; it may be a tensor of one element
        betas: decay of the two averages, each from 0 up to 1
        eps: is added to the root of the second average
        weight_decay: a fraction of the weight a step, times lr; None: 0.01
        maximize: steps up the gradient
        format: how weights and states are held (docs/update.md); None: the first that the dtype has
        threads: 0: all cores; results do not depend on it
        seed: of stochastic rounding, in compact and 8bit
        of_torch: foreach, fused and capturable, which change no result here; amsgrad, centered and
            differentiable, if false

    Raises: ValueError for a number that no update can use, and for a parameter of another device or dtype.
    """

    _kind, _names, _decoupled = "adam", {"m": "exp_avg", "v": "exp_avg_sq"}, True

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        return super()._hyper(group) | {"decoupled": self._decoupled}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        *,
        maximize: bool = False,
        format: str | None = None,
        threads: int = 0,
        seed: int = 0,
        **of_torch: Any,
    ):
        decay = (0.01 if self._decoupled else 0.0) if weight_decay is None else weight_decay
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay, "maximize": maximize}
        super().__init__(params, defaults, format, threads, seed, of_torch)


class Adam(AdamW):
    """Weight decay as an L2 term (Kingma and Ba 2014), as torch.optim.Adam.

    Args:
        params: parameters on the CPU in fp32, bf16 or fp16, dense; or groups (dicts with "params"), as in torch
        lr: learning rate; it may be a tensor of one element
        betas: decay of the two averages, each from 0 up to 1
        eps: is added to the root of the second average
        weight_decay: is added to the gradient, times the weight; None: 0
        maximize: steps up the gradient
        format: how weights and states are held (docs/update.md); None: the first that the dtype has
        threads: 0: all cores; results do not depend on it
        seed: of stochastic rounding, in compact and 8bit
        of_torch: foreach, fused and capturable, which change no result here; amsgrad, centered and
            differentiable, if false

    Raises: ValueError for a number that no update can use, and for a parameter of another device or dtype.
    """

    _decoupled = False


class Adagrad(Optimizer):
    """Duchi, Hazan and Singer 2011, as torch.optim.Adagrad.

    Args:
        params: parameters on the CPU in fp32, bf16 or fp16, dense; or groups (dicts with "params"), as in torch
        lr: learning rate; it may be a tensor of one element
        lr_decay: the rate is lr / (1 + (step - 1) lr_decay)
        weight_decay: is added to the gradient, times the weight
        initial_accumulator_value: what the sums of squares begin with
        eps: is added to the root of the sum of squares
        maximize: steps up the gradient
        format: how weights and states are held (docs/update.md); None: the first that the dtype has
        threads: 0: all cores; results do not depend on it
        seed: of stochastic rounding, in compact and 8bit
        of_torch: foreach, fused and capturable, which change no result here; amsgrad, centered and
            differentiable, if false

    Raises: ValueError for a number that no update can use, and for a parameter of another device or dtype.
    """

    _kind = "adagrad"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        format: str | None = None,
        threads: int = 0,
        seed: int = 0,
        **of_torch: Any,
    ):
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
            "maximize": maximize,
        }
        super().__init__(params, defaults, format, threads, seed, of_torch)


class Lion(Optimizer):
    """Chen et al. 2023 (arXiv 2302.06675), algorithm 2: steps by the sign of an average.

    Args:
        params: parameters on the CPU in fp32, bf16 or fp16, dense; or groups (dicts with "params"), as in torch
        lr: learning rate, about a tenth of AdamW's
        betas: decay of what gives the sign, and of the average, each from 0 up to 1
        weight_decay: a fraction of the weight a step, times lr
        maximize: steps up the gradient
        format: how weights and states are held (docs/update.md); None: the first that the dtype has
        threads: 0: all cores; results do not depend on it
        seed: of stochastic rounding, in compact and 8bit
        of_torch: foreach, fused and capturable, which change no result here; amsgrad, centered and
            differentiable, if false

    Raises: ValueError for a number that no update can use, and for a parameter of another device or dtype.
    """

    _kind, _names = "lion", {"m": "exp_avg"}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        format: str | None = None,
        threads: int = 0,
        seed: int = 0,
        **of_torch: Any,
    ):
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, format, threads, seed, of_torch)


class SGD(Optimizer):
    """With momentum and Nesterov's form of it, as torch.optim.SGD.

    Args:
        params: parameters on the CPU in fp32, bf16 or fp16, dense; or groups (dicts with "params"), as in torch
        lr: learning rate; it may be a tensor of one element
        momentum: of the buffer of past gradients; 0 has none
        dampening: of the gradient that enters the buffer
        weight_decay: is added to the gradient, times the weight
        nesterov: Nesterov's form; needs a momentum and no dampening
        maximize: steps up the gradient
        format: how weights and states are held (docs/update.md); None: the first that the dtype has
        threads: 0: all cores; results do not depend on it
        seed: of stochastic rounding, in compact and 8bit
        of_torch: foreach, fused and capturable, which change no result here; amsgrad, centered and
            differentiable, if false

    Raises: ValueError for a number that no update can use, and for a parameter of another device or dtype.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        format: str | None = None,
        threads: int = 0,
        seed: int = 0,
        **of_torch: Any,
    ):
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("overspill: nesterov needs a momentum and no dampening")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults, format, threads, seed, of_torch)

    def _core_kind(self, group: dict[str, Any]) -> str:
        return "momentum" if group["momentum"] else "sgd"


class RMSprop(Optimizer):
    """Tieleman and Hinton 2012, as torch.optim.RMSprop; centered is torch's alone.

    Args:
        params: parameters on the CPU in fp32, bf16 or fp16, dense; or groups (dicts with "params"), as in torch
        lr: learning rate; it may be a tensor of one element
        alpha: decay of the average of squares, from 0 up to 1
        eps: is added to the root of the average
        weight_decay: is added to the gradient, times the weight
        momentum: of the buffer of past steps; 0 has none
        maximize: steps up the gradient
        format: how weights and states are held (docs/update.md); None: the first that the dtype has
        threads: 0: all cores; results do not depend on it
        seed: of stochastic rounding, in compact and 8bit
        of_torch: foreach, fused and capturable, which change no result here; amsgrad, centered and
            differentiable, if false

    Raises: ValueError for a number that no update can use, and for a parameter of another device or dtype.
    """

    _kind, _names = "rmsprop", {}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        *,
        maximize: bool = False,
        format: str | None = None,
        threads: int = 0,
        seed: int = 0,
        **of_torch: Any,
    ):
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "maximize": maximize,
        }
        super().__init__(params, defaults, format, threads, seed, of_torch)

    def _core_kind(self, group: dict[str, Any]) -> str:
        return "rmsprop_momentum" if group["momentum"] else "rmsprop"


class NAdam(Optimizer):
    """Dozat 2016, Adam with Nesterov's momentum, as torch.optim.NAdam.

    Args:
        params: parameters on the CPU in fp32, bf16 or fp16, dense; or groups (dicts with "params"), as in torch
        lr: learning rate; it may be a tensor of one element
        betas: decay of the two averages, each from 0 up to 1; betas[0] must not change during training
        eps: is added to the root of the second average
        weight_decay: is added to the gradient, times the weight
        momentum_decay: the momentum of a step is betas[0] (1 - 0.96^(step momentum_decay) / 2); it must not
            change during training
        decoupled_weight_decay: weight_decay is a fraction of the weight a step, times lr, as in AdamW
        maximize: steps up the gradient
        format: how weights and states are held (docs/update.md); None: the first that the dtype has
        threads: 0: all cores; results do not depend on it
        seed: of stochastic rounding, in compact and 8bit
        of_torch: foreach, fused and capturable, which change no result here; amsgrad, centered and
            differentiable, if false

    Raises: ValueError for a number that no update can use, and for a parameter of another device or dtype.
    """

    _kind, _names = "nadam", {"m": "exp_avg", "v": "exp_avg_sq"}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
        format: str | None = None,
        threads: int = 0,
        seed: int = 0,
        **of_torch: Any,
    ):
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum_decay": momentum_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults, format, threads, seed, of_torch)


class Adamax(Optimizer):
    """Kingma and Ba 2014 (arXiv 1412.6980), algorithm 2, as torch.optim.Adamax.

    Args:
        params: parameters on the CPU in fp32, bf16 or fp16, dense; or groups (dicts with "params"), as in torch
        lr: learning rate; it may be a tensor of one element
        betas: decay of the average of gradients, and of their largest size, each from 0 up to 1
        eps: is added to the gradient's size
        weight_decay: is added to the gradient, times the weight
        maximize: steps up the gradient
        format: how weights and states are held (docs/update.md); None: the first that the dtype has
        threads: 0: all cores; results do not depend on it
        seed: of stochastic rounding, in compact and 8bit
        of_torch: foreach, fused and capturable, which change no result here; amsgrad, centered and
            differentiable, if false

    Raises: ValueError for a number that no update can use, and for a parameter of another device or dtype.
    """

    _kind, _names = "adamax", {"m": "exp_avg"}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        format: str | None = None,
        threads: int = 0,
        seed: int = 0,
        **of_torch: Any,
    ):
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults, format, threads, seed, of_torch)


class Adadelta(Optimizer):
    """Zeiler 2012 (arXiv 1212.5701), as torch.optim.Adadelta.

    Args:
        params: parameters on the CPU in fp32, bf16 or fp16, dense; or groups (dicts with "params"), as in torch
        lr: learning rate; it may be a tensor of one element
        rho: decay of the averages of the gradient's and the steps' squares, from 0 up to 1
        eps: is added to both averages
        weight_decay: is added to the gradient, times the weight
        maximize: steps up the gradient
        format: how weights and states are held (docs/update.md); None: the first that the dtype has
        threads: 0: all cores; results do not depend on it
        seed: of stochastic rounding, in compact and 8bit
        of_torch: foreach, fused and capturable, which change no result here; amsgrad, centered and
            differentiable, if false

    Raises: ValueError for a number that no update can use, and for a parameter of another device or dtype.
    """

    _kind, _names = "adadelta", {}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        format: str | None = None,
        threads: int = 0,
        seed: int = 0,
        **of_torch: Any,
    ):
        defaults = {
            "lr": lr,
            "rho": rho,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults, format, threads, seed, of_torch)
