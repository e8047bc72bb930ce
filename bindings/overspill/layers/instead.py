"""What stands in a module's `__dict__` for its forward: blocks that are computed again (recompute.py), compiled blocks
(compiled.py), layers whose logits are made in tiles (logits.py). One may lie over another."""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable

from torch import nn


class Instead:
    """`replaced`: what was there before, of the script's or another of these."""

    def __init__(self, name: str, module: nn.Module):
        self.name = name
        self.module = weakref.ref(module)
        self.replaced = module.__dict__.get("forward")
        self.__signature__ = inspect.signature(module.forward)

    def forward(self, module: nn.Module) -> Callable:
        return self.replaced or types.MethodType(type(module).forward, module)
