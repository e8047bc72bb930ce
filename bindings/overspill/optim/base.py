"""What the optimizers for plain CPU tensors have in common: groups, states, and a step by the engine's update."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from .. import momenta
from .._core import optim as _core
from .options import NOT_OURS, check, check_8bit, check_ours

_FORMATS = {
    torch.float32: ("fp32",),
    torch.bfloat16: ("exact", "compact", "8bit"),
    torch.float16: ("fp16",),
}
_MASTER = {"exact": torch.int16, "compact": torch.int16, "8bit": torch.int8, "fp16": torch.float32}
_executors: dict[int, Any] = {}  # by number of threads; made once, idle until called


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
    """What the optimizers of this package have in common. `grad_scale` multiplies every gradient of the next step, for
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
        check(type(self).__name__, of_torch)
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
