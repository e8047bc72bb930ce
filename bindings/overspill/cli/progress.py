"""How far a command is that reads or writes many bytes: one line on a terminal, nothing elsewhere."""

import sys
import time
from collections.abc import Callable

from overspill.memory import human

_EVERY = 0.1  # seconds
_WIDTH = 20  # of the bar


def on_terminal(what: str) -> Callable[[int, int], None] | None:
    """What shows bytes done of bytes in all; None where nobody would see it."""
    return Bar(what) if sys.stderr is not None and sys.stderr.isatty() else None


class Bar:
    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic):
        self._what, self._clock = what, clock
        self._begun = self._shown = clock()

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if done < total and now - self._shown < _EVERY:
            return
        self._shown = now
        print(
            f"\r{self.line(done, total, now)}",
            end="" if done < total else "\n",
            file=sys.stderr,
            flush=True,
        )

    def line(self, done: int, total: int, now: float) -> str:
        """Ends with spaces: a line before it may have been longer."""
        filled = _WIDTH * done // total if total else _WIDTH
        rate = done / (now - self._begun) if now > self._begun else 0
        left = f", {(total - done) / rate:.0f} s left" if rate and done < total else ""
        bar = "#" * filled + "." * (_WIDTH - filled)
        return f"{self._what} [{bar}] {human(done)} of {human(total)}, {human(rate)}/s{left}".ljust(79)
