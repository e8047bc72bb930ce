"""Weights that a block of the script's gathers beside the budgets, for many forwards in a row: each lies in memory of
torch's, and nothing is read again until the block ends."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from . import leases
from .memory import free_bytes, human
from .residency import Residency
from .segments import Unit


def taker(owner: Residency, units: Iterable[Unit]) -> leases.Take:
    """How a block takes `units`. Raises MemoryError where they have no room beside the budgets."""
    nearest = "host" if owner.place.on_host else "device"
    homes = [
        {tier for tier, size in each["weights_bytes"].items() if size}
        for each in owner.core.plan.as_dict()["units"]
    ]
    used_in_place = {
        i
        for i, home in enumerate(homes)
        if home == {nearest} and owner.gradients.ranks == 1 and owner.units[i].packing is None
    }
    needed = sum(s.bytes for unit in units if unit.index not in used_in_place for s in unit.segments)
    if owner.place.on_host and needed > (available := free_bytes()):
        raise MemoryError(
            f"overspill: engine.gathered(beyond_budget=True) needs {human(needed)} beside the budgets, and "
            f"{human(available)} are available: gather fewer parameters, or leave the block out, and each forward "
            "gathers every layer once"
        )

    def take(unit: Unit) -> torch.Tensor:
        return (leases.acquire if unit.index in used_in_place else leases.acquire_copy)(unit)

    return take
