"""The checkpoints of one run: which is the newest of the branch that goes on, which are set aside, which may go.

step-000040                 one of the branch that goes on: the highest step is the newest save
step-000040.partial         a save under way, or what a kill left of it
step-000040.abandoned-1     set aside when the run went on from an older one; Overspill never deletes it
step-000040.damaged-1       found damaged when it was read back after its save; the same

What is set aside is renamed, so the names alone tell the branches apart.
"""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from overspill import durable, lora, saves
from overspill.memory import human
from overspill.model_files import copy_small_files
from overspill.retention import Keep
from overspill.saves import disk_bytes, is_complete, rename_aside

STEP = re.compile(r"step-(\d{6,})")
PARTIAL = re.compile(STEP.pattern + r"\.partial")
ASIDE = re.compile(STEP.pattern + r"\.(abandoned|damaged)-\d+")


class Checkpoints:
    """Below one folder, which need not be there yet."""

    def __init__(self, folder: Path):
        self.folder = folder

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def saved(self) -> list[tuple[int, Path]]:
        """The branch that goes on, by step, oldest first, complete or not."""
        return sorted((int(match[1]), path) for path, match in self._named(STEP))

    def complete(self) -> list[tuple[int, Path]]:
        """Those with a manifest, which is written last."""
        return [(step, path) for step, path in self.saved() if is_complete(path)]

    def latest(self) -> Path | None:
        """The newest complete checkpoint. It is never passed over for damage in it: that is for the load to report."""
        found = self.complete()
        return found[-1][1] if found else None

    def aside(self) -> list[Path]:
        """What was set aside and is still there."""
        return sorted(path for path, _ in self._named(ASIDE))

    def off_branch(self, base: Path) -> list[Path]:
        """Checkpoints that are no ancestors of a run which goes on from `base`: the later ones where `base` is one of
        the branch, else all, newest first."""
        steps = {path: step for step, path in self.saved()}
        least = next((step for path, step in steps.items() if _same(path, base)), -1)
        return [path for step, path in reversed(self.saved()) if step > least]

    def set_aside(self, path: Path, why: str) -> Path:
        """Renames a checkpoint so that no resume chooses it and no rule deletes it. `why`: abandoned or damaged."""
        return rename_aside(path, why)

    def has(self, path: Path) -> bool:
        """Whether `path` is one of the branch that goes on."""
        return any(_same(path, mine) for _, mine in self.saved())

    def remove_leftovers(self) -> None:
        """Removes what a kill in the middle of a save or of a removal left; links are none of it. Raises FolderError,
        when all else is done, where one holds something that Overspill did not write."""
        partial = [path for path, _ in self._named(PARTIAL)]
        incomplete = [path for _, path in self.saved() if not is_complete(path)]
        saves.remove_all([path for path in (*partial, *incomplete) if not path.is_symlink()])

    def prune(self, keep: Keep) -> None:
        """Removes what is older than the newest complete ones of the branch, but for those that `keep` keeps; of a link
        the link alone. Raises FolderError, when all else is done, for those that hold something that Overspill did not
        write, or cannot be removed."""
        saved = self.saved()
        outdated = keep.outdated([step for step, _ in self.complete()], [step for step, _ in saved])
        saves.remove_all([path for step, path in saved if step in outdated])

    def add_model_files(self, path: Path, model: Path) -> None:
        """Adds what merge needs beside the weights, durably."""
        _put_folder(path, "hf", lambda part: copy_small_files(model, part))

    def add_adapter(self, path: Path, write: Callable[[Path], None]) -> None:
        """Adds the folder that `write` fills with a durable adapter, durably."""
        _put_folder(path, lora.FOLDER, write)

    def lacks_files(self, path: Path, adapted: bool) -> bool:
        """Whether something of what is added after a save is missing."""
        return not (path / "hf").is_dir() or (adapted and not (path / lora.FOLDER).is_dir())

    def aside_text(self) -> str:
        """What is set aside, and what it holds of the disk; "" where there is none."""
        paths = self.aside()
        if not paths:
            return ""
        names = ", ".join(path.name for path in paths)
        return (
            f"set aside in {self.folder}: {names}; they hold {human(disk_bytes(paths))} of the disk and are "
            "never deleted "
            "by Overspill: delete them when you need them no more"
        )

    def _named(self, pattern: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
        """Raises OSError where the folder is there and cannot be looked at: what is in it is not absent."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        return [(self.folder / name, match) for name in names if (match := pattern.fullmatch(name))]


def _put_folder(path: Path, name: str, write: Callable[[Path], None]) -> None:
    part = path / f"{name}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    write(part)
    shutil.rmtree(path / name, ignore_errors=True)
    durable.rename_folder(part, path / name)


def _same(a: Path, b: Path) -> bool:
    return a.exists() and b.exists() and a.samefile(b)
