"""How an engine is the nn.Module that it stands for: whatever torch and frameworks ask of a module, its module
answers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

# Of a call: the engine has its own.
_CALLS = {"_call_impl", "_wrapped_call_impl", "_slow_forward", "forward"}
# What Python asks of an object about itself.
_NOT_ASKED = {"__init__", "__new__", "__init_subclass__", "__class_getitem__", "__del__", "__getattribute__"}
_NOT_ASKED |= {"__eq__", "__ne__", "__hash__", "__torch_function__"}


class _OfModule:
    """A method of the module's, as it is when a script takes it: a wrapper that the script puts in its place may call
    what it took. What gives the module gives the engine."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, engine: Any, kind: type) -> Callable:
        if engine is None:
            return getattr(nn.Module, self.name)
        module = engine.module
        method = getattr(module, self.name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = method(*args, **kwargs)
            return self if found is module else found

        functools.update_wrapper(call, getattr(method, "__func__", method))
        return MethodType(call, engine)


def _special(name: str) -> Callable:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = getattr(self.module, name)(*args, **kwargs)
        return self if found is self.module else found

    method.__name__ = method.__qualname__ = name
    return method


def stands_in(cls: type) -> type:
    """A class decorator: methods of nn.Module that the class does not have itself are those of `module`. `_own_names`
    has the names that the class has itself."""
    cls._own_names = frozenset(vars(cls))
    for name in dir(nn.Module):
        is_method = callable(getattr(nn.Module, name)) and not name.startswith("__")
        if is_method and name not in cls._own_names and name not in _CALLS:
            setattr(cls, name, _OfModule(name))
    return cls


def class_for(cls: type, kind: type) -> type:
    """A child of `cls` whose special methods (`engine[0]`, `len(engine)`) are those that `kind`, a class of modules,
    has beyond nn.Module's: Python looks for them in the class alone. `cls` itself where there are none."""
    own = [each for each in kind.__mro__ if not issubclass(nn.Module, each)]
    names = {
        name
        for each in own
        for name, value in vars(each).items()
        if name.startswith("__") and name.endswith("__") and callable(value)
    }
    names -= _NOT_ASKED | set(vars(cls)) | {name for name in vars(nn.Module) if name.startswith("__")}
    if not names:
        return cls
    namespace = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {name: _special(name) for name in names} | namespace)
