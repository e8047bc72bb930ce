"""A script's own optimizer becomes an engine's: its groups, the states of one that has stepped, and of which the engine
has no update."""

from __future__ import annotations

from typing import Any

import torch

from . import giving, moments, optim, script_optimizer
from .groups import REFUSED, Groups, has_float64
from .optim.options import NOT_OURS
from .optimizer import OverspillOptimizer

_NAMES = ("AdamW", "Adam", "Adagrad", "SGD", "RMSprop", "NAdam", "Adamax", "Adadelta")
_TORCH = tuple(getattr(torch.optim, name) for name in _NAMES)
_OWN = (*(getattr(optim, name) for name in _NAMES), optim.Lion)


def take_over(optimizer: Any) -> Groups:
    """The groups of a user's optimizer, of torch.optim or overspill.optim: the same dict objects, so that a scheduler
    bound to it drives the engine.

    Raises TypeError for what is no optimizer of torch, ValueError for options that nobody here has.
    """
    kind = type(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"overspill: optimizer {kind.__module__}.{kind.__qualname__} is not supported: give an optimizer of "
            "torch.optim or overspill.optim, a child of torch.optim.Optimizer, or a list of such"
        )
    if isinstance(optimizer, OverspillOptimizer):
        raise TypeError(
            "overspill: this optimizer is the one that overspill.initialize returned, and belongs to its engine: give "
            "the optimizer that was given to it, which has the states after engine.give_back(), or a new one of torch"
        )
    script_optimizer.check(optimizer)
    groups = optimizer.param_groups
    for group in groups:
        for option in REFUSED:
            if group.get(option):
                raise ValueError(f"overspill: {_name(kind)}({option}=True) is not supported")
    if (foreign := foreign_update(kind, groups)) is not None:
        return Groups(kind.__name__, groups, foreign=foreign)
    found = _known(optimizer, kind, groups)
    for number, group in enumerate(groups):
        found.hyper_parameters(group, number)
    found.taken = _states_to_take(optimizer, found) or None
    return found


def _states_to_take(optimizer: torch.optim.Optimizer, found: Groups) -> dict[int, dict[str, Any]]:
    """By the place of the parameter. Raises ValueError for what is no state of it."""
    names, states = found.states(), {}
    for number, (group, p) in enumerate((each, p) for each in found.groups for p in each["params"]):
        if not (p.requires_grad and p.numel()):
            state = optimizer.state.get(p, {})  # stays as it is
        else:
            state = _usable(moments.present(giving.exact(optimizer, p)), set(names.values()))
            state = moments.with_buffer(state, names, group)
            if state:
                moments.check_entry(f"parameter {number} of the {found.kind}", p.shape, state, names, group)
        if state and not (found.kind == "Adagrad" and _is_adagrads_start(found.groups, p, state)):
            states[number] = state
    return states


def _usable(state: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """SGD's momentum may have come or gone since: torch makes the buffer anew, or leaves it alone."""
    if names == {"momentum_buffer"} and "momentum_buffer" not in state:
        return {}
    return state if names else {name: value for name, value in state.items() if name != "momentum_buffer"}


def _is_adagrads_start(groups: list[dict[str, Any]], parameter: torch.Tensor, state: dict[str, Any]) -> bool:
    """Torch's Adagrad has states before its first step."""
    if "sum" not in state or _steps(state):
        return False
    group = next(group for group in groups if any(p is parameter for p in group["params"]))
    return bool((state["sum"] == group.get("initial_accumulator_value", 0.0)).all())


def _steps(state: dict[str, Any]) -> float:
    return float(state.get("step", 0.0))


def foreign_update(kind: type, groups: list[dict[str, Any]]) -> str | None:
    """Names what the engine has no update for in an optimizer of that class with these groups; None if it has all."""
    if kind not in (*_TORCH, *_OWN) or (kind in _TORCH and not script_optimizer.has_torchs_step(kind)):
        return f"{kind.__module__}.{kind.__qualname__}"
    used = [option for option in NOT_OURS if any(group.get(option) for group in groups)]
    if used:
        return f"{_name(kind)} with {used[0]}"
    return "float64 weights" if has_float64(groups) else None


def _known(optimizer: torch.optim.Optimizer, kind: type, groups: list[dict[str, Any]]) -> Groups:
    for group in groups:
        if kind in (torch.optim.AdamW, torch.optim.Adam, optim.AdamW, optim.Adam):
            group["decoupled"] = kind.__name__ == "AdamW" or bool(group.get("decoupled_weight_decay"))
    if kind in _TORCH:
        return Groups(kind.__name__, groups)
    return Groups(kind.__name__, groups, _common(groups, "format"), _common(groups, "seed"))


def _name(kind: type) -> str:
    return f"{'torch' if kind in _TORCH else 'overspill'}.optim.{kind.__name__}"


def _common(groups: list[dict[str, Any]], option: str) -> Any:
    values = {group[option] for group in groups}
    if len(values) > 1:
        raise ValueError(f"overspill: parameter groups differ in {option}: {values}; an engine has one")
    return values.pop()
