"""The states of the global random generators, from which a forward may draw, so that it can be made again, or in turn
with others."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from .place import Place


class Draws:
    """States of torch's generator, of Python's `random`, of numpy's where it is loaded, and of the device's."""

    def __init__(self, where: Place, seed: int | None = None):
        """Those of now, or fresh ones."""
        self.where = where
        self._states = _now(where) if seed is None else _fresh(where, seed)

    def restore(self) -> None:
        for name, state in self._states.items():
            if name == "torch":
                torch.set_rng_state(state)
            elif name == "device":
                self.where.generators().set_rng_state(state, self.where.device)
            elif name == "python":
                random.setstate(state)
            else:
                sys.modules["numpy"].random.set_state(state)

    def forget_unmoved(self) -> None:
        """Keeps the states of those generators that something has drawn from since."""
        now = _now(self.where)
        self._states = {
            name: state for name, state in self._states.items() if not _same(state, now.get(name))
        }

    def now(self) -> Draws:
        """The states of the same generators, as they are now."""
        found = Draws(self.where)
        found._states = {name: found._states[name] for name in self._states}
        return found


def _now(where: Place) -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = numpy.random.get_state()
    if (module := where.generators()) is not None:
        states["device"] = module.get_rng_state(where.device)
    return states


def _fresh(where: Place, seed: int) -> dict[str, Any]:
    states: dict[str, Any] = {
        "torch": torch.Generator().manual_seed(seed).get_state(),
        "python": random.Random(seed).getstate(),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = numpy.random.RandomState(seed % 2**32).get_state()
    if where.generators() is not None:
        states["device"] = torch.Generator(where.device).manual_seed(seed).get_state()
    return states


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple) and any(hasattr(part, "tobytes") for part in one):  # numpy's
        return all(_plain(part) == _plain(that) for part, that in zip(one, other, strict=True))
    return bool(one == other)


def _plain(part: Any) -> Any:
    return part.tobytes() if hasattr(part, "tobytes") else part
