"""Parameter groups of an engine's optimizer: as a configuration makes them, as the core takes them, and whether they
fit the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from . import _core, optim
from .config.optimizers import unusable_number
from .optim.options import check_8bit, check_ours
from .parts import Part

REFUSED = ("differentiable",)  # options of torch's optimizers that no engine has
CORE_WITH_MOMENTUM = {"SGD": ("sgd", "momentum"), "RMSprop": ("rmsprop", "rmsprop_momentum")}


class Groups:
    """Parameter groups and what they belong to. `kind` is torch's name of the optimizer, `core` the core's; `format`
    and `seed` are those of an optimizer of overspill.optim. `foreign` names what the engine has no update for, so the
    optimizer's own code makes the steps (foreign.py). `taken`: states of an optimizer that has stepped, by the index of
    their parameter."""

    def __init__(
        self,
        kind: str,
        groups: list[dict[str, Any]],
        format: str | None = None,
        seed: int | None = None,
        foreign: str | None = None,
    ):
        self.kind, self.groups, self.format, self.seed = kind, groups, format, seed
        self.foreign = foreign
        self.part: Part | None = None  # of one of several optimizers
        self.taken: dict[str, Any] | None = None
        if foreign:
            self.core = "sgd"
        elif kind in CORE_WITH_MOMENTUM:
            # Groups share a layout: one with momentum gives all of them a buffer.
            self.core = CORE_WITH_MOMENTUM[kind][any(float(group["momentum"]) for group in groups)]
        else:
            self.core = getattr(optim, kind)._kind

    def hyper_parameters(self, group: dict[str, Any], number: int) -> dict[str, Any]:
        """A group as the core takes it, plain numbers; it looks for what its optimizer has. Raises ValueError where an
        update could not use them."""
        hyper = {name: plain(value) for name, value in group.items() if name != "params"}
        _check_numbers(self.kind, group, number)
        check_ours(self.kind, group, number)
        hyper["optimizer"] = self.core
        if "betas" in hyper:
            hyper["beta1"], hyper["beta2"] = hyper["betas"]
        if self.core in ("sgd", "rmsprop") and hyper["momentum"]:
            raise ValueError(
                f"overspill: momentum = {group['momentum']} came after overspill.initialize, which found none and "
                "made no buffers for it: make what sets it (a scheduler such as OneCycleLR) before initialize"
            )
        return hyper

    def states(self) -> dict[str, str]:
        """The core's names of the optimizer's states -> torch's."""
        names = getattr(optim, self.kind)._names
        held = _core.optim.components(self.core, "fp32", 1)
        return {name: names.get(name, name) for name, number, *_ in held if number >= 0}


def has_float64(groups: list[dict[str, Any]]) -> bool:
    return any(p.dtype is torch.float64 for group in groups for p in group["params"])


def make_groups(config: Any, parameters: Iterable[Any]) -> Groups:
    """Groups of the configured optimizer over parameters, or over dicts with "params" and hyper-parameters
    of their own. As in torch, parameters may come with their names (model.named_parameters()); the model knows them.
    Raises TypeError for what is no parameter."""
    items = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if items and isinstance(items[0], dict):
        for number, item in enumerate(items):
            if not isinstance(item, dict):
                raise TypeError(
                    f"overspill: model_parameters has {item!r:.60} at place {number}, a {type(item).__name__}, among "
                    "groups: put it into the params of one"
                )
        groups = [dict(item) for item in items]
    else:
        groups = [{"params": items}]
    defaults = config.model_dump(exclude={"type"})
    if config.type in ("AdamW", "Adam"):
        defaults["decoupled"] = config.type == "AdamW"
    for number, group in enumerate(groups):
        if "params" not in group:
            raise ValueError(
                f"overspill: parameter group {number} of model_parameters has no params: it has {sorted(group)}; add "
                "params, a list of parameters"
            )
        unknown = set(group) - set(defaults) - {"params", "name"}
        if unknown:
            raise ValueError(
                f"overspill: parameter group has unknown keys {sorted(unknown)}; known: {sorted(defaults)}"
            )
        group["params"] = [p for p in _unnamed(group["params"]) if p.requires_grad]
        for name, value in defaults.items():
            group.setdefault(name, value)
        _check_numbers(config.type, group, number, scheduled=False)
    return Groups(config.type, groups)


def _check_numbers(kind: str, group: dict[str, Any], number: int, scheduled: bool = True) -> None:
    """Raises ValueError that names a number of the group, of an optimizer of that name, which no update can use."""
    for name, value in group.items():
        if name != "params" and (why := unusable_number(kind, name, plain(value), scheduled)):
            raise ValueError(f"overspill: parameter group {number} has {name} = {value!r:.60}: {why}")


def unit_format(own: str, chosen: str | None) -> str:
    """The core's format of a unit: `own` is what units.py found, `chosen` the format of bf16 weights."""
    if own == "float64":
        return "frozen"
    return (chosen or "exact") if own == "bf16_split" else own


def choose_format(config: str | None, groups: Groups, formats: Iterable[str]) -> str | None:
    """The format of bf16 weights: the configuration's or the user's own optimizer's. `formats` are the units'. Raises
    ValueError where the two differ, or where no weight can have it."""
    if None not in (config, groups.format) and config != groups.format:
        raise ValueError(
            f"overspill: format is {config!r} in the configuration, {groups.format!r} in the optimizer"
        )
    chosen = config or groups.format
    known = set(formats)
    if chosen == "fp32" and "bf16_split" not in known:  # of an overspill.optim over fp32 weights
        return None
    if chosen == "fp16" and "fp16" in known and "bf16_split" not in known:  # of an overspill.optim
        return None
    if chosen == "8bit":
        check_8bit(groups.kind)
    if chosen is not None and (chosen not in ("exact", "compact", "8bit") or "bf16_split" not in known):
        raise ValueError(
            f"overspill: format {chosen!r} holds {'fp16' if chosen == 'fp16' else 'bf16'} weights, and none of the "
            f"model's trainable ones are; make it with model.{'half' if chosen == 'fp16' else 'bfloat16'}(), or leave "
            "format out"
        )
    return chosen


def _unnamed(given: Any) -> list[torch.Tensor]:
    parameters = [
        item[1] if isinstance(item, tuple) and len(item) == 2 else item
        for item in ([given] if isinstance(given, torch.Tensor) else given)
    ]
    for number, parameter in enumerate(parameters):
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(
                f"overspill: model_parameters has {parameter!r:.60} at place {number}, a {type(parameter).__name__}: "
                "give parameters, pairs of a name and a parameter, or groups (dicts with params)"
            )
    return parameters


def group_indices(groups: list[dict[str, Any]], model: nn.Module) -> dict[int, int]:
    """id of each trainable parameter of the model -> its group. Raises ValueError unless each is in exactly
    one."""
    index: dict[int, int] = {}
    known = {id(p): name for name, p in model.named_parameters()}
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            if index.setdefault(id(parameter), number) != number:
                raise ValueError(
                    f"overspill: {known.get(id(parameter), 'a parameter')} is in two parameter groups, "
                    f"{index[id(parameter)]} and {number} (of several optimizers, counted through): leave it in one; "
                    "tied weights are one parameter"
                )
    trainable = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    missing = [name for key, name in trainable.items() if key not in index]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(
            f"overspill: {', '.join(missing[:3])}{more}: trainable, but in no parameter group; add a group with it, "
            "freeze it with requires_grad_(False), or give initialize a list of optimizers where another one has it"
        )
    strange = [p for group in groups for p in group["params"] if id(p) not in known]
    if strange:
        raise ValueError(
            "overspill: the optimizer has parameters that are not the model's (one of shape "
            f"{tuple(strange[0].shape)}): of several models make one, nn.ModuleList([a, b]), "
            "and give that to initialize; make a parameter the model's own, model.name = nn.Parameter(...)"
        )
    return index


def plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return value.item() if isinstance(value, torch.Tensor) else value
