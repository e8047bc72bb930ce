"""Decides which checkpoints of a run or a script are kept: the newest ones, and those of every so many steps. No
checkpoint is deleted before a newer one was read back and verified."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import _core, saves, tensor_file
from .folders import FolderError

_NUMBERED = re.compile(r"(.*?)(\d+)", re.DOTALL)
_ASIDE = re.compile(r".*\.(abandoned|damaged)-\d+", re.DOTALL)


class Keep(NamedTuple):
    """Keeps the newest `last`, and for ever those whose step is a multiple of `every`; None: no such rule."""

    last: int
    every: int | None = None

    def outdated(self, complete: Sequence[int], saved: Iterable[int]) -> list[int]:
        """Steps of `saved` that may go when these are `complete`, in any order. Of what is older than the newest
        complete ones, incomplete ones go too."""
        newest = sorted(complete)[-self.last :]
        return [
            step
            for step in saved
            if newest and step < newest[0] and not (self.every and step % self.every == 0)
        ]


class Series:
    """The checkpoints in one folder whose names are those of `path` but for the number at their ends, the step."""

    def __init__(self, path: Path):
        found = _NUMBERED.fullmatch(path.name)
        if found is None:
            raise ValueError(
                f"overspill: save_checkpoint: keep_last needs names that end with the step, to tell older from newer "
                f"ones, and {path.name!r} does not: name it e.g. {path}/step-000040"
            )
        self.folder, self.prefix, self.step = path.parent, found[1], int(found[2])

    def saved(self) -> list[tuple[int, Path]]:
        """By step, oldest first, complete or not."""
        return sorted(
            (int(match[2]), self.folder / name)
            for name in os.listdir(self.folder)
            if (match := _NUMBERED.fullmatch(name))
            and match[1] == self.prefix
            and (self.folder / name).is_dir()
        )


def keep_of(last: Any, every: Any) -> Keep | None:
    """What a script asked for. Raises TypeError and ValueError."""
    for name, value in (("keep_last", last), ("keep_every", every)):
        if value is not None and (type(value) is not int):
            raise TypeError(f"overspill: save_checkpoint: {name} = {value!r:.40}: an integer is expected")
        if value is not None and value < 1:
            raise ValueError(
                f"overspill: save_checkpoint: {name} = {value}: at least 1; leave it out to keep all"
            )
    if last is None and every is not None:
        raise ValueError(
            f"overspill: save_checkpoint: keep_every = {every} says which older checkpoints stay, and without "
            "keep_last all of them do: give keep_last too"
        )
    return None if last is None else Keep(last, every)


def read_back(path: Path, progress: Callable[[int, int], None] | None = None) -> None:
    """Reads every byte of a checkpoint that was just saved; `progress` as of tensor_file.verify. Raises CheckpointError
    for one that is damaged, which has another name then; OSError."""
    try:
        tensor_file.verify(path, progress)
    except (_core.CheckpointError, _core.StoreError) as error:
        reason = str(error).removeprefix("overspill: ")
        raise _core.CheckpointError(
            f"overspill: {path} was read back and is damaged, and {_set_aside(path)}; the checkpoints before it stay: "
            f"{reason}"
        ) from None
    saves.note_verified(path)


def _set_aside(path: Path) -> str:
    """What became of it, in words."""
    try:
        return f"is now {saves.rename_aside(path, 'damaged')}"
    except OSError as error:
        return f"could not be set aside ({error.strerror}), so move it away"


def tidy(path: Path, keep: Keep) -> list[Path]:
    """After a save to `path` that was read back: renames checkpoints of later steps, which belong to an abandoned
    branch, and removes those that `keep` does not keep. Returns the new names of what was set aside. Raises FolderError
    or OSError for what stays."""
    series = Series(path)
    later = [other for step, other in series.saved() if step > series.step and saves.is_complete(other)]
    aside = [saves.rename_aside(other, "abandoned") for other in later]
    saved = dict(series.saved())
    complete = [step for step, other in saved.items() if saves.is_complete(other)]
    saves.remove_all([saved[step] for step in keep.outdated(complete, saved)])
    return aside


def newest_first(folder: Path) -> list[Path]:
    """The folders in `folder` whose names end with a number, by that number; what was set aside, and what a save left
    unfinished, have other names. Raises FolderError where there is none."""
    try:
        names = [path.name for path in folder.iterdir() if path.is_dir()]
    except OSError as error:
        raise FolderError(
            f"overspill: load_checkpoint: {folder}: {error.strerror}; fall_back needs the folder that has the "
            "checkpoints in it"
        ) from None
    named = [name for name in names if not _ASIDE.fullmatch(name)]
    found = [(int(match[2]), name) for name in named if (match := _NUMBERED.fullmatch(name))]
    if not found:
        raise FolderError(
            f"overspill: load_checkpoint: {folder} has no folder whose name ends with a step (such as step-000040); "
            "fall_back needs the folder that has the checkpoints in it"
        )
    return [folder / name for _, name in sorted(found, reverse=True)]


def newest_whole(folder: Path) -> tuple[Path, list[str]]:
    """The newest checkpoint in `folder` of which every byte fits its checksum, and what is wrong with those that are
    newer, in words; these get other names, so that their steps can be saved again. Raises FolderError where there is
    none at all, CheckpointError where none is whole."""
    skipped: list[tuple[Path, str]] = []
    for path in newest_first(folder):
        try:
            if not saves.is_complete(path):
                raise _core.CheckpointError(f"{path} has no {saves.MANIFEST}, so it is not complete")
            tensor_file.verify(path)
        except (_core.CheckpointError, _core.StoreError, OSError) as error:
            skipped.append((path, str(error).removeprefix("overspill: ")))
        else:
            saves.note_verified(path)
            return path, [f"{reason}; {_renamed(other)}" for other, reason in skipped]
    reasons = "; ".join(reason for _, reason in skipped)
    raise _core.CheckpointError(f"overspill: load_checkpoint: no checkpoint in {folder} is whole: {reasons}")


def _renamed(path: Path) -> str:
    """What became of one that was skipped, in words."""
    if saves.lacks_parts(path):
        return "it keeps its name, since a part of it is not here"
    try:
        with saves.alone(path):
            return f"it is now {saves.rename_aside(path, 'damaged')}"
    except (OSError, FolderError) as error:
        return f"it keeps its name ({str(error).removeprefix('overspill: ')})"
