"""deepspeed.utils: which modules are marked as leaves of ZeRO-3. Nothing depends on the mark here, since units are
found by what forward uses; it is kept, and answered."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from .json_models import DeepSpeedZeroLeafModuleConfig

_MARK = "_z3_leaf"


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether this module is marked."""
    return bool(vars(model).get(_MARK, False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked ones in it, itself too."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def _is_of(module: nn.Module, kinds: tuple[Any, ...]) -> bool:
    kind = type(module)
    names = kind.__name__, f"{kind.__module__}.{kind.__qualname__}"
    return any(isinstance(module, each) if isinstance(each, type) else each in names for each in kinds)


def _mark(model: nn.Module, kinds: Iterable[Any], leaf: bool, raise_if_not_found: bool) -> list[nn.Module]:
    kinds = tuple(kinds)
    wrong = [each for each in kinds if not isinstance(each, (type, str))]
    if wrong:
        raise AssertionError(
            f"overspill: leaf modules: {wrong[0]!r:.60}: a class or the name of one is expected"
        )
    found = [module for module in model.modules() if _is_of(module, kinds)]
    if not found and raise_if_not_found:
        raise ValueError(f"overspill: {type(model).__name__} has no module of {list(kinds)!r:.200}")
    for module in found:
        setattr(module, _MARK, leaf)
    return found


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[Any], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Marks the modules of these classes, or of classes with these names. Returns them."""
    return _mark(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[Any], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Takes the mark from them. Returns them."""
    return _mark(model, leaf_module_classes, False, raise_if_not_found)


def _mark_named(
    model: nn.Module,
    wanted: list[str],
    matches: Callable[[str, str], bool],
    leaf: bool,
    raise_if_not_found: bool,
) -> tuple[list[nn.Module], list[str]]:
    named = dict(model.named_modules())
    found = {want: [module for name, module in named.items() if matches(name, want)] for want in wanted}
    missing = [want for want, modules in found.items() if not modules]
    modules = list({id(module): module for each in found.values() for module in each}.values())
    for module in modules:
        setattr(module, _MARK, leaf)
    if missing and raise_if_not_found:
        raise ValueError(f"overspill: {type(model).__name__} has no module named {', '.join(missing)}")
    return modules, missing


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: list[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Marks the modules of these names, as named_modules has them. Returns them, and the names that there are not."""
    return _mark_named(model, module_names, lambda name, want: name == want, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: list[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """The same of all modules whose names end so."""
    return _mark_named(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def mark(model: nn.Module, section: dict[str, Any] | None) -> None:
    """What zero_optimization.leaf_module of the JSON names. Raises ValueError where a name is no module's."""
    wanted = DeepSpeedZeroLeafModuleConfig(**(section or {}))
    ours = section is not None
    _mark(model, wanted.classes, True, ours and "classes" in section)
    set_z3_leaf_modules_by_name(model, wanted.names, raise_if_not_found=ours)
    set_z3_leaf_modules_by_suffix(model, wanted.name_suffixes, raise_if_not_found=ours)
