"""The class of a parameter while it is released: a child of its own class that asks before torch reads it. What is
asked is released.py's, which puts itself in as `ask`; this module knows nothing of units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def _ask(func: Callable, args: tuple, kwargs: dict) -> Any:
    raise NotImplementedError


ask = _ask  # what torch is about to do to parameters that are released


def torch_function(
    cls: type, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
) -> Any:
    return ask(func, args, kwargs or {})


_released_classes: dict[type, type] = {}


def released_class(kind: type) -> type:
    """The class of a released parameter whose own class is `kind`: a child of it; `kind` itself where that is no child
    of nn.Parameter, such as DTensor, or looks at functions itself."""
    if not issubclass(kind, nn.Parameter) or kind.__torch_function__ is not nn.Parameter.__torch_function__:
        return kind
    if kind not in _released_classes:
        namespace = {
            "__torch_function__": classmethod(torch_function),
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
        }
        _released_classes[kind] = type(kind)(kind.__name__, (kind,), namespace)
    return _released_classes[kind]


def is_released_class(kind: type) -> bool:
    return kind in _released_classes.values()
