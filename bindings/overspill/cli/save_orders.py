"""What all ranks do for a save: the first one gives the orders, the others follow them."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from overspill.cli.ranks import Ranks

LOOK_SECONDS = 0.05  # between looks whether a save is complete


def failures() -> tuple[type[Exception], ...]:
    """What a save raises that failed, and after which the run goes on."""
    from overspill import CheckpointError, StoreError

    return OSError, StoreError, CheckpointError


class SaveOrders:
    """`take` saves to a folder; its second argument says whether it returns only when the checkpoint is whole.
    `behind`: the engine's, of overspill.saving_behind."""

    def __init__(self, ranks: Ranks, take: Callable[[Path, bool], None], behind: Any):
        self._ranks, self._take, self._behind = ranks, take, behind

    # ---- of the first rank

    def begin(self, path: Path, blocking: bool, tidy: Callable[[], list[str]] | None) -> None:
        """`tidy`: called once the checkpoint was read back; None: it is not. Raises one of `failures`."""
        self._ranks.of_first(["begin", str(path), blocking, tidy is not None])
        self._begin(path, blocking, tidy)

    def is_under_way(self) -> bool:
        """Of the save that was begun, with what follows it."""
        return bool(self._behind.progress().under_way)

    def end(self) -> list[str]:
        """Waits for the save that was begun. Returns what is to be said. Raises one of `failures`."""
        self._ranks.of_first(["hurry"])
        try:
            self._ranks.while_others_wait(self._wait)
        except BaseException:
            self._behind.leave()
            raise
        self._ranks.of_first(["end"])
        return self._end()

    def leave(self) -> None:
        """What was saved is not read back any more, and older checkpoints stay."""
        self._behind.leave()

    def over(self) -> None:
        """The others need not follow any more."""
        self._ranks.over()

    # ---- of the others

    def follow(self) -> None:
        """Until the first rank says `over`."""
        while order := self._ranks.of_first(None):
            if order is not True:  # a word that the first rank still waits
                self._obey(*order)

    def _obey(self, what: str, *given: Any) -> None:
        from overspill import OverspillError

        with contextlib.suppress(OSError, OverspillError):  # which the first rank tells
            if what == "begin":
                path, blocking, tidies = given
                self._begin(Path(path), blocking, list if tidies else None)
            elif what == "hurry":
                self._behind.hurry()
            else:
                self._end()

    # ---- of all

    def _begin(self, path: Path, blocking: bool, tidy: Callable[[], list[str]] | None) -> None:
        self._take(path, blocking)
        if tidy is not None:
            self._behind.read_back(path, tidy)

    def _wait(self) -> None:
        self._behind.hurry()
        while self.is_under_way():
            time.sleep(LOOK_SECONDS)

    def _end(self) -> list[str]:
        said: list[str] = self._behind.ended("save_checkpoint")
        return said
