"""The ranks of one run of `overspill train`, which torchrun starts: all compute, the first writes the run's folder and
speaks."""

import os
from typing import Any

from overspill.cli.loop import Stop


def own_number() -> int:
    """This process's, as torchrun says it; 0 where there is no torchrun."""
    return int(os.environ.get("RANK", "0")) if in_all() > 1 else 0


def in_all() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def on_this_machine() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if in_all() > 1 else 1


class Ranks:
    """What they tell each other. Every call but `first` is made by all of them, in the same order. `group`: of the
    engine; None where there is one rank."""

    def __init__(self, group: Any):
        self._group = group
        self.number, self.world = (0, 1) if group is None else (group.rank, group.world)

    @property
    def first(self) -> bool:
        return self.number == 0

    def each(self, value: Any) -> list[Any]:
        """Every rank's value, which JSON can have."""
        return [value] if self._group is None else self._group.gathered(value)

    def of_first(self, value: Any) -> Any:
        return self.each(value)[0]


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
