"""Saves that go on while training does, and what follows when one is complete: it is read back, and older checkpoints
go (retention.py). One at a time."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from . import given, ranks, retention, saves
from .folders import FolderError

Tidy = Callable[[], list[str]]  # removes older checkpoints, and returns what is to be said

_LOOK_SECONDS = 0.05  # between looks whether the save is complete
_REST = 6  # times as long as reading a piece took: the disks are left to training for most of the time


class _Left(Exception):
    """Nobody wants the checkpoint read back any more."""


class SaveProgress(NamedTuple):
    """Of this rank's part of the last save: where, whether it goes on, and bytes."""

    folder: Path | None
    under_way: bool
    bytes: int
    done_bytes: int


class Behind:
    """What an engine saves behind its script. It does not hold the engine."""

    def __init__(self, core: Any, group: Any):
        self._core, self._group = core, group
        self.folder: Path | None = None
        self._thread: threading.Thread | None = None
        self._hurried, self._left = threading.Event(), threading.Event()
        self._failure: Exception | None = None
        self._said: list[str] = []
        self._retains = False

    def progress(self) -> SaveProgress:
        """Any thread may ask."""
        found = self._core.save_progress()
        reads_back = self._thread is not None and self._thread.is_alive()
        return SaveProgress(
            self.folder, found["under_way"] or reads_back, found["bytes"], found["done_bytes"]
        )

    def begun(self, folder: Path) -> None:
        """A save was begun in the core."""
        self.folder, self._failure, self._said = folder, None, []
        self._retains = False
        self._hurried.clear()
        self._left.clear()

    def read_back(self, folder: Path, tidy: Tidy) -> None:
        """Reads the checkpoint back once it is complete, and calls `tidy` then: on rank 0, behind the script. All ranks
        call it, after the save."""
        self.begun(folder)
        self._retains = True
        if self._group is None or self._group.rank == 0:
            # Python waits for it at its end, as for the save itself.
            thread = threading.Thread(target=self._retain, args=(folder, tidy), name="overspill save")
            thread.start()
            self._thread = thread

    def wait(self, call: str) -> None:
        """As `ended`, and warns of what is to be said."""
        for text in self.ended(call):
            warnings.warn(f"overspill: {text}", stacklevel=given.script_level())

    def ended(self, call: str) -> list[str]:
        """Returns, with what is to be said, when the last save is complete, and older checkpoints are gone. Raises what
        went wrong, once, on all ranks. `call`: of the script's, by name."""
        if self.folder is None:
            return []
        try:
            self._hurried.set()
            self._core.wait_for_save()
        finally:
            self._join()
        if not self._retains:
            return []
        self._retains = False
        with ranks.ByOne(self._group, call) as failures:
            if self._failure is not None:
                failures.append(self._failure)
            self._failure = None
        said, self._said = self._said, []
        return said

    def hurry(self) -> None:
        """Somebody waits."""
        self._hurried.set()
        self._core.hurry_save()

    def leave(self) -> None:
        """The checkpoint is not read back, and older ones stay: for a script that ends."""
        self._left.set()
        self.hurry()

    def close(self) -> Exception | None:
        """For the engine's end, which waits for the save itself: returns what went wrong after that, on this rank."""
        if self._thread is None or self._thread is threading.current_thread():
            return None
        self.hurry()
        self._join()
        failure, self._failure = self._failure, None
        for text in self._said:
            warnings.warn(f"overspill: {text}", stacklevel=given.script_level())
        return failure

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _retain(self, folder: Path, tidy: Tidy) -> None:
        while self._core.save_progress()["under_way"]:
            if not threading.main_thread().is_alive():  # the process ends, and waits for this thread
                self.hurry()
            time.sleep(_LOOK_SECONDS)
        if not saves.is_complete(folder):
            return  # wait() says why
        try:
            retention.read_back(folder, self._pace())
            self._said += tidy()
        except _Left:
            pass
        except Exception as error:
            self._failure = error

    def _pace(self) -> Callable[[int, int], None]:
        """Called after each piece that was read."""
        last = time.monotonic()

        def pause(_done: int, _total: int) -> None:
            nonlocal last
            if threading.main_thread().is_alive():
                self._hurried.wait(_REST * (time.monotonic() - last))
            if self._left.is_set():
                raise _Left
            last = time.monotonic()

        return pause


def tidy(path: Path, keep: retention.Keep) -> list[str]:
    """Removes old checkpoints after a save that was read back. What cannot be removed does not fail the save: returns
    what is to be said."""
    try:
        aside = retention.tidy(path, keep)
    except (OSError, FolderError) as error:
        reason = str(error).removeprefix("overspill: ")
        return [f"save_checkpoint: {path} is whole; older checkpoints stay: {reason}"]
    if not aside:
        return []
    names = ", ".join(other.name for other in aside)
    return [
        f"save_checkpoint: later checkpoints than {path} are of a branch that was left; they are now {names}, and "
        "Overspill does not delete them"
    ]
