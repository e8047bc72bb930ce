"""A state dict that an engine's optimizer is given: whether it fits the groups here, and what of it is taken."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from . import momenta, moments
from .groups import REFUSED, Groups, plain
from .optim.options import NOT_OURS

# Of a group that is loaded: these are as they are here.
_STAY = ("params", "param_names", "name", "decoupled", "decoupled_weight_decay", "format", "seed")


def check_form(state_dict: dict[str, Any]) -> None:
    """Raises ValueError for what no `state_dict` gave."""
    groups, states = state_dict["param_groups"], state_dict["state"]
    if not isinstance(groups, (list, tuple)) or not all(
        isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple)) for group in groups
    ):
        raise ValueError(
            f"overspill: param_groups of this state dict: {groups!r:.60}; a list of dicts with params is expected: "
            "load what state_dict gave"
        )
    if not isinstance(states, Mapping):
        raise ValueError(
            f"overspill: state of this state dict is a {type(states).__name__}, not a dict: load what state_dict gave"
        )


def merged(taken: Groups, here: list[dict[str, Any]], saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The saved groups' hyper-parameters, as the groups get them. `taken`: what initialize was given, `here`: its
    groups today. Raises ValueError where they do not fit."""
    if len(saved) != len(here):
        raise ValueError(
            f"overspill: {len(saved)} parameter groups were saved, {len(here)} are here: "
            "give initialize the groups that it was saved with"
        )
    found = []
    for number, (group, values) in enumerate(zip(here, saved, strict=True)):
        _check_group(number, group, values)
        stay = [name for name in _STAY if not (momenta.has(group) and name == "decoupled_weight_decay")]
        found.append({name: value for name, value in values.items() if name not in stay})
        _check_kinds(number, group, found[-1])
        taken.hyper_parameters(group | found[-1], number)
    return found


def _check_group(number: int, group: dict[str, Any], saved: dict[str, Any]) -> None:
    count = len(saved["params"])
    if count != len(group["params"]):
        raise ValueError(
            f"overspill: group {number} has {count} parameters in the state dict, {len(group['params'])} here: "
            "give initialize the groups that it was saved with"
        )
    for option in (*REFUSED, *NOT_OURS):
        if saved.get(option):
            raise ValueError(
                f"overspill: group {number} of the state dict has {option}=True, which the engine's optimizers do not "
                "have: save it from an optimizer without it"
            )
    if "decoupled" in group:
        theirs = saved.get("decoupled", saved.get("decoupled_weight_decay", group["decoupled"]))
        if bool(theirs) != bool(group["decoupled"]):
            kinds = ("AdamW", "Adam") if theirs else ("Adam", "AdamW")
            raise ValueError(
                f"overspill: the state dict is that of {kinds[0]}, this optimizer is {kinds[1]}: "
                "their weight decay differs. Give initialize the optimizer that made it"
            )
    names = moments.names_of(group)
    for theirs, ours in zip(saved.get("param_names") or names, names, strict=True):
        if ours is not None and theirs is not None and theirs != ours:
            raise ValueError(
                f"overspill: the state dict has {theirs} where {ours} is here: the groups are those of another model, "
                "or in another order; where only the names differ, remove param_names from its groups"
            )


def _check_kinds(number: int, group: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raises ValueError where a hyper-parameter that the engine takes has no value that a step could use."""
    for name, value in saved.items():
        here, there = _numbers(group.get(name)), _numbers(value)
        if here is not None and (there is None or len(there) != len(here)):
            raise ValueError(
                f"overspill: group {number} of the state dict has {name} = {value!r:.60}, which is "
                f"{group[name]!r:.60} here: the state dict is damaged, or of another optimizer"
            )


def _numbers(value: Any) -> list[float] | None:
    """The finite numbers that a hyper-parameter is, None where it is anything else."""
    values = plain(value)
    values = values if isinstance(values, list) else [values]
    numbers = [v for v in values if type(v) in (int, float) and math.isfinite(v)]
    return numbers if values and len(numbers) == len(values) else None


def renumbered(state_dict: dict[str, Any]) -> dict[int, Any]:
    """The states by the place of their parameter in the groups, whatever numbers the state dict gives them."""
    numbers = [key for group in state_dict["param_groups"] for key in group["params"]]
    places = {key: place for place, key in enumerate(numbers)}
    return {places.get(key, key): entry for key, entry in state_dict["state"].items()}
