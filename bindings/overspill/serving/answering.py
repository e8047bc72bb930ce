"""An answer: tokens of a batch become text, as they come, up to where a request says that it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ..inference import Text
from .stops import Stops

if TYPE_CHECKING:
    from ..inference_batch import Answer


class TokenText(NamedTuple):
    """A token, its log-probability, and those of the likeliest beside it."""

    token: int
    log_probability: float
    likeliest: list[tuple[int, float]]


@dataclass
class Piece:
    """What became known at once: text, and the tokens that ended in it, where log-probabilities were asked for."""

    text: str = ""
    tokens: list[TokenText] = field(default_factory=list)


class Written:
    """The text of one answer. `pieces` may be read once; afterwards `finish_reason` and `tokens` are known."""

    def __init__(self, answer: Answer, tokenizer: Any, stops: tuple[str, ...], likeliest: int | None):
        """likeliest: how many beside a token that is drawn; None where no log-probabilities are asked for."""
        self._answer, self._text, self._stops = answer, Text(tokenizer), Stops(stops)
        self._likeliest = likeliest
        self.tokens = 0
        self.finish_reason: str | None = None
        self._pending: list[
            tuple[int, TokenText]
        ] = []  # with where its text begins, counted from the answer's start
        self._made = self._sent = 0  # characters

    async def pieces(self, threads: Executor) -> AsyncIterator[Piece]:
        """Raises what ended the batch. However it ends, the answer's place in the batch is free."""
        loop = asyncio.get_running_loop()
        try:
            while not self._stops.found:
                taken, ended = await loop.run_in_executor(threads, _take, self._answer)
                for token in taken:
                    self._add(token, piece := Piece())
                    if piece.text or piece.tokens:
                        yield piece
                    if self._stops.found:
                        break
                if ended and not self._stops.found:
                    yield self._end()
                    # The last characters may hold a stop whose beginning was all that had been known.
                    self.finish_reason = "stop" if self._stops.found else self._answer.finish_reason
                    return
            self.finish_reason = "stop"
        finally:
            self._answer.cancel()

    def cut(self) -> None:
        """Ends the answer where it is; its `finish_reason` becomes "cancelled". Threads: any."""
        self._answer.cancel()

    def _add(self, token: int, piece: Piece) -> None:
        if self._likeliest is not None:
            _, probability, likeliest = self._answer.log_probabilities[self.tokens]
            self._pending.append((self._made, TokenText(token, probability, likeliest[: self._likeliest])))
        self.tokens += 1
        self._show(self._text.add(token), self._stops.add, piece)

    def _end(self) -> Piece:
        piece = Piece()
        self._show(self._text.end(), self._stops.add, piece)
        if not self._stops.found:
            rest = self._stops.end()
            piece.text += rest
            self._sent += len(rest)
        piece.tokens += [token for at, token in self._pending if at < self._sent or not self._stops.found]
        self._pending.clear()
        return piece

    def _show(self, text: str, passed: Callable[[str], str], piece: Piece) -> None:
        self._made += len(text)
        piece.text = passed(text) if text else ""
        self._sent += len(piece.text)
        piece.tokens = [token for at, token in self._pending if at < self._sent]
        self._pending = [(at, token) for at, token in self._pending if at >= self._sent]


def _take(answer: Answer) -> tuple[list[int], bool]:
    """Waits for a token, and takes those that are there by then; whether that was all."""
    taken: list[int] = []
    try:
        while (token := answer.next(None if not taken else 0)) is not None:
            taken.append(token)
    except TimeoutError:
        return taken, False
    return taken, True
