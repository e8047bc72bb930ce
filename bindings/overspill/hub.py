"""Names of models on the Hugging Face hub. Nothing is fetched: what looks like such a name is explained."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def way_out(folder: Any) -> str:
    """What to do where a folder is missing and its path could be a model's name, as the end of an error; else ""."""
    path = Path(folder)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    name = str(path)
    if not _NAME.fullmatch(name) or path.parent.exists():  # a folder's name with a typo
        return ""
    cached = _cached(name)
    if cached is not None:
        return f". The hub's cache has the model {name}: give {cached}"
    return (
        f". If the model {name} of the Hugging Face hub is meant, fetch it once: hf download {name} --local-dir "
        f"{path.name}, then give {path.name}"
    )


def _cached(name: str) -> Path | None:
    """The folder of the hub's cache that has the model."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found).parent if isinstance(found, str) else None
