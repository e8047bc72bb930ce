"""The folders of DeepSpeed's checkpoints: one for each tag, and a file with the tag of the last one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from .. import durable

LATEST = "latest"


def checked(tag: Any) -> str:
    """Its text. Raises ValueError where it is no name of a folder."""
    name = str(tag)
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"overspill: the tag {name!r:.60} is no name of a folder: give one without '/'")
    return name


def latest(base: Path) -> str | None:
    """The tag that `base`/latest names; None where there is no such file."""
    try:
        return (base / LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None


def new(path: Path) -> Path:
    """Where a checkpoint is written that replaces the one at `path`."""
    return path.with_name(f"{path.name}.new")


def _old(path: Path) -> Path:
    return path.with_name(f"{path.name}.old")


def replace(path: Path) -> None:
    """The checkpoint beside it, which is whole, takes its name. Where that is broken off, `settle` finishes it."""
    path.rename(_old(path))
    durable.rename_folder(new(path), path)
    shutil.rmtree(_old(path))


def settle(path: Path) -> None:
    """Puts right what a process left that ended in the middle of a save: the older checkpoint is set aside only when
    the new one is whole."""
    if not path.exists() and _old(path).exists():
        (new(path) if new(path).exists() else _old(path)).rename(path)
    for left in (new(path), _old(path)):
        if left.exists():
            shutil.rmtree(left)
