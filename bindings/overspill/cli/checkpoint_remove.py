"""`overspill checkpoint rm`."""

import argparse
import os
from pathlib import Path

from overspill import CheckpointError, OverspillError, StoreError, _core, saves, tensor_file
from overspill.cli.checkpoint_list import UNFINISHED
from overspill.cli.checkpoints import ASIDE
from overspill.cli.common import CliError, describe
from overspill.cli.output import say, warn
from overspill.cli.progress import on_terminal


def run(args: argparse.Namespace) -> int:
    """Each by itself: one that stays does not keep the others."""
    failed = False
    for path in args.checkpoints:
        try:
            _require_removable(path)
            if not args.force and saves.is_complete(path):
                _require_another(path, args.checkpoints)
            saves.remove(path)
        except (OverspillError, OSError) as error:
            warn(f"overspill checkpoint rm: error: {describe(error).text}")
            failed = True
        else:
            say(f"{path}: removed")
    return int(failed)


def _require_removable(path: Path) -> None:
    if path.is_symlink():
        raise CliError(
            f"{path} is a symbolic link; name the folder that it leads to, and remove the link with rm"
        )
    if not path.is_dir():
        raise CliError(f"{path} is no folder; name a checkpoint, as `overspill checkpoint ls` lists them")
    names = [item.name for item in path.iterdir()]
    if not path.name.endswith(UNFINISHED) and not any(map(_core.is_file_of_a_save, names)):
        raise CliError(f"{path} is not removed: it is no checkpoint (nothing in it is what a save writes)")


def _require_another(path: Path, leaving: list[Path]) -> None:
    """Raises CliError unless a whole checkpoint stays beside `path`."""
    others = _others(path, leaving)
    if any(saves.verified_at(other) is not None for other in others):
        return
    wrong = []
    for other in others:
        try:
            tensor_file.verify(other, on_terminal(f"reading {other.name}"))
        except (CheckpointError, StoreError, OSError) as error:
            wrong.append(describe(error).text)
        else:
            saves.note_verified(other)
            return
    why = (
        f"those beside it are damaged: {'; '.join(wrong)}" if wrong else "no other complete one is beside it"
    )
    raise CliError(f"{path} is the last good checkpoint in its folder ({why}); --force removes it")


def _others(path: Path, leaving: list[Path]) -> list[Path]:
    """Complete ones beside `path` that stay, newest first. What was set aside does not count."""
    gone = {other.resolve() for other in leaving}
    beside = [
        other
        for other in path.resolve().parent.iterdir()
        if other not in gone
        and not other.is_symlink()
        and not ASIDE.fullmatch(other.name)
        and not other.name.endswith(UNFINISHED)
        and saves.is_complete(other)
    ]
    return sorted(beside, key=lambda other: os.stat(other / saves.MANIFEST).st_mtime_ns, reverse=True)
