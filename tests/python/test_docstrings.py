"""Every public name says what it takes, in which shape, unit and dtype, and what it raises."""

import inspect
import re
import types

import pytest
from torch import nn

import overspill
from overspill import parts, plan
from overspill.optimizer import OverspillOptimizer

# What scripts get without naming a class.
GIVEN = {"plan.Unit": plan.Unit, "plan.Tiers": plan.Tiers, "parts.Several": parts.Several}
GIVEN["optimizer.OverspillOptimizer"] = OverspillOptimizer
# Of OverspillOptimizer and Several, what scripts call; the rest is the engine's.
CALLED = {"step", "zero_grad", "state_dict", "load_state_dict", "param_groups", "last_step", "state"}


def own(kind: type) -> dict[str, object]:
    """Public methods and properties that Overspill defines."""
    found = {}
    for name in dir(kind):
        value = inspect.getattr_static(kind, name)
        value = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        home = value.fget if isinstance(value, property) else value
        if name.startswith("_") or not getattr(home, "__module__", "").startswith("overspill"):
            continue
        if isinstance(value, (property, types.FunctionType)):
            found[name] = value
    return found


def own_kinds(optim: types.ModuleType) -> dict[str, type]:
    return {
        name: kind
        for name, kind in vars(optim).items()
        if isinstance(kind, type) and issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer
    }


def public() -> dict[str, object]:
    found: dict[str, object] = {name: getattr(overspill, name) for name in overspill.__all__}
    optim = found.pop("optim")
    found |= {f"optim.{name}": value for name, value in own_kinds(optim).items()}
    found |= GIVEN
    for name, value in list(found.items()):
        if not isinstance(value, type) or issubclass(value, BaseException):
            continue
        methods = own(value)
        if value in (OverspillOptimizer, parts.Several):
            methods = {method: what for method, what in methods.items() if method in CALLED}
        if issubclass(value, overspill.Config):
            methods = {"read": methods["read"]}
        found |= {f"{name}.{method}": what for method, what in methods.items()}
    return found


PUBLIC = public()


def arguments(value: object) -> list[str]:
    """Of a function, without self; of a class, of what makes it."""
    if isinstance(value, type):
        if value.__init__ in (object.__init__, nn.Module.__init__) or not isinstance(
            value.__init__, types.FunctionType
        ):
            return []
        value = value.__init__
    if not isinstance(value, types.FunctionType):
        return []
    known = inspect.signature(value).parameters
    return [
        name
        for name, parameter in known.items()
        if name not in ("self", "cls")
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def wanting(name: str, value: object) -> list[str]:
    """What its docstring lacks."""
    text = inspect.getdoc(value) or ""
    if not text:
        return ["a docstring"]
    if isinstance(value, type) and (issubclass(value, BaseException) or value in made_by_overspill()):
        return []
    missing = []
    for argument in arguments(value):
        if not re.search(rf"^\s+{argument}: ", text, re.MULTILINE):
            missing.append(f"{argument} in Args")
    if arguments(value) and "Raises" not in text:
        missing.append("Raises")
    return missing


def made_by_overspill() -> set[type]:
    """Scripts get them, and make none; or make them as the reference of the configuration says."""
    return {overspill.Engine, overspill.Config, plan.Plan, plan.Unit, plan.Tiers, parts.Several} | {
        OverspillOptimizer,
        overspill.Initialized,
        overspill.Merged,
    }


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_documented(name):
    assert not wanting(name, PUBLIC[name])


def test_all_of_the_engine_is_looked_at():
    assert {"Engine.backward", "Engine.plan", "Engine.save_pretrained", "optim.AdamW.step"} <= PUBLIC.keys()
    assert {
        "initialize",
        "merge",
        "Init",
        "Config.read",
        "plan.Unit.home",
        "parts.Several.step",
    } <= PUBLIC.keys()
    assert len(PUBLIC) > 60


def test_a_docstring_that_lacks_something_is_found():
    def bare(one, two=0):
        """Takes two.

        Args:
            one: a number
        """

    assert wanting("bare", bare) == ["two in Args", "Raises"]
    bare.__doc__ = None
    assert wanting("bare", bare) == ["a docstring"]
