"""The checkpoints of one run: which is the newest of the branch that goes on, which are set aside, which may go.

step-000040                 one of the branch that goes on: the highest step is the newest save
step-000040.partial         a save under way, or what a kill left of it
step-000040.abandoned-1     set aside when the run went on from an older one; Overspill never deletes it
step-000040.damaged-1       found damaged when it was read back after its save; the same

What is set aside is renamed, so the names alone tell the branches apart.
"""

import re
import shutil
from pathlib import Path

from overspill import durable
from overspill.cli.common import CliError, copy_small_files
from overspill.memory import human

STEP = re.compile(r"step-(\d{6,})")
PARTIAL = re.compile(STEP.pattern + r"\.partial")
ASIDE = re.compile(STEP.pattern + r"\.(abandoned|damaged)-\d+")
OURS = re.compile(
    r"(rank\d+-)?(slab-.+|extents-.+|shared-.+\.txt|resident\.bin|manifest\.json(\.tmp)?)|rank\d+|hf(\.part)?"
)


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
        number = 1
        while (target := path.with_name(f"{path.name}.{why}-{number}")).exists():
            number += 1
        path.rename(target)
        durable.sync_folder(self.folder)
        return target

    def remove_leftovers(self) -> None:
        """Removes what a kill in the middle of a save or of a removal left. Raises CliError where a folder without a
        manifest holds something that Overspill did not write."""
        partial = [path for path, _ in self._named(PARTIAL)]
        for path in [*partial, *(path for _, path in self.saved() if not is_complete(path))]:
            strange = [item.name for item in path.iterdir() if not OURS.fullmatch(item.name)]
            if strange:
                raise CliError(
                    f"{path} is no complete checkpoint and holds {strange[0]}, which Overspill did not write; "
                    "move it "
                    "out of the run's folder"
                )
            _remove(path)

    def prune(self, keep: int) -> None:
        """Removes all of the branch but the newest `keep`."""
        for _, old in self.saved()[:-keep]:
            _remove(old)

    def add_model_files(self, path: Path, model: Path) -> None:
        """Adds what merge needs beside the weights, durably."""
        part = path / "hf.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        copy_small_files(model, part)
        shutil.rmtree(path / "hf", ignore_errors=True)
        durable.rename_folder(part, path / "hf")

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
        items = self.folder.iterdir() if self.folder.is_dir() else ()
        return [(path, match) for path in items if (match := pattern.fullmatch(path.name))]


def is_complete(path: Path) -> bool:
    return (path / "manifest.json").is_file()


def _same(a: Path, b: Path) -> bool:
    return a.exists() and b.exists() and a.samefile(b)


def _remove(path: Path) -> None:
    """The manifest first: a removal that is cut short leaves nothing that looks like a checkpoint."""
    (path / "manifest.json").unlink(missing_ok=True)
    shutil.rmtree(path)


def disk_bytes(folders: list[Path]) -> int:
    """What the files below these folders take of the disk; a file with several names there counts once."""
    files = {}
    for folder in folders:
        for path in folder.rglob("*"):
            status = path.lstat()
            files[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(files.values())
