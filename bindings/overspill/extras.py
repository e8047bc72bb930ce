"""Packages that overspill uses where they are installed, and does not require: the extras of its pyproject.toml."""

from __future__ import annotations

import importlib
from types import ModuleType

from ._core import OverspillError

# package: the extra that brings it
EXTRAS = {
    "transformers": "hf",
    "lightning": "lightning",
    "peft": "peft",
    "rich": "cli",
    "shtab": "cli",
    "matplotlib": "plot",
    "gguf": "gguf",
    "uvicorn": "serve",
    "starlette": "serve",
    "llguidance": "serve",
}


class MissingExtra(ImportError, OverspillError):
    """A package of an extra is not installed. The message has the command that installs it."""


def need(package: str) -> ModuleType:
    """The package, imported. Raises MissingExtra where it is not installed; what it raises itself, as it is."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise MissingExtra(
            f"overspill: this needs the package {package}, which is not installed: "
            f"pip install 'overspill[{EXTRAS[package]}]'",
            name=package,
        ) from None
