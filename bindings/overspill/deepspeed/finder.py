"""Makes `import deepspeed` give Overspill's modules, in this process: scripts, transformers and accelerate find the
name, a version and what they call. What is not there raises ImportError or AttributeError, which names it."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

NAME = "deepspeed"


class _Distribution(importlib.metadata.Distribution):
    """What importlib.metadata.version("deepspeed") reads."""

    def read_text(self, filename: str) -> str | None:
        from .modules import VERSION

        texts = {"METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n"}
        return texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"overspill: the stand-in for {NAME} has no files")


class _Missing:
    """The `__getattr__` of a module: says of a name that is not there where to look."""

    def __init__(self, module: str):
        self.module = module

    def __call__(self, name: str) -> Any:
        raise AttributeError(
            f"overspill: {self.module}.{name} is not supported: docs/coming-from-deepspeed.md has what is there"
        )


class Finder(importlib.metadata.DistributionFinder, importlib.abc.Loader):
    """Of sys.meta_path."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != NAME and not fullname.startswith(f"{NAME}."):
            return None
        from .modules import MODULES

        if fullname not in MODULES:
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: overspill stands in for deepspeed, and has no such part "
                "(docs/coming-from-deepspeed.md)",
                name=fullname,
            )
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        from .modules import MODULES

        vars(module).update(MODULES[module.__name__])
        module.__doc__ = f"{module.__name__}, by Overspill."
        vars(module)["__getattr__"] = _Missing(module.__name__)
        for name in MODULES:  # as there: `import deepspeed` is enough for deepspeed.zero.Init
            parent, _, _ = name.rpartition(".")
            if parent == module.__name__:
                importlib.import_module(name)

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        return [_Distribution()] if context is None or context.name in (None, NAME) else []


def install() -> None:
    """Puts the finder before all others. Raises RuntimeError where the real DeepSpeed is imported already."""
    if any(isinstance(each, Finder) for each in sys.meta_path):
        return
    if NAME in sys.modules:
        raise RuntimeError("overspill: DeepSpeed is imported already: import overspill.deepspeed before it")
    sys.meta_path.insert(0, Finder())
