"""MuAdam, MuAdamW and MuSGD in the JSON: the package mup makes torch's Adam, AdamW or SGD, its groups scaled by the
widths that `mup.set_base_shapes` gave the model's parameters (Yang et al. 2022, arXiv 2203.03466, appendix B)."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from typing import Any

import torch

from ..config import ConfigError

# By lower-case name: mup's maker, and what it makes.
_MAKERS: dict[str, tuple[str, type[torch.optim.Optimizer]]] = {
    "muadam": ("MuAdam", torch.optim.Adam),
    "muadamw": ("MuAdamW", torch.optim.AdamW),
    "musgd": ("MuSGD", torch.optim.SGD),
}


def section_of(data: dict[str, Any]) -> dict[str, Any] | None:
    """The JSON's optimizer, where it is one of mup's."""
    section = data.get("optimizer")
    kind = section.get("type") if isinstance(section, dict) else None
    return section if isinstance(kind, str) and kind.lower() in _MAKERS else None


def make(section: dict[str, Any], parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """Over parameters, or groups of them. Raises ConfigError where mup is missing, has no such argument, or refuses."""
    name, kind = _MAKERS[section["type"].lower()]
    where = f"config: optimizer.type = {section['type']!r}"
    try:
        mup = importlib.import_module("mup")
    except ImportError:
        raise ConfigError(f"{where}: the package mup makes it: pip install mup") from None
    params = section.get("params", {})
    unknown = sorted(section.keys() - {"type", "params", "legacy_fusion"})
    if unknown or not isinstance(params, dict):
        wrong = f"{unknown[0]!r} is unknown" if unknown else f"params = {params!r}: an object is expected"
        raise ConfigError(f"{where}: {wrong}: give type and params alone")
    given = {"lr": inspect.signature(kind).parameters["lr"].default}  # mup needs one
    given |= {key: value for key, value in params.items() if value != "auto"}
    try:
        made: torch.optim.Optimizer = getattr(mup, name)(list(parameters), **given)
    except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: mup: {error}") from None
    made.param_groups[:] = [group for group in made.param_groups if group["params"]]
    return made
