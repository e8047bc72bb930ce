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

import os
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch

from . import momenta
from ._core import optim as _core

_FORMATS = {
    torch.float32: ("fp32",),
    torch.bfloat16: ("exact", "compact", "8bit"),
    torch.float16: ("fp16",),
}
_MASTER = {"exact": torch.int16, "compact": torch.int16, "8bit": torch.int8, "fp16": torch.float32}
_executors: dict[int, Any] = {}  # by number of threads; made once, idle until called


# Options of torch's own optimizers: how a step is computed there, and what would change its result.
_HOW = ("foreach", "fused", "capturable")
NOT_OURS = ("amsgrad", "centered")  # the update does not have them
_WHAT = (*NOT_OURS, "differentiable")


def _check_options(kind: str, given: dict[str, Any]) -> None:
    for name, value in given.items():
        if name not in (*_HOW, *_WHAT):
            raise TypeError(f"overspill: {kind}() has no argument {name!r}")
        if name in _WHAT and value:
            raise ValueError(
                f"overspill: {kind}({name}={value!r}) is not supported: leave it out, or take torch.optim's"
            )


def check_ours(kind: str, group: dict[str, Any], number: int) -> None:
    """Raises ValueError where a group asks for what the update does not have."""
    for option in NOT_OURS:
        if group.get(option):
            raise ValueError(
                f"overspill: parameter group {number} has {option} = {group[option]!r:.40}, which Overspill's update "
                f"of {kind} does not have, and which came too late for torch's own code: set it before initialize"
            )


def check_8bit(kind: str) -> None:
    """Raises ValueError for Adamax: a code's least step of the average is far above the norm of small gradients, so
    that single steps would be hundreds of times too large."""
    if kind == "Adamax":
        raise ValueError(
            'overspill: Adamax has no format "8bit", in which gradients that differ much in size would make steps far '
            'too large: take "compact", or another optimizer'
        )


def _executor(threads: int) -> Any:
    threads = threads or len(os.sched_getaffinity(0))
    if threads not in _executors:
        _executors[threads] = _core.Executor(threads)
    return _executors[threads]


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def _apart(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, number: int) -> torch.Tensor:
    """Zeros that fill one run of memory. The tensors of a large parameter start 832 bytes apart in their pages: streams
    that run at one rate from the same place get in one another's way in the first-level cache (docs/update.md)."""
    ahead = number * 832 // dtype.itemsize if shape.numel() >= 1 << 16 else 0
    return torch.zeros(shape.numel() + ahead, dtype=dtype).as_strided(shape, stride, ahead)


def _dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill one run of memory, in whatever order."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


class Optimizer(torch.optim.Optimizer):
    """What the optimizers below have in common. `grad_scale` multiplies every gradient of the next step, for
    clipping and loss scaling; `grad_norm()` gives the norm for it."""

    _kind = ""  # the core's name
    _names: ClassVar[dict[str, str]] = {}  # the core's name of a state -> torch's

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        format: str | None,
        threads: int,
        seed: int,
        of_torch: dict[str, Any],
    ):
        _check_options(type(self).__name__, of_torch)
        defaults = {**defaults, "format": format, "seed": int(seed)}
        self.threads = threads
        self._momenta = momenta.Watch()
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "threads": self.threads, "_momenta": self._momenta}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's.

        Args:
            param_group: a dict with "params", and options of its own

        Raises: ValueError, as when the optimizer is made; the groups are as they were.
        """
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1])
        except BaseException:
            self.param_groups.pop()
            raise

    def _check(self, group: dict[str, Any]) -> None:
        """Raises ValueError that names what is wrong with the group."""
        for name, least in (
            ("lr", 0.0),
            ("weight_decay", 0.0),
            ("eps", 0.0),
            ("lr_decay", 0.0),
            ("momentum", 0.0),
            ("momentum_decay", 0.0),
        ):
            if name in group and not float(group[name]) >= least:
                raise ValueError(f"overspill: {name} = {group[name]} must be at least {least}")
        for name in ("betas", "alpha", "rho"):
            given = group.get(name, ())
            if not all(0 <= decay < 1 for decay in (given if isinstance(given, (tuple, list)) else (given,))):
                raise ValueError(f"overspill: {name} = {given} must be in [0, 1)")
        for parameter in group["params"]:
            if parameter.device.type != "cpu" or parameter.dtype not in _FORMATS or parameter.is_sparse:
                raise ValueError(
                    f"overspill: a parameter of shape {tuple(parameter.shape)} is {parameter.dtype} on "
                    f"{parameter.device}: overspill.optim updates dense float32, bfloat16 and float16 tensors on "
                    "the CPU; overspill.initialize takes models on other devices"
                )
            if not _dense(parameter):
                raise ValueError(
                    f"overspill: a parameter of shape {tuple(parameter.shape)} has strides {parameter.stride()}: "
                    "its elements must fill one run of memory; make it contiguous"
                )
            self._format(group, parameter)

    def _format(self, group: dict[str, Any], parameter: torch.Tensor) -> str:
        known = _FORMATS[parameter.dtype]
        chosen = group.get("format") or known[0]
        if chosen == "8bit":
            check_8bit(type(self).__name__)
        if chosen not in known:
            raise ValueError(
                f"overspill: format {chosen!r} does not hold {parameter.dtype} parameters: {', '.join(known)}"
            )
        return chosen

    def _core_kind(self, group: dict[str, Any]) -> str:
        return self._kind

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        """The group's options under the core's names; the core takes those that it knows."""
        hyper = {name: value for name, value in group.items() if name != "params"}
        hyper["lr"] = float(group["lr"])  # may be a tensor
        if "betas" in group:
            hyper["beta1"], hyper["beta2"] = map(float, group["betas"])
        return hyper

    def _start(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Fills the state of a parameter that was never updated."""
        kind, form = self._core_kind(group), self._format(group, parameter)
        specs = _core.components(kind, form, parameter.numel())[1:]
        shape, stride = parameter.shape, parameter.stride()
        for place, (name, number, width, size) in enumerate(specs, 1):
            if number < 0:
                tensor = _apart(shape, stride, _MASTER[form], place)
                if form == "fp16":
                    tensor.copy_(parameter)
            elif width == 1:  # scales follow the codes
                tensor = _apart(torch.Size([size]), (1,), torch.uint8, place)
            else:
                tensor = _apart(shape, stride, torch.bfloat16 if width == 2 else torch.float32, place)
            state[self._names.get(name, name)] = tensor
        components = self._components(kind, form, parameter, state)
        _core.initialize(kind, self._hyper(group), form, components, parameter.numel())
        state["step"] = torch.zeros((), dtype=torch.float64)

    def _components(
        self, kind: str, form: str, parameter: torch.Tensor, state: dict[str, Any]
    ) -> list[tuple[int, int]]:
        tensors = [parameter]
        for name, *_ in _core.components(kind, form, parameter.numel())[1:]:
            tensor = state[self._names.get(name, name)]
            if tensor.shape == parameter.shape and tensor.stride() != parameter.stride():
                tensor = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
                state[self._names.get(name, name)] = tensor  # loaded in another order of memory
            tensors.append(tensor)
        return [_memory(tensor) for tensor in tensors]

    @torch.no_grad()
    def step(self, closure: Callable[..., Any] | None = None, grad_scale: float = 1.0) -> Any:
        """One update of every parameter that has a gradient.

        Args:
            closure: computes the loss and the gradients, with gradients on; called once
            grad_scale: multiplies every gradient, for clipping and loss scaling

        Returns: the closure's loss; None without one.

        Raises: RuntimeError for a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        number = 0
        self._momenta.check(self.param_groups)
        for place, group in enumerate(self.param_groups):
            check_ours(type(self).__name__, group, place)
            kind, hyper = self._core_kind(group), self._hyper(group)
            for parameter in group["params"]:
                number += 1
                if parameter.grad is not None:
                    self._update(group, kind, hyper, parameter, number, grad_scale)
        return loss

    def _update(
        self,
        group: dict[str, Any],
        kind: str,
        hyper: dict[str, Any],
        parameter: torch.Tensor,
        number: int,
        grad_scale: float,
    ) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise RuntimeError(
                "overspill: sparse gradients are not supported; use nn.Embedding(sparse=False), or torch.optim for it"
            )
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
        state, form = self.state[parameter], self._format(group, parameter)
        if "step" not in state:
            if state:  # torch's SGD counts no steps
                state["step"] = torch.ones((), dtype=torch.float64)
            else:
                self._start(group, parameter, state)
        step = int(state["step"].item()) + 1
        _core.update(
            _executor(self.threads),
            kind,
            hyper,
            form,
            self._components(kind, form, parameter, state),
            parameter.numel(),
            group["seed"] * 1_000_003 + number,
            _memory(gradient),
            str(gradient.dtype).removeprefix("torch."),
            step,
            float(grad_scale),
        )
        state["step"] += 1
        state.update(momenta.following(group, step))
        torch.autograd.graph.increment_version(parameter)

    def grad_norm(self) -> torch.Tensor:
        """The 2-norm of all gradients, in double precision; inf where one is not finite."""
        total = 0.0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad if _dense(parameter.grad) else parameter.grad.contiguous()
                squares, finite = _core.squares(_memory(gradient), str(gradient.dtype).removeprefix("torch."))
                total = total + squares if finite else float("inf")
        return torch.tensor(total, dtype=torch.float64).sqrt()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes torch's as well as its own, for fp32 parameters. States keep their own dtypes.

        Args:
            state_dict: what `state_dict` of an optimizer over the same parameters gave

        Raises: ValueError where a state is missing, or of another format.
        """
        own = [self._options(group) for group in self.param_groups]
        for number, group in enumerate(state_dict["param_groups"]):
            for option in NOT_OURS:
                if group.get(option):
                    raise ValueError(
                        f"overspill: group {number} of the state was made with {option}, which overspill.optim does "
                        "not have: load it into torch.optim's class"
                    )
        super().load_state_dict(state_dict)
        self._momenta.forget()
        loaded = state_dict["state"]
        numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for group, options in zip(self.param_groups, own):
            for name, value in options.items():
                group.setdefault(name, value)
        for number, parameter in zip(numbers, parameters):
            for name, value in loaded.get(number, {}).items():
                if isinstance(value, torch.Tensor):  # torch would cast them to the parameter's dtype
                    self.state[parameter][name] = value.detach().clone()
            self._check_state(parameter)
        self._momenta.check(self.param_groups)  # from here on they have to stay

    @staticmethod
    def _options(group: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in group.items() if name != "params"}

    def _check_state(self, parameter: torch.Tensor) -> None:
        group = next(g for g in self.param_groups if any(p is parameter for p in g["params"]))
        state, form = self.state[parameter], self._format(group, parameter)
        if not state:
            return
        if momenta.has(group):
            updates = int(state["step"]) if "step" in state else 0
            momenta.check(
                group, updates, state.get(momenta.NAME), f"a parameter of shape {tuple(parameter.shape)}"
            )
        for name, _, _, size in _core.components(self._core_kind(group), form, parameter.numel())[1:]:
            name = self._names.get(name, name)
            if name not in state:
                raise ValueError(
                    f"overspill: the state has no {name}: it is not that of {form} {type(self).__name__}"
                )
            if _memory(state[name])[1] != size:
                raise ValueError(
                    f"overspill: {name} in the state has {_memory(state[name])[1]} bytes, {form} parameters of shape "
                    f"{tuple(parameter.shape)} need {size}"
                )


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
