"""A checkpoint that takes the place of an older one of its name: the older one goes when the new one is whole."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import checkpointing, durable, ranks

if TYPE_CHECKING:
    from .engine import Engine


def save(engine: Engine, path: Path, client_state: dict[str, Any]) -> None:
    """As Engine.save_checkpoint, where a checkpoint of that name may be. All ranks call it."""
    durable.make_folders(path.parent)
    settle(engine, path, "save_checkpoint")
    there = ranks.rank_0s(engine._group, path.exists())
    checkpointing.save(engine, _new(path) if there else path, client_state, {})
    with ranks.ByOne(engine._group, "save_checkpoint"):
        if engine.rank == 0 and there:
            _replace(path)


def settle(engine: Engine, path: Path, call: str) -> None:
    """Puts right what a process left that ended in the middle of a save: the older checkpoint is set aside only when
    the new one is whole. All ranks call it."""
    with ranks.ByOne(engine._group, call):
        if engine.rank == 0:
            _settle(path)


def _new(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _old(path: Path) -> Path:
    return path.with_name(f"{path.name}.old")


def _replace(path: Path) -> None:
    """The checkpoint beside it, which is whole, takes its name. Where that is broken off, `_settle` finishes it."""
    path.rename(_old(path))
    durable.rename_folder(_new(path), path)
    shutil.rmtree(_old(path))


def _settle(path: Path) -> None:
    if not path.exists() and _old(path).exists():
        (_new(path) if _new(path).exists() else _old(path)).rename(path)
    for left in (_new(path), _old(path)):
        if left.exists():
            shutil.rmtree(left)
