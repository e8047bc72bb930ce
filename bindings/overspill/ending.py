"""How an engine ends: by close(), by the garbage collector, or because it could not be made."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from . import _core, fate, patches, ranks
from .residency import Residency


class End:
    """Ends an engine when it is called, once; again where Ctrl-C broke it off, and that finishes it. `core` and `owner`
    are given as soon as they are there. `over`: nothing is left to end. It refers to nothing that holds the engine's
    Life."""

    def __init__(self, groups: tuple[ranks.Group | None, ...]):
        self.groups, self.over = groups, False
        self.core: Any = None
        self.behind: Any = None  # what is saved behind the script
        self.owner: Residency | None = None
        self._thread: threading.Thread | None = None

    def __call__(self) -> None:
        """The garbage collector calls it on any thread that runs Python, such as the core's own while it exchanges
        messages (ranks.Group). Closing waits for the core's threads, so one of those has another thread do it. Python
        does not end before that."""
        if self.over or (self._thread is not None and self._thread.is_alive()):
            return
        if isinstance(threading.current_thread(), threading._DummyThread):  # not one that Python started
            self._thread = threading.Thread(target=self._close, name="overspill close", daemon=False)
            self._thread.start()
        elif fate.process_ends_by_exception():
            # What ends the process was printed, and an engine that has failed because of it, here or on another rank,
            # is no news: printed last, it would hide the cause.
            with contextlib.suppress(_core.EngineFailed):
                self._close()
        else:
            self._close()

    def collected(self) -> None:
        """For the finalizer, which calls once, and after which nobody has the engine to call again: what Ctrl-C breaks
        off is taken up until it is done, and the first Ctrl-C raised then. Two loops, as in vertical.run: the jump back
        of the inner one is inside the `try` of the outer one."""
        struck: KeyboardInterrupt | None = None
        while True:
            try:
                while True:
                    try:
                        self()
                        break
                    except KeyboardInterrupt as error:
                        struck = struck or error
                break
            except KeyboardInterrupt as error:
                struck = struck or error
        if struck is not None:
            raise struck

    def give_up(self, error: BaseException) -> None:
        """Ends an engine that `error` has stopped from being made. The other ranks are told first: else this one would
        serve them until they have left too, and they would wait for it."""
        ranks.tell(error, self.groups)
        with contextlib.suppress(_core.EngineFailed):  # because of `error`, which is raised
            self()

    def _close(self) -> None:
        """The model's hooks stay: where it outlives the engine they say that the weights are gone."""
        if self.owner is not None and self.owner.is_of_a_parent():
            return
        failure: Exception | None = None if self.behind is None else self.behind.close()
        for part in (self.owner, self.core):  # the core in any case: its threads must not outlive Python
            try:
                if part is not None:
                    part.close()
            except BaseException as error:
                ranks.tell(error, self.groups)
                if not isinstance(error, Exception):
                    raise  # Ctrl-C: what is left is ended by the next call
                failure = failure or error  # all of it is gone all the same
        if self.owner is not None:
            patches.uninstall(self.owner)
        for group in self.groups:
            if group is not None:
                group.close()
        self.over = True
        if failure is not None:
            raise failure
