"""When a run saves, and what a save that fails means: training goes on, the checkpoint before stays, the next save
tries again."""

import time
from collections.abc import Callable
from pathlib import Path

from overspill.cli.common import describe
from overspill.cli.output import warn
from overspill.cli.run_folder import RunFolder
from overspill.cli.save_orders import SaveOrders, failures
from overspill.cli.settings import Settings
from overspill.folders import FolderError
from overspill.retention import Keep


class Saver:
    """Takes the checkpoints of one run, on its first rank; one is under way at a time. `note` is told the step of each
    that is whole, `add_files` adds to it what merge needs beside the weights, `say` takes a line for people.
    `on_the_way`: steps may follow a save. `base` is the checkpoint that the process went on from, at `step`, if there
    is one."""

    def __init__(
        self,
        folder: RunFolder,
        settings: Settings,
        orders: SaveOrders,
        note: Callable[[int], None],
        add_files: Callable[[Path], None],
        say: Callable[[str], None],
        on_the_way: bool,
        base: Path | None,
        step: int,
    ):
        self.folder, self.settings = folder, settings
        self._orders, self._note, self._add, self._say = orders, note, add_files, say
        self._on_the_way, self._keep = on_the_way, Keep(settings.keep, settings.keep_every)
        self.newest, self._step = base, step if base else None
        self.failure: str | None = None  # of the last save
        self.under_way: int | None = None  # the step of a save that was begun
        self._last = time.monotonic()
        self._stalled = 0.0

    def attend(self, step: int) -> None:
        """Between two steps: ends a save that is whole by now, begins one that is due."""
        if self.under_way is not None and not self._orders.is_under_way():
            self._timed(self._end)
        if self._is_due(step):
            self._timed(lambda: self._save(step, self.settings.blocking_saves, prune=True))

    def finish(self, step: int, prune: bool) -> None:
        """After the last step: there is a whole checkpoint of it when this returns, unless stderr says why not.
        `prune`: older ones may go."""
        if not prune:
            self._orders.leave()
        self._save(step, True, prune)

    def stall_seconds(self) -> float:
        """How long training stood still for saves, since this was last asked."""
        stalled, self._stalled = self._stalled, 0.0
        return stalled

    def add_missing_files(self) -> None:
        """For a checkpoint of this run whose save was cut short after its manifest was written."""
        if self.newest is None or self.newest.parent != self.folder.checkpoints.folder:
            return
        if self.folder.checkpoints.lacks_files(self.newest, self.settings.lora_rank is not None):
            self._add_files()

    def _is_due(self, step: int) -> bool:
        every, minutes = self.settings.save_every, self.settings.save_minutes
        if not self._on_the_way:
            return False
        if every and step % every == 0:
            return True
        return bool(minutes) and time.monotonic() - self._last >= 60 * minutes

    def _timed(self, act: Callable[[], None]) -> None:
        began = time.monotonic()
        act()
        self._stalled += time.monotonic() - began

    def _save(self, step: int, blocking: bool, prune: bool) -> None:
        """A checkpoint of this step, unless there is one. Nothing is deleted on the word of a write: what replaces it
        is read back first."""
        self._end()
        if step == self._step:
            return
        self._last = time.monotonic()
        path = self.folder.checkpoints.path(step)
        tidy = (lambda: self._prune(path)) if prune and self._outdates(step) else None
        try:
            self.folder.sync_log()
            self._orders.begin(path, blocking, tidy)
        except failures() as error:
            self._failed(step, describe(error).text)
            return
        self.under_way = step
        if blocking:
            self._end()

    def _end(self) -> None:
        """Of the save that was begun, if there is one: waits for it."""
        step, self.under_way = self.under_way, None
        if step is None:
            return
        try:
            said = self._orders.end()
        except failures() as error:
            self._failed(step, describe(error).text)
            return
        self.newest, self._step, self.failure = self.folder.checkpoints.path(step), step, None
        self._note(step)
        self._add_files()
        for text in said:
            _warn(text)
        self._say(f"saved {self.newest.name}")

    def _add_files(self) -> None:
        newest = self.newest
        assert newest is not None
        try:
            self._add(newest)
        except (OSError, FolderError) as error:  # the checkpoint is whole
            _warn(
                f"checkpoint {newest}: not all that merge needs was added to it; the next process of the run adds it: "
                f"{describe(error).text}"
            )

    def _outdates(self, step: int) -> bool:
        """Whether others may go once there is one of this step. False where nobody can tell: the next save looks
        again."""
        checkpoints = self.folder.checkpoints
        try:
            complete = [number for number, _ in checkpoints.complete()]
            saved = [number for number, _ in checkpoints.saved()]
        except OSError as error:
            _warn(f"checkpoint {checkpoints.path(step)}: older checkpoints stay: {describe(error).text}")
            return False
        return bool(self._keep.outdated([*complete, step], saved))

    def _prune(self, path: Path) -> list[str]:
        """What is to be said."""
        try:
            self.folder.checkpoints.prune(self._keep)
        except (OSError, FolderError) as error:
            return [f"checkpoint {path}: older checkpoints stay: {describe(error).text}"]
        return []

    def _failed(self, step: int, reason: str) -> None:
        self.failure = reason
        kept = f"the last good checkpoint is {self.newest}" if self.newest else "there is no checkpoint yet"
        _warn(f"the save at step {step} failed: {reason}; {kept}")


def _warn(text: str) -> None:
    warn(f"overspill: {text}")
