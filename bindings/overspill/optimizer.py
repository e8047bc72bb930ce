"""The optimizer that scripts and schedulers see: torch's interface over the engine's own update."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from .config import Optimizer as OptimizerConfig
from .residency import Residency

_SUPPORTED = {torch.optim.Adam: "Adam", torch.optim.AdamW: "AdamW"}
_REFUSED = ("amsgrad", "maximize")


def take_over(optimizer: Any) -> list[dict]:
    """The groups of a user's torch.optim.Adam or AdamW: the same dict objects, so that a scheduler bound to
    it drives the engine.

    Raises TypeError for another class, ValueError for options that the engine does not have.
    """
    kind = type(optimizer)
    if kind not in _SUPPORTED:
        names = " and ".join(f"torch.optim.{name}" for name in _SUPPORTED.values())
        raise TypeError(
            f"overspill: optimizer {kind.__module__}.{kind.__qualname__} is not supported; {names} are"
        )
    if optimizer.state:
        raise ValueError("overspill: this optimizer has made steps already; its state cannot be taken over")
    for group in optimizer.param_groups:
        for option in _REFUSED:
            if group.get(option):
                raise ValueError(f"overspill: torch.optim.{kind.__name__}({option}=True) is not supported")
        group["decoupled"] = kind is torch.optim.AdamW or bool(group.get("decoupled_weight_decay"))
    return optimizer.param_groups


def make_groups(config: OptimizerConfig, parameters: Iterable[Any]) -> list[dict]:
    """Groups of the configured optimizer over parameters, or over dicts with "params" and hyper-parameters
    of their own."""
    items = list(parameters)
    groups = [dict(item) for item in items] if items and isinstance(items[0], dict) else [{"params": items}]
    defaults = {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "weight_decay": config.weight_decay,
        "decoupled": config.type == "AdamW",
    }
    for group in groups:
        unknown = set(group) - set(defaults) - {"params", "name"}
        if unknown:
            raise ValueError(
                f"overspill: parameter group has unknown keys {sorted(unknown)}; known: {sorted(defaults)}"
            )
        group["params"] = [p for p in _list(group["params"]) if p.requires_grad]
        for name, value in defaults.items():
            group.setdefault(name, value)
    return groups


def _list(parameters: Any) -> list:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def group_indices(groups: list[dict], model: nn.Module) -> dict[int, int]:
    """id of each trainable parameter of the model -> its group. Raises ValueError unless each is in exactly
    one."""
    index: dict[int, int] = {}
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            if index.setdefault(id(parameter), number) != number:
                raise ValueError(
                    f"overspill: a parameter is in the groups {index[id(parameter)]} and {number}"
                )
    trainable = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    missing = [name for key, name in trainable.items() if key not in index]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(
            f"overspill: {', '.join(missing[:3])}{more}: trainable, but in no parameter group; "
            "add it, or freeze it with requires_grad_(False)"
        )
    known = {id(p) for p in model.parameters()}
    if any(id(p) not in known for group in groups for p in group["params"]):
        raise ValueError("overspill: the optimizer has parameters that are not the model's")
    return index


class OverspillOptimizer(torch.optim.Optimizer):
    """`param_groups` are read at every step. `step` enqueues the engine's update; moments live in the
    engine, not in `state`."""

    def __init__(self, groups: list[dict], residency: Residency, user: torch.optim.Optimizer | None = None):
        defaults = {name: groups[0][name] for name in ("lr", "betas", "eps", "weight_decay")}
        super().__init__([dict(group) for group in groups], defaults)
        self.param_groups = groups
        self.residency, self.user, self.last_step = residency, user, None

    def step(self, closure: Callable | None = None) -> Any:
        """Returns the closure's loss, if any; the outcome is in `last_step` (step, norm, clip, skipped)."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.last_step = self.residency.core.step([_hyper_parameters(group) for group in self.param_groups])
        self.residency.refresh()
        if self.user is not None:
            self.user._opt_called = True  # what a scheduler bound to the user's optimizer looks for
        return loss

    def expect_step(self) -> None:
        """Tells the engine what the next step will be given, as far as anybody knows now (speculation)."""
        self.residency.core.expect_step([_hyper_parameters(group) for group in self.param_groups])

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.residency.core.clear_gradients()

    def add_param_group(self, param_group: dict) -> None:
        if hasattr(self, "residency"):
            raise RuntimeError("overspill: groups are fixed at overspill.initialize")
        super().add_param_group(param_group)

    def state_dict(self) -> dict:
        """Hyper-parameters only, plain numbers; the engine's checkpoint has the moments."""
        groups = [{k: _plain(v) for k, v in group.items() if k != "params"} for group in self.param_groups]
        return {"groups": groups}

    def load_state_dict(self, state_dict: dict) -> None:
        saved = state_dict["groups"]
        if len(saved) != len(self.param_groups):
            raise ValueError(
                f"overspill: {len(saved)} parameter groups were saved, {len(self.param_groups)} are here"
            )
        for group, values in zip(self.param_groups, saved, strict=True):
            group.update({name: tuple(value) if name == "betas" else value for name, value in values.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, torch.Tensor) else value


def _hyper_parameters(group: dict) -> dict:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    return {
        "lr": float(group["lr"]),
        "beta1": beta1,
        "beta2": beta2,
        "eps": float(group["eps"]),
        "weight_decay": float(group["weight_decay"]),
        "decoupled": bool(group["decoupled"]),
    }
