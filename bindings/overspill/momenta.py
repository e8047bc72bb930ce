"""NAdam's product of momenta. Torch keeps it as a state, `mu_product`, of each parameter; here it follows from the
parameter's number of updates and from its group's options, which therefore have to stay as they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ._core import optim as _core

NAME = "mu_product"
_NARROW = (torch.bfloat16, torch.float16)
_TOLERANCE = 1e-4  # torch multiplies in fp32


def has(group: Mapping[str, Any]) -> bool:
    """Whether the group is NAdam's."""
    return "momentum_decay" in group


def product(group: Mapping[str, Any], updates: int) -> float:
    """The product of the momenta of all updates so far; 1 before the first. Once it is below 2^-60 it changes nothing,
    and is computed no further."""
    return _core.product_of_momenta(float(group["betas"][0]), float(group["momentum_decay"]), updates)


def following(group: Mapping[str, Any], updates: int) -> dict[str, torch.Tensor]:
    """As torch has it among a parameter's states; empty for other optimizers than NAdam."""
    return {NAME: scalar(product(group, updates))} if has(group) else {}


def scalar(value: float) -> torch.Tensor:
    """A count or a product among states, in the dtype that torch's optimizers give it."""
    wide = torch.get_default_dtype() is torch.float64
    return torch.tensor(value, dtype=torch.float64 if wide else torch.float32)


def check(group: Mapping[str, Any], updates: int, given: Any, of: str) -> None:
    """Raises ValueError where the product that was `given` does not follow from the group. `of`: the parameter."""
    expected = product(group, updates)
    try:
        value = float(given)
    except (TypeError, ValueError, RuntimeError):
        value = math.nan
    tolerance = _TOLERANCE
    if isinstance(given, torch.Tensor) and given.dtype in _NARROW:  # torch's load_state_dict rounds it so
        tolerance = min((updates + 1) * torch.finfo(given.dtype).eps, 0.5)
    if not math.isclose(value, expected, rel_tol=tolerance, abs_tol=1e-9):
        raise ValueError(
            f"overspill: {NAME} of {of} is {given!r:.60}; {updates} updates with betas[0] = {group['betas'][0]} and "
            f"momentum_decay = {group['momentum_decay']} make {expected:g}. Overspill's update of NAdam needs both to "
            "stay as they were from the first update on: give the group those, or train on without these states"
        )


class Watch:
    """Remembers each group's betas[0] and momentum_decay, from which its product follows."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, float]] = {}

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raises ValueError where an option has changed since the first call, or since `forget`."""
        for number, group in enumerate(groups):
            if not has(group):
                continue
            now = float(group["betas"][0]), float(group["momentum_decay"])
            before = self._seen.setdefault(number, now)
            if now != before:
                raise ValueError(
                    f"overspill: parameter group {number} of NAdam has betas[0] = {now[0]} and momentum_decay = "
                    f"{now[1]}, and had {before[0]} and {before[1]}: Overspill computes the product of all momenta "
                    "from them, so they have to stay as they are while it trains. Schedule lr alone (OneCycleLR and "
                    "CyclicLR: cycle_momentum=False), or give overspill.initialize a subclass of torch.optim.NAdam, "
                    "which runs its own code"
                )

    def forget(self) -> None:
        """Called when states and groups of another run are loaded."""
        self._seen.clear()
