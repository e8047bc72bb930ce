"""How an engine is the nn.Module that it stands for: whatever torch and frameworks ask of a module, its module
answers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, ClassVar, Self, TypeVar

from torch import nn

Kind = TypeVar("Kind", bound="type[StandIn]")
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

    def __get__(self, engine: Any, kind: type) -> Any:
        if engine is None:
            return getattr(nn.Module, self.name)
        module = engine.module
        method = getattr(module, self.name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = method(*args, **kwargs)
            return self if found is module else found

        functools.update_wrapper(call, getattr(method, "__func__", method))
        return MethodType(call, engine)


def _special(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = getattr(self.module, name)(*args, **kwargs)
        return self if found is self.module else found

    method.__name__ = method.__qualname__ = name
    return method


class StandIn(nn.Module):
    """What `module` is: all attributes, methods and parts but the object's own are the module's, also where they are
    set. A child names the attributes that its objects have in `_attributes`, and is decorated with `stands_in`."""

    _attributes: ClassVar[frozenset[str]]
    _own_names: ClassVar[frozenset[str]]
    module: nn.Module

    def __new__(cls, model: nn.Module, *args: Any, **kwargs: Any) -> Self:
        made: Self = object.__new__(class_for(cls, type(model)))
        return made

    def __getattr__(self, name: str) -> Any:
        if name in self._attributes:  # not yet there
            raise AttributeError(f"overspill: the engine has no {name}")
        try:
            return getattr(self.module, name)
        except AttributeError:
            kind = type(self.module).__name__
            raise AttributeError(f"overspill: neither the engine nor its {kind} has {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if value is self:
            raise ValueError(f"overspill: engine.{name} = engine: a model cannot be a part of itself")
        is_part = isinstance(value, (nn.Parameter, nn.Module))
        if name in self._attributes or (name in self._own_names and not is_part):
            object.__setattr__(self, name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            object.__delattr__(self, name)
        else:
            delattr(self.module, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.module)})

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Copies the model alone, without the engine."""
        return copy.deepcopy(self.module, memo)

    def __copy__(self) -> Any:
        raise TypeError(
            "overspill: two engines cannot hold the same weights: copy.deepcopy(engine) is a model of its own"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle has the model alone, as one of its class; a run's states are in its checkpoints."""
        return self.module.__reduce_ex__(1)  # later protocols name the class of what is pickled

    def train(self, mode: bool = True) -> Self:
        """As nn.Module's.

        Args:
            mode: False is `eval`

        Raises: nothing of its own.
        """
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """As nn.Module's: dropout and the like stand still."""
        return self.train(False)


def stands_in(cls: Kind) -> Kind:
    """A class decorator, of a StandIn: methods of nn.Module that neither the class nor its parents up to there have are
    those of `module`. `_own_names` has the names that they have."""
    own = [each for each in cls.__mro__ if not issubclass(nn.Module, each)]
    cls._own_names = frozenset(name for each in own for name in vars(each))
    for name in dir(nn.Module):
        is_method = callable(getattr(nn.Module, name)) and not name.startswith("__")
        if is_method and name not in cls._own_names and name not in _CALLS:
            setattr(cls, name, _OfModule(name))
    return cls


def class_for(cls: type[StandIn], kind: type) -> Any:
    """A child of `cls` whose special methods (`engine[0]`, `len(engine)`) are those that `kind`, a class of modules,
    has beyond nn.Module's: Python looks for them in the class alone. `cls` itself where there are none."""
    own = [each for each in kind.__mro__ if not issubclass(nn.Module, each)]
    names = {
        name
        for each in own
        for name, value in vars(each).items()
        if name.startswith("__") and name.endswith("__") and callable(value)
    }
    names -= _NOT_ASKED | cls._own_names | {name for name in vars(nn.Module) if name.startswith("__")}
    if not names:
        return cls
    namespace = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {name: _special(name) for name in names} | namespace)
