"""Texts at which an answer ends."""

from __future__ import annotations

from collections.abc import Sequence


class Stops:
    """Lets a text pass, piece by piece, up to the first of the stops. What may be the beginning of one is held back
    until more is known."""

    def __init__(self, stops: Sequence[str]):
        self._stops, self._held = stops, ""
        self.found = False

    def add(self, piece: str) -> str:
        """What can go out with one more piece."""
        text = self._held + piece
        places = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self) -> str:
        """What was held back of a text that has ended."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text are the beginning of the stop."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
