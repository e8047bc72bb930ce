"""A chat whose earlier turns stay read, so that a turn costs its own tokens alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from . import _core
from .inference import Model, Text

PASS = (
    128  # tokens of a prompt that are read together; between two passes the caller is asked whether to go on
)

Message = dict[str, str]


class Full(_core.OverspillError, ValueError):
    """The conversation is longer than there is room for."""


class Conversation:
    """Messages, and what the model has read of them. Threads: one at a time."""

    def __init__(self, model: Model, positions: int, system: str | None = None):
        """positions: tokens that all turns may have together; their cache is held until the conversation ends.

        Raises ValueError for a model without a chat template, or that cannot compute so many positions; BudgetError
        where its budget does not hold their cache.
        """
        if not getattr(model.tokenizer, "chat_template", None):
            raise ValueError(f"{model.path} has no chat template")
        self._model, self._system = model, system
        self._session = _core.InferenceSession(model._core, positions)
        self._tokens: list[int] = []  # given to the session; after an interrupt it may have read fewer
        self.messages: list[Message] = []
        self.finish_reason: str | None = None  # of the last answer: "stop", "length", "interrupted"
        self.reset()

    @property
    def positions(self) -> int:
        """Tokens that there is room for."""
        return self._session.capacity

    @property
    def length(self) -> int:
        """Tokens that are read."""
        return self._session.length

    @property
    def system(self) -> str | None:
        """What the model is told before all messages. Set it by `reset`."""
        return self._system

    def reset(self, system: str | None = None) -> None:
        """Forgets all messages. `system`, where given, is told from now on; "" is nothing."""
        if system is not None:
            self._system = system
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def answer(
        self,
        text: str,
        *,
        max_new_tokens: int | None = None,
        stopped: Callable[[], bool] = lambda: False,
        **sampling: Any,
    ) -> Iterator[str]:
        """Piece after piece of the answer to one more message. Both are kept when the answer ends, also where it was
        `stopped`, which is asked before each pass. Neither is kept where an error ends it, or it was stopped before it
        began.

        max_new_tokens: as many as there is room for, by default. sampling: of `Model.tokens`.
        Raises Full where the messages leave no room for an answer; what the chat template raises.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        ids = self._model.encode(asked)
        room = self.positions - len(ids) + 1  # the last token is drawn and never read
        if room < 1:
            raise Full(f"the conversation has {len(ids)} tokens, and there is room for {self.positions}")
        sampler = _core.InferenceSampler(**sampling)
        pieces, written = [], Text(self._model.tokenizer)
        count = room if max_new_tokens is None else min(room, max_new_tokens)
        for token in self._draw(ids, sampler, count, stopped):
            if piece := written.add(token):
                pieces.append(piece)
                yield piece
        if piece := written.end():
            pieces.append(piece)
            yield piece
        if pieces or self.finish_reason != "interrupted":
            self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]

    def _draw(self, ids: list[int], sampler: Any, count: int, stopped: Callable[[], bool]) -> Iterator[int]:
        self.finish_reason = "interrupted"
        ends = self._model.end_tokens
        unread = self._rewind(ids)
        unheeded = _core.InferenceSampler()  # of the passes before the prompt's last token
        while len(unread) > PASS:
            if stopped():
                return
            self._next(unread[:PASS], unheeded)
            unread = unread[PASS:]
        for _ in range(count):
            if stopped():
                return
            token = self._next(unread, sampler)
            if token in ends:
                self.finish_reason = "stop"
                return
            yield token
            unread = [token]
        self.finish_reason = "length"

    def _rewind(self, ids: list[int]) -> list[int]:
        """Keeps what was read of the beginning of `ids`, and returns what was not: at least the last token."""
        known = self._tokens[: self._session.length]
        common = 0
        while common < min(len(known), len(ids) - 1) and known[common] == ids[common]:
            common += 1
        self._session.rewind(common)
        self._tokens = known[:common]
        return ids[common:]

    def _next(self, ids: list[int], sampler: Any) -> int:
        self._tokens += ids
        return self._session.draw(ids, sampler, lookup=0)[0]
