"""The text of a configuration: JSON, and HJSON where DeepSpeed's form is read. What its keys mean is not known here."""

from __future__ import annotations

import importlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from .section import ConfigError


def read_json(path: Any) -> dict[str, Any]:
    try:
        with Path(path).open(encoding="utf-8") as file:
            data = parse_json(file.read())
    except TypeError:
        swapped = hasattr(path, "param_groups")  # as in DeepSpeed's initialize
        raise ConfigError(
            f"config: a dict, a path or a Config is expected, not {type(path).__name__}"
            + (
                "; the optimizer is the third argument: initialize(model, config, optimizer)"
                if swapped
                else ""
            )
        ) from None
    except OSError as error:
        raise ConfigError(f"config: cannot read {os.fspath(path)}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or a path that no file can have
        raise ConfigError(f"config: {os.fspath(path)!r} is no JSON file in UTF-8: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"config: {os.fspath(path)} holds a {type(data).__name__}, not an object")
    return data


def read_deepspeed_json(path: Any) -> dict[str, Any]:
    """As JSON; else as HJSON, which DeepSpeed reads too, where the package hjson is installed. Raises ConfigError."""
    try:
        return read_json(path)
    except ConfigError as error:
        if "is no JSON file" not in str(error):
            raise
        why = str(error)
    try:
        hjson = importlib.import_module("hjson")
    except ImportError:
        raise ConfigError(
            f"{why}; HJSON, which DeepSpeed reads too, needs the package hjson: write JSON, or install it"
        ) from None
    try:
        data = hjson.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_with_each_key_once)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{why}, and no HJSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"config: {os.fspath(path)} holds a {type(data).__name__}, not an object")
    return data


def parse_json(text: str | bytes) -> Any:
    """JSON in which no object has a key twice: the last one would count without a word. NaN and Infinity, which Python
    reads, are no JSON. Raises ValueError, and RecursionError where it is nested too deeply.
    """

    def refused(constant: str) -> float:
        raise ValueError(f"{constant} is no number of JSON")

    return json.loads(text, object_pairs_hook=_with_each_key_once, parse_constant=refused)


def _with_each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"{json.dumps(twice)} is there twice in one object; leave one out")
    return made
