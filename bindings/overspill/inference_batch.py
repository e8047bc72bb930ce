"""Many texts at once, each as it would be alone: `Batch`.

    with inference.Batch(model) as batch:
        answers = [batch.submit(model.encode(prompt), max_new_tokens=64) for prompt in prompts]
        for answer in answers:
            print(model.tokenizer.decode(list(answer)), answer.finish_reason)

A pass of the model reads every weight once for all texts that run, so that several take little longer than one. Texts
come and go between passes. Where a text begins as another one did, it takes over what that one's tokens left in the
cache. What is drawn for a text does not depend on the others, bit for bit.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from . import _core
from ._core import QueueFull

if TYPE_CHECKING:
    from .inference import Model, Prompt

__all__ = ["Answer", "Batch", "LogProbability", "QueueFull"]

_POSITIONS_A_TEXT = 2048  # of cache, where no budget says how much there is
_SIGNALS_SECONDS = 0.1  # a thread that waits looks so often whether Ctrl-C was pressed

LogProbability = tuple[int, float, list[tuple[int, float]]]
"""A token, the natural logarithm of its probability, and (token, logarithm) of the likeliest tokens at its place, the
likeliest first. Probabilities are the model's, before temperature and the other options change them."""


Constraint = Callable[[int, int, int, int], None]
"""Called before each token is drawn, with how many tokens the text has, the last of them, and the address and number
of the fp32 logits, of which it sets those of excluded tokens to -infinity. The model's threads call it, those of
several texts at the same time. It may not compute with the model, nor close the batch: both would wait for themselves,
and raise."""


class Answer:
    """Tokens of one text, as a `Batch` draws them. Threads: one reads; `cancel` may be called from any. An answer that
    nobody holds any more is not gone on with."""

    def __init__(self, core: Any, with_log_probabilities: bool):
        """By Batch.submit."""
        self._core = core
        self._with_log_probabilities = with_log_probabilities
        self.log_probabilities: list[LogProbability] = []
        """Of the tokens that were taken so far; empty where none were asked for."""

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        token = self.next()
        if token is None:
            raise StopIteration
        return token

    def next(self, timeout: float | None = None) -> int | None:
        """Waits for the next token; None at the end, again and again.

        Raises TimeoutError where there is none within `timeout` seconds; ValueError where the logits are no numbers to
        draw from; what ended the batch, if an error did, after the last token that was drawn before it; WrongProcess in
        a forked child.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _SIGNALS_SECONDS if end is None else max(0.0, end - time.monotonic())
            if self._core.wait(min(left, _SIGNALS_SECONDS)):
                break
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"no token within {timeout} seconds")
        drawn = self._core.take()
        if drawn is None:
            return None
        token: int = drawn.token
        if self._with_log_probabilities:
            self.log_probabilities.append((token, drawn.log_probability, drawn.likeliest))
        return token

    @property
    def finish_reason(self) -> str | None:
        """None while tokens are drawn. "stop": the model drew an end token, which is left out. "length": there are as
        many tokens as were asked for. "cancelled": by `cancel` or Batch.close. "failed": `next` raises the error."""
        reason: str | None = self._core.finish_reason
        return reason

    def cancel(self) -> None:
        """Ends the answer: no more tokens are drawn, and those that were not taken yet are dropped. Does nothing to an
        answer that has ended, but for the latter."""
        self._core.cancel()


class Batch:
    """A thread that computes the answers to up to `texts` requests at once. Threads: any.

    In a forked child every call raises WrongProcess; open another one there, of a model that the child loaded."""

    def __init__(self, model: Model, *, texts: int = 8, positions: int | None = None, waiting: int = 64):
        """
        Args:
            model: whose weights compute the answers
            texts: computed at once, at most 32
            positions: tokens that the cache has room for, those of all texts together and of beginnings that are kept
                for later ones. A text for which there is no room waits. None: what the model's budget keeps, or,
                without a budget, 2048 (or the model's context, where that is less) for each text
            waiting: requests beside the `texts` that are computed

        Raises:
            ValueError: a value is out of range
            BudgetError: the model's budget has less left for caches
            StoreError: the machine refuses a thread
        """
        if positions is None:
            positions = model.budget_positions or texts * min(model.context, _POSITIONS_A_TEXT)
        self._model = model
        self._core = _core.InferenceBatch(model._core, texts, positions, waiting)
        # At the interpreter's end too, while the thread still can end.
        self._close = weakref.finalize(self, _close, self._core)

    def submit(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition: float = 1.0,
        seed: int = 0,
        bias: dict[int, float] | None = None,
        end_tokens: Iterable[int] | None = None,
        log_probabilities: int = 0,
        lookup: int = 0,
        constraint: Constraint | None = None,
    ) -> Answer:
        """Asks for what follows the prompt, and returns at once. The answer has the tokens that `Model.tokens` has with
        the same options; see there.

        Args:
            prompt: as of `Model.tokens`, and so is what is not named here
            log_probabilities: of the token that is drawn and of the likeliest so many; 0 for none
            constraint: excludes tokens that may not come next; what it raises is a ValueError of this answer alone

        Raises:
            QueueFull: as many requests wait as may
            ValueError: a prompt without tokens, one that does not fit the cache with its answer, or a value that is
                out of range
            RuntimeError: after `close`
        """
        ids = self._model.encode_some(prompt)
        ends = self._model.end_tokens if end_tokens is None else end_tokens
        core = self._core.submit(
            tokens=ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition=repetition,
            seed=seed,
            bias=sorted((bias or {}).items()),
            end_tokens=sorted(set(ends)),
            log_probabilities=log_probabilities,
            lookup=lookup,
            constraint=constraint,
        )
        return Answer(core, log_probabilities > 0)

    @property
    def counts(self) -> dict[str, int]:
        """Since the batch was opened: "passes" of the model, "computed" positions, positions "reused" of another text,
        "guessed" tokens that were right (lookup), texts that were "put_back" since the cache was full, to be read anew.
        """
        counts: dict[str, int] = self._core.counts
        return counts

    def close(self) -> None:
        """Cancels what has not ended, and returns once the thread has. Called again, does nothing."""
        self._core.close()
        self._close.detach()

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(core: Any) -> None:
    if (
        core.is_inside
    ):  # a constraint of its own held it last: it ends when that thread is not waited for by itself
        return
    try:
        core.close()
    except _core.WrongProcess:
        pass  # the parent's batch is the parent's to end
