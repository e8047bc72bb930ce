"""When a run saves, and what a save that fails means: training goes on, the checkpoint before stays, the next save
tries again."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from overspill import saves
from overspill.cli.common import describe
from overspill.cli.output import warn
from overspill.cli.run_folder import RunFolder
from overspill.cli.settings import Settings
from overspill.folders import FolderError


def failures() -> tuple[type[Exception], ...]:
    """What a save raises that failed, and after which the run goes on."""
    from overspill import CheckpointError, StoreError

    return OSError, StoreError, CheckpointError


class Saver:
    """Takes the checkpoints of one process. `add_files` adds to one what merge needs beside the weights; `at_length`
    calls what takes long. `on_the_way`: steps may follow a save. `base` is the checkpoint that the process went on
    from, at `step`, if there is one."""

    def __init__(
        self,
        folder: RunFolder,
        settings: Settings,
        take: Callable[[Path], None],
        add_files: Callable[[Path], None],
        at_length: Callable[[Callable[[], Any]], Any],
        on_the_way: bool,
        base: Path | None,
        step: int,
    ):
        self.folder, self.settings = folder, settings
        self._take, self._add, self._at_length, self._on_the_way = take, add_files, at_length, on_the_way
        self.newest, self._step = base, step if base else None
        self.failure: str | None = None  # of the last save
        self._last = time.monotonic()

    def due(self, step: int) -> bool:
        every, minutes = self.settings.save_every, self.settings.save_minutes
        if not self._on_the_way:
            return False
        if every and step % every == 0:
            return True
        return bool(minutes) and time.monotonic() - self._last >= 60 * minutes

    def save(self, step: int, prune: bool = True) -> bool:
        """A checkpoint of this step, unless there is one. Returns False if the save failed: stderr then says why,
        and the older checkpoints are untouched. `prune`: the oldest may go, once every byte of the new one was read
        back."""
        if step == self._step:
            return True
        self._last = time.monotonic()
        path = self.folder.checkpoints.path(step)
        try:
            self.folder.sync_log()
            self._take(path)
        except failures() as error:
            return self._failed(step, describe(error).text)
        before, self.newest, self._step, self.failure = self.newest, path, step, None
        self._tidy(
            "not all that merge needs was added to it; the next process of the run adds it", self._add_files
        )
        return not (prune and self._too_many()) or self._prune(step, before)

    def add_missing_files(self) -> None:
        """For a checkpoint of this run whose save was cut short after its manifest was written."""
        if self.newest is None or self.newest.parent != self.folder.checkpoints.folder:
            return
        if self.folder.checkpoints.lacks_files(self.newest, self.settings.lora_rank is not None):
            self._tidy("not all that merge needs was added to it", self._add_files)

    def _add_files(self) -> None:
        self._add(self.newest)

    def _too_many(self) -> bool:
        """False where nobody can tell: the next save looks again."""
        found: list[tuple[int, Path]] = []
        self._tidy("older checkpoints stay", lambda: found.extend(self.folder.checkpoints.saved()))
        return len(found) > self.settings.keep

    def _prune(self, step: int, before: Path | None) -> bool:
        """Nothing is deleted on the word of a write: what replaces it is read back first. `before` is the checkpoint
        before this one."""
        from overspill import tensor_file

        newest = self.newest
        assert newest is not None
        try:
            self._at_length(lambda: tensor_file.verify(newest))
        except failures() as error:
            fate = self._set_aside(self.newest)
            self.newest, self._step = before, None
            return self._failed(step, f"read back, it was damaged, and {fate}: {describe(error).text}")
        saves.note_verified(newest)
        self._tidy("older checkpoints stay", lambda: self.folder.checkpoints.prune(self.settings.keep))
        return True

    def _set_aside(self, damaged: Path) -> str:
        """What became of it, in words."""
        try:
            return f"is now {self.folder.checkpoints.set_aside(damaged, 'damaged')}"
        except OSError as error:
            return (
                f"could not be set aside ({describe(error).text}), so move it away before --resume takes it"
            )

    def _failed(self, step: int, reason: str) -> bool:
        self.failure = reason
        kept = f"the last good checkpoint is {self.newest}" if self.newest else "there is no checkpoint yet"
        _warn(f"the save at step {step} failed: {reason}; {kept}")
        return False

    def _tidy(self, otherwise: str, act: Callable[[], None]) -> None:
        """The checkpoint is whole whatever becomes of `act`."""
        try:
            act()
        except (OSError, FolderError) as error:
            _warn(f"checkpoint {self.newest}: {otherwise}: {describe(error).text}")


def _warn(text: str) -> None:
    warn(f"overspill: {text}")
