"""The ranks of one run of `overspill train`, which torchrun starts: all compute, the first writes the run's folder and
speaks."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from overspill.cli.common import CliError, describe
from overspill.cli.loop import Stop

LOOK_SECONDS = 5.0  # between two words of a rank for which the others wait
PATIENCE_SECONDS = 1800.0  # the engine's own: of who waits for a rank that says nothing


def in_all() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def on_this_machine() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if in_all() > 1 else 1


class Ranks:
    """What they tell each other. Every call is made by all of them, in the same order. `group`: an
    overspill.ranks.Group that nobody else uses; None where there is one rank."""

    def __init__(self, group: Any = None):
        self.group = group
        self.number, self.world = (0, 1) if group is None else (group.rank, group.world)

    @classmethod
    def joined(cls) -> "Ranks":
        """Those that torchrun has started."""
        from overspill import ranks

        if in_all() > 1 and "RANK" not in os.environ:
            raise CliError(
                f"WORLD_SIZE is {in_all()} and RANK is not set: start several ranks with torchrun "
                "(docs/torchrun.md), or unset WORLD_SIZE for one"
            )
        return cls(ranks.join(None, PATIENCE_SECONDS) if in_all() > 1 else None)

    def end_others(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """What an exception of this rank means for those that wait for it; for contextlib.ExitStack.push."""
        if error is not None:
            from overspill import ranks

            ranks.tell(error, [self.group])

    def close(self) -> None:
        if self.group is not None:
            self.group.close()

    @property
    def first(self) -> bool:
        return self.number == 0

    @property
    def here(self) -> int:
        """Its number among this machine's."""
        return 0 if self.world == 1 else int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def first_here(self) -> bool:
        """Of this machine's."""
        return self.here == 0

    def each(self, value: Any) -> list[Any]:
        """Every rank's value, which JSON can have."""
        return [value] if self.group is None else self.group.gathered(value)

    def of_first(self, value: Any) -> Any:
        return self.each(value)[0]

    def check_alike(self, what: dict[str, Any]) -> None:
        """Raises RankError, on all of them, where a value differs."""
        if self.group is not None:
            self.group.check_alike(what)

    @contextlib.contextmanager
    def all_or_none(self) -> Iterator[None]:
        """What one of them raises inside, all raise: none goes on to wait for one that has ended."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        said = self.each(None if failure is None else describe(failure).text)
        if failure is not None:
            raise failure
        for number, text in enumerate(said):
            if text is not None:
                raise CliError(f"rank {number} failed: {text}")

    def while_others_wait(self, act: Callable[[], Any]) -> Any:
        """What `act` returns or raises. The others ask the first one meanwhile, `of_first`, and hear True from time to
        time: a collective that nobody joins for long is taken for a rank that is gone."""
        if self.group is None:
            return act()
        outcome: dict[str, Any] = {}

        def work() -> None:
            try:
                outcome["value"] = act()
            except Exception as error:
                outcome["error"] = error

        worker = threading.Thread(target=work)
        worker.start()
        worker.join(LOOK_SECONDS)
        while worker.is_alive():
            self.of_first(True)
            worker.join(LOOK_SECONDS)
        if "error" in outcome:
            raise outcome["error"]
        return outcome["value"]

    def over(self) -> None:
        """Ends what the others wait for."""
        self.of_first(False)


class SharedStop:
    """A request to stop that any rank got. One rank alone sees it at once; several see it where they `look`, between
    two steps, so that none waits for another one that has stopped."""

    def __init__(self, stop: Stop, ranks: Ranks):
        self._stop, self._ranks = stop, ranks
        self._signal = 0  # that all know of
        self.listening = stop.listening

    def look(self) -> None:
        """All ranks call it."""
        self._signal = max(self._ranks.each(self._stop.signal or 0))

    def __bool__(self) -> bool:
        return self._signal > 0 or (self._ranks.world == 1 and bool(self._stop))

    @property
    def exit_code(self) -> int:
        return 128 + (self._signal or self._stop.signal or 0)
