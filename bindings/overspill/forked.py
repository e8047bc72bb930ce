"""Engines in a forked child. The child has a copy of their objects, but not their threads, and not their memory, which
is kept out of forks: every call of such an engine is an error there, and its end does nothing."""

from __future__ import annotations

import os
import weakref
from typing import Any

from . import _core

_owners: weakref.WeakSet[Any] = weakref.WeakSet()  # every Residency


class Elsewhere:
    """Stands for the core of an engine that belongs to another process."""

    def __init__(self, pid: int):
        self._pid = pid

    def __getattr__(self, name: str) -> Any:
        raise _core.WrongProcess(
            f"overspill: the engine belongs to process {self._pid}; this is its forked child {os.getpid()}, which has "
            "neither the engine's threads nor its memory: make a new engine in this child, or start the child by "
            "spawn instead of fork"
        )

    def close(self) -> None:
        """The parent's engine is the parent's to end."""


def watch(owner: Any) -> None:
    """From now on `owner.leave(Elsewhere)` is called in every forked child."""
    _owners.add(owner)


def _after_fork() -> None:
    elsewhere = Elsewhere(os.getppid())
    for owner in list(_owners):
        if not owner.is_of_a_parent():  # else a grandparent's: it keeps the number that it has
            owner.leave(elsewhere)


os.register_at_fork(after_in_child=_after_fork)
