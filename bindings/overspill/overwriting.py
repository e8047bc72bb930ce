"""A checkpoint that takes the place of an older one of its name: the older one goes when the new one is whole."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import _core, checkpointing, durable, saves

if TYPE_CHECKING:
    from .engine import Engine


def save(engine: Engine, path: Path, client_state: dict[str, Any]) -> None:
    """As Engine.save_checkpoint, where a checkpoint of that name may be. All ranks call it."""
    with place(engine, path, "save_checkpoint") as new:
        checkpointing.save(engine, new, client_state, {})


@contextlib.contextmanager
def place(engine: Engine, path: Path, call: str) -> Iterator[Path]:
    """Where all ranks write, inside the block, what is called `path` once the block has ended without an exception:
    until then what is there stays whole under its name. Files that are written there have to be durable."""
    durable.make_folders(path.parent)
    settle(engine, path, call)
    yield _new(path)
    with engine._together(call):
        if engine._is_first():
            _replace(path)


def settle(engine: Engine, path: Path, call: str) -> None:
    """Puts right what a process left that ended in the middle of a save: the older checkpoint is set aside only when
    the new one is whole. All ranks call it."""
    with engine._together(call):
        if engine._is_first():
            _settle(path)


def _new(path: Path) -> Path:
    return path.with_name(f"{path.name}.overspill-new")


def _old(path: Path) -> Path:
    return path.with_name(f"{path.name}.overspill-old")


def _replace(path: Path) -> None:
    """What is beside it, which is whole, takes its name. Where that is broken off, `_settle` finishes it."""
    if path.exists():
        path.rename(_old(path))
    durable.rename_folder(_new(path), path)
    _core.note_owner(path.absolute())
    _remove(_old(path))


def _settle(path: Path) -> None:
    if not path.exists() and _old(path).exists():
        (_new(path) if _new(path).exists() else _old(path)).rename(path)
        _core.note_owner(path.absolute())
    for left in (_new(path), _old(path)):
        _remove(left)


def _remove(path: Path) -> None:
    if path.is_dir():
        saves.remove_parts(path)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
