"""Which checkpoints a run that goes on has to name to its engine, so that it can go on in their slabs: the one that it
opens, and those that may share slabs with it (docs/store.md, "Going on in place")."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import given, ranks, saves
from .config import Config
from .folders import FolderError

_UNFINISHED = ".partial"
_STEP = re.compile(r"(.*?)\d+(\.(abandoned|damaged)-\d+)?(\.partial)?", re.DOTALL)
_SLAB = re.compile(r"(rank\d+-)?slab-.*\.bin", re.DOTALL)


def checkpoints(resume_from: Any, group: ranks.Group | None, settings: Config) -> list[Path]:
    """Rank 0 looks. What saves of the run left unfinished there is removed: it would keep slabs from being taken.
    Raises FolderError, on all ranks, where there is no checkpoint; TypeError, ValueError."""
    found: list[Path] = []
    with ranks.ByOne(group, "initialize"):
        if group is None or group.rank == 0:
            found = _found(resume_from)
            if not settings.engine.train_after_save and settings.budget.nvme:
                warnings.warn(
                    "overspill: initialize: resume_from takes nothing over with engine.train_after_save = false: the "
                    "run needs room for one more copy of its states beside the checkpoint",
                    stacklevel=4,
                )
            elif settings.budget.nvme:
                _remove_unfinished(found)
    whole = [os.fspath(path) for path in found if _is_complete(path)]
    return [Path(path) for path in ranks.rank_0s(group, whole)]


def inside(checkpoint: Any, name: str) -> list[Path] | None:
    """For a framework whose checkpoints are folders that have the engine's under `name`: those of `checkpoint` and of
    the folders beside it. None where it has none of the engine's."""
    if not isinstance(checkpoint, (str, os.PathLike)):
        return None
    first = Path(checkpoint).absolute()
    if not _is_complete(first / name):
        return None
    beside = sorted(each for each in first.parent.glob(f"*/{name}") if _is_complete(each))
    return [first / name, *(each for each in beside if each.parent != first)]


def _found(resume_from: Any) -> list[Path]:
    """Each once, whatever links lead to it; unfinished saves of the run too."""
    several = isinstance(resume_from, (list, tuple))
    if several and not resume_from:
        raise ValueError(
            "overspill: initialize: resume_from: the list is empty: leave it out, or name a checkpoint"
        )
    found: dict[Path, None] = {}
    for each in resume_from if several else [resume_from]:
        found |= dict.fromkeys(_beside(Path(given.path("initialize: resume_from", each)).resolve()))
    return list(found)


def _beside(path: Path) -> list[Path]:
    if path.name.endswith(_UNFINISHED):
        raise FolderError(
            f"overspill: initialize: resume_from: {path} is a save that was cut off: name an older checkpoint. (If it "
            f"has a {saves.MANIFEST}, all of it is there: rename it to {path.stem} and name that)"
        )
    folder = path.parent if _is_complete(path) else path
    try:
        there = list(dict.fromkeys(each.resolve() for each in sorted(folder.iterdir()) if each.is_dir()))
    except OSError as error:
        raise FolderError(
            f"overspill: initialize: resume_from: {path}: {error.strerror}: name a checkpoint, or a folder of them; "
            "leave resume_from out at the first start of a run"
        ) from None
    whole = [each for each in there if _is_complete(each) and not each.name.endswith(_UNFINISHED)]
    first = [path] if folder != path else whole
    if not first:
        raise FolderError(
            f"overspill: initialize: resume_from: {path} has no {saves.MANIFEST}, and no folder in it has one: name a "
            "checkpoint, or a folder of them; leave resume_from out at the first start of a run"
        )
    return _of_the_run(first, there)


def _is_complete(path: Path) -> bool:
    """A folder that nobody may read is no checkpoint of this run's."""
    with contextlib.suppress(OSError):
        return saves.is_complete(path)
    return False


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
    for folder in saves.with_parts([path, *path.glob("rank*/")]):
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                if _SLAB.fullmatch(entry.name) and stat.S_ISREG(status.st_mode):
                    yield status.st_dev, status.st_ino


def _remove_unfinished(found: list[Path]) -> None:
    """Saves that were cut off before they had a manifest, and that surely nobody works on."""
    for path in found:
        if not path.name.endswith(_UNFINISHED) or _is_complete(path):
            continue
        with contextlib.suppress(FolderError, OSError):  # what stays keeps its slabs, which the engine says
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an error too where there are no locks
                if not saves.strange(path):
                    saves.remove_held(path)
                    warnings.warn(
                        f"overspill: {path}: what a save left that was cut off is removed", stacklevel=5
                    )
            finally:
                os.close(handle)
