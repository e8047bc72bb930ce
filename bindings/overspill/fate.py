"""How the failure of one rank reaches the others: from before they are connected until the last of them has ended.

The first reason that a rank declares is kept in torch.distributed's store, and all ranks say that one. Whoever waits
for another rank either looks there (Fate.wait_for_all), or waits on a connection that a rank which fails closes
(ranks.Group).
"""

from __future__ import annotations

import atexit
import collections
import datetime
import hashlib
import json
import os
import sys
import time
import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ._core import EngineFailed

STORE_PATIENCE = datetime.timedelta(seconds=10)
LAST_WORDS_SECONDS = 10.0  # that SIGTERM leaves under torchrun to say which rank was lost
_LOOK_SECONDS = 0.02, 0.5  # between two looks at the store: at first, and at most
_LONGEST = 10_000  # letters of a reason
_REASON = "reason"
_HERE = "here/"  # and a rank
_HEARD = "heard/"  # and a rank
_ENDED = "overspill/ended"  # a rank of the world ended by an exception before it called initialize
_ENDED_WHY = "overspill/ended/{}"  # by its number in the world
_ENDED_HEARD = "overspill/ended_heard"  # by how many
_process = os.getpid()
_made: collections.Counter[str] = collections.Counter()  # fates so far, by their ranks
_at_exit_by_exception = False


class Fate:
    """Of the ranks of `process_group`, None for the default group, that make one engine together. Collective in so far
    as each of them makes as many as the others."""

    def __init__(self, process_group: Any = None):
        self.rank, self.world = dist.get_rank(process_group), dist.get_world_size(process_group)
        self._numbers = dist.get_process_group_ranks(process_group)  # in the world
        whose = hashlib.blake2b(json.dumps(self._numbers).encode(), digest_size=8).hexdigest()
        _made[whose] += 1
        # A connection of our own, with patience of our own: it is used from several threads, also at exit.
        self._kept = distributed_c10d._get_default_store()
        self._all = self._kept.clone()
        self._all.set_timeout(STORE_PATIENCE)
        self._name = f"overspill/{whose}/{_made[whose]}"
        self._store = dist.PrefixStore(self._name, self._all)
        self._keeper = _keeper(self._kept, self._numbers)
        self._declared = False
        self._lost: int | None = None  # will never hear
        self._group: weakref.ref | None = None
        self._process = os.getpid()
        atexit.register(self._at_exit)

    def addresses(self) -> Any:
        """A store for those of this fate's connections: another fate of the same ranks has another."""
        return dist.PrefixStore(f"{self._name}/addresses", self._kept)

    def shared_with(self, group: Any) -> None:
        """`group`, a ranks.Group, has connections that end when this rank fails."""
        self._group = weakref.ref(group)

    def declare(self, why: str, lost: int | None = None) -> str:
        """Tells all ranks why the world ends; the first reason counts, and is returned. Raises when nobody keeps it.

        lost: the rank that is gone, where one is. A rank that keeps the store ends only when the others have heard
        (_linger). So where the store is gone, its rank was the first to go, and who else is gone left because of it.
        """
        try:
            said = json.loads(self._store.compare_set(_REASON, "", json.dumps([why, lost])))
            self._store.set(f"{_HEARD}{self.rank}", "")
        except dist.DistNetworkError as error:
            return self._without_store(error)
        self._declared, self._lost = True, said[1]
        return said[0]

    def failed(self, error: BaseException) -> str:
        """`declare`s that this rank ends by `error`. Where the store is gone the others notice that this rank is."""
        try:
            return self.declare(f"rank {self.rank} failed: {_text(error)}")
        except RuntimeError:
            return ""

    def wait_for_all(self, patience_seconds: float) -> None:
        """Returns when all ranks have called this; raises EngineFailed when one cannot come, or does not in time."""
        until, pause = time.monotonic() + patience_seconds, _LOOK_SECONDS[0]
        here = [f"{_HERE}{rank}" for rank in range(self.world)]
        try:
            self._store.set(here[self.rank], "")
            while not self._store.check(here):
                self._look_for_a_failure()
                if time.monotonic() > until:
                    missing = next(rank for rank, key in enumerate(here) if not self._store.check([key]))
                    self._end(f"rank {missing} did not join within {patience_seconds:g} s", missing)
                time.sleep(pause)
                pause = min(2 * pause, _LOOK_SECONDS[1])
        except dist.DistNetworkError as error:
            raise EngineFailed(f"overspill: {self._without_store(error)}") from None

    def _look_for_a_failure(self) -> None:
        if self._store.check([_REASON]):
            self._end("")
        if not self._all.check([_ENDED]):
            return
        for rank, number in enumerate(self._numbers):
            if self._all.check([_ENDED_WHY.format(number)]):
                self._all.add(_ENDED_HEARD, 1)
                self._end(f"rank {rank} {self._all.get(_ENDED_WHY.format(number)).decode()}", rank)

    def _end(self, why: str, lost: int | None = None) -> None:
        raise EngineFailed(f"overspill: {self.declare(why, lost)}")

    def _without_store(self, error: RuntimeError) -> str:
        if self._keeper in (None, self.rank):
            raise error
        return f"rank {self._keeper} is gone ({first_line(error)})"

    def over(self) -> None:
        """The ranks have parted in peace."""
        if not self._declared:
            atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        """The other ranks need not wait for one that ends by an exception."""
        if os.getpid() != self._process:  # forked: the connections are its parent's
            return
        error = getattr(sys, "last_value", None)
        if error is not None and not self._declared:
            group = self._group() if self._group is not None else None
            if group is not None:
                group.abort(error)
            else:
                self.failed(error)
        if self._declared and self._keeper == self.rank:
            self._linger()

    def _linger(self) -> None:
        """The store ends with this process: all others, but for one that is lost, have heard why the world ends, or had
        the time."""
        hearing = [f"{_HEARD}{rank}" for rank in range(self.world) if rank != self._lost]
        until = time.monotonic() + LAST_WORDS_SECONDS
        try:
            while not self._store.check(hearing) and time.monotonic() < until:
                time.sleep(_LOOK_SECONDS[0])
        except RuntimeError:
            pass  # nobody can be told any more


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_LONGEST]


def first_line(error: BaseException) -> str:
    """Of what torch says, without where in torch it was said."""
    text = str(error)
    return (text.splitlines() or [text])[0].rpartition("] ")[2].partition(". This is")[0]


def _keeper(store: Any, numbers: list[int]) -> int | None:
    """The rank whose process has the store; None where it is torchrun's agent, or none of these."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore) or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    return numbers.index(0) if 0 in numbers else None


def process_ends_by_exception() -> bool:
    """Whether Python has printed the exception that ends this process, and calls what was registered for its end."""
    return _at_exit_by_exception


def _ended_before() -> None:
    """At exit, of a script that ends by an exception before it has called initialize: the ranks that have called
    it wait for this one."""
    global _at_exit_by_exception
    error = getattr(sys, "last_value", None)
    _at_exit_by_exception = error is not None
    if os.getpid() != _process or error is None or not (dist.is_available() and dist.is_initialized()):
        return
    try:
        store = distributed_c10d._get_default_store()
        store.set(_ENDED_WHY.format(dist.get_rank()), f"failed: {_text(error)}")
        store.set(_ENDED, "")
        if _made or _keeper(store, [dist.get_rank()]) is None:
            return
        until = time.monotonic() + LAST_WORDS_SECONDS
        while store.add(_ENDED_HEARD, 0) < dist.get_world_size() - 1 and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS[0])
    except RuntimeError:
        pass  # the store is gone, and its rank before this one


atexit.register(_ended_before)
