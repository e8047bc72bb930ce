"""Folders that a script or a command will write: looked at before training, and again when they are written."""

from __future__ import annotations

import os
from pathlib import Path

from . import given
from ._core import OverspillError

_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")


class FolderError(OverspillError):
    """A folder cannot be written, or has something that Overspill does not replace; the message says what to do."""


def output_folder(folder: str | os.PathLike[str]) -> Path:
    """Looks, before training, at the folder that a script will give to `engine.save_pretrained` when it ends.

        target = overspill.output_folder("finetuned")

    A name that is new, an empty folder and a model's folder (config.json; what `save_pretrained` left) are right: the
    model there is replaced when the new one is whole. Nothing is written.

    Args:
        folder: its path

    Returns: the path.

    Raises:
        FolderError: something else is there, or this user may not write there
        ValueError, TypeError: it is no path
    """
    target = Path(given.path("output_folder", folder))
    check_new_model(target)
    above = target if target.is_dir() else target.parent
    while not above.exists() and above != above.parent:
        above = above.parent
    if not above.is_dir():
        raise FolderError(f"overspill: {target}: {above} is a file, not a folder; name another folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise FolderError(f"overspill: {target}: {above} is not writable for this user; name another folder")
    return target


def check_new_model(target: Path) -> None:
    """Raises FolderError where a model's folder cannot be written without the loss of something else."""
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise FolderError(f"overspill: {target} is there and is no folder; name a new folder")
    if any(target.iterdir()) and not is_model(target):
        what = "a checkpoint" if (target / "manifest.json").exists() else "something else than a model"
        raise FolderError(
            f"overspill: {target} has {what}, which is not replaced: move it away, or name a new folder"
        )


def check_empty(target: Path) -> None:
    """Raises FolderError unless the folder is new or empty, and can take a name."""
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        raise FolderError(f"overspill: {target} is there and not empty; name a new folder")
    if target.is_mount():
        raise FolderError(
            f"overspill: {target} is where a file system is mounted, so no folder can take its place; name a folder in "
            "it"
        )


def is_model(folder: Path) -> bool:
    """Of Hugging Face's form, and no checkpoint of Overspill."""
    return (folder / "config.json").is_file() and not (folder / "manifest.json").exists()


def weights_in(folder: Path) -> list[Path]:
    """A model's weights and their index."""
    return sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))
