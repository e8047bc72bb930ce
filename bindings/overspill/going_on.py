"""Which checkpoints a run that goes on has to name to its engine, so that it can go on in their slabs: the one that it
opens, and those that may share slabs with it (docs/store.md, "Going on in place")."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import _core, given, ranks, saves
from .folders import FolderError

_UNFINISHED = ".partial"
_STEP = re.compile(r"(.*?)\d+(\.(abandoned|damaged)-\d+)?(\.partial)?", re.DOTALL)
_SLAB = re.compile(r"(rank\d+-)?slab-.*\.bin", re.DOTALL)


def checkpoints(resume_from: Any, group: ranks.Group | None) -> list[Path]:
    """Rank 0 looks, unless a list says which. What saves of the run left unfinished there is removed: it would keep
    slabs from being taken. Raises FolderError, on all ranks, where there is no checkpoint."""
    if isinstance(resume_from, (list, tuple)):
        return [Path(given.path("initialize", path)).absolute() for path in resume_from]
    found: list[Path] = []
    with ranks.ByOne(group, "initialize"):
        if group is None or group.rank == 0:
            found = _beside(Path(given.path("initialize", resume_from)).absolute())
    return ranks.rank_0s(group, found)


def inside(checkpoint: Any, name: str) -> list[Path] | None:
    """For a framework whose checkpoints are folders that have the engine's under `name`: those of `checkpoint` and of
    the folders beside it. None where it has none of the engine's."""
    if not isinstance(checkpoint, (str, os.PathLike)):
        return None
    first = Path(checkpoint).absolute()
    if not saves.is_complete(first / name):
        return None
    beside = sorted(each for each in first.parent.glob(f"*/{name}") if saves.is_complete(each))
    return [first / name, *(each for each in beside if each.parent != first)]


def _beside(path: Path) -> list[Path]:
    first, folder = ([path], path.parent) if saves.is_complete(path) else ([], path)
    try:
        there = [each for each in sorted(folder.iterdir()) if each.is_dir()]
    except OSError as error:
        raise FolderError(
            f"overspill: initialize: resume_from: {path}: {error.strerror}: name a checkpoint, or a folder of them"
        ) from None
    if not first:
        first = [each for each in there if saves.is_complete(each)]
    if not first:
        raise FolderError(
            f"overspill: initialize: resume_from: {path} has no {saves.MANIFEST}, and no folder in it has one: name a "
            "checkpoint, or a folder of them"
        )
    chosen = _of_the_run(first, there)
    for each in chosen:
        if each.name.endswith(_UNFINISHED):
            with contextlib.suppress(
                FolderError, OSError
            ):  # in use, or not ours alone: its slabs are left then
                saves.remove(each)
    return [each for each in chosen if saves.is_complete(each)]


def _of_the_run(first: list[Path], there: list[Path]) -> list[Path]:
    """`first`, then the others whose names differ in the step alone, and those that share slabs with any of them."""
    chosen, others = list(first), [each for each in there if each not in first]
    series = {_series(each) for each in first}
    slabs = {each: set(_slabs(each)) for each in [*chosen, *others]}
    held = set().union(*(slabs[each] for each in chosen))
    while more := [each for each in others if _series(each) in series or slabs[each] & held]:
        chosen += more
        held = held.union(*(slabs[each] for each in more))
        others = [each for each in others if each not in more]
    return chosen


def _series(path: Path) -> str | Path:
    found = _STEP.fullmatch(path.name)
    return found[1] if found else path


def _slabs(path: Path) -> Iterator[tuple[int, int]]:
    """The files, whatever their names, that a checkpoint, or a save under way, has of slabs."""
    folders = [path, *path.glob("rank*/")]
    for folder in [*folders, *(part for each in folders for part in _core.parts_of(each))]:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                if _SLAB.fullmatch(entry.name) and stat.S_ISREG(status.st_mode):
                    yield status.st_dev, status.st_ino
