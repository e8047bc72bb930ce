"""How well a model predicts a text, measured pass after pass, so that a caller can show how far it is and stop it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from . import _core
from .inference import Model

PASS = 128  # tokens of a window that are read together; between two passes the caller has its turn
WINDOW = 2048  # tokens of a text that see each other, where nothing else is said and the model can take them


@dataclass(frozen=True)
class Measure:
    """The sum over the tokens that were predicted so far."""

    tokens: int = 0
    nats: float = 0.0  # of -log p
    bytes: int | None = (
        0  # of the text that those tokens stand for, in UTF-8; None where the tokenizer does not say
    )

    @property
    def perplexity(self) -> float:
        """exp of the mean of -log p. Infinite where that is beyond a float."""
        try:
            return math.exp(self.nats / self.tokens)
        except OverflowError:
            return math.inf

    @property
    def bits_a_byte(self) -> float | None:
        """Of -log2 p, a byte of text: what models of different tokenizers can be compared by."""
        return self.nats / math.log(2) / self.bytes if self.bytes else None

    def __add__(self, other: Measure) -> Measure:
        known = self.bytes is not None and other.bytes is not None
        both = (self.bytes or 0) + (other.bytes or 0) if known else None
        return Measure(self.tokens + other.tokens, self.nats + other.nats, both)


class Text:
    """A text, its tokens, and the place in it where each token's part ends."""

    def __init__(self, model: Model, text: str):
        """Raises ValueError where it has fewer than two tokens: the first predicts the second."""
        self.text = text
        fast = model.tokenizer.is_fast
        found = model.tokenizer(text, return_offsets_mapping=fast, verbose=False)
        self.ids: list[int] = found["input_ids"]
        self._offsets: list[tuple[int, int]] | None = found["offset_mapping"] if fast else None
        if len(self.ids) < 2:
            raise ValueError(
                f"{len(self.ids)} tokens: at least two are needed, of which the first predicts the second"
            )

    def bytes_of(self, begin: int, end: int) -> int | None:
        """What tokens [begin, end) stand for. A character of several tokens counts for the last one."""
        if self._offsets is None:
            return None
        first = self._offsets[begin - 1][1] if begin else 0
        return len(self.text[first : max(first, self._offsets[end - 1][1])].encode())


def measure(model: Model, text: Text, window: int) -> Iterator[Measure]:
    """Pass after pass, what was found since the one before. The text is cut into windows of so many tokens; each is
    read by itself, and its first token is predicted by nothing and not counted. A last window of one token is left out.

    Raises ValueError for a window below 2, or a text with a token that the model has no row for.
    """
    if window < 2:
        raise ValueError(f"window is {window}, and is to be at least 2")
    for begin in range(0, len(text.ids) - 1, window):
        yield from _window(model, text, begin, min(begin + window, len(text.ids)))


def _window(model: Model, text: Text, begin: int, end: int) -> Iterator[Measure]:
    """The last token of a pass is read again as the first of the next one: it predicts that one's second."""
    session, at = _core.InferenceSession(model._core, end - begin), begin
    while at + 1 < end:
        session.rewind(at - begin)
        ids: Sequence[int] = text.ids[at : min(at + PASS, end)]
        nats = -math.fsum(session.score(ids))
        last = at + len(ids)
        yield Measure(len(ids) - 1, nats, text.bytes_of(at + 1, last))
        at = last - 1
