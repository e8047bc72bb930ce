"""Models that are run on the CPU, not trained: `load` a Hugging Face folder, then `generate`, `logits`, `perplexity`.

    model = overspill.inference.load("tuned")
    for piece in model.generate("def ", max_new_tokens=64, temperature=0.6):
        print(piece, end="", flush=True)

Weights stay as the files have them, bf16 or fp32 (fp16 becomes fp32), unless `load` is asked for fewer bits. Everything
else is computed in fp32, but for the inputs of bf16 matrices and what is kept of earlier tokens, which are bf16 too.
What a token's logits are does not depend on how many tokens are read at once.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from . import _core
from ._core import ModelError, UnknownModel
from .config.values import parse_size
from .extras import need
from .inference_batch import Answer, Batch, QueueFull
from .inference_formats import CACHES, WEIGHTS

__all__ = ["Answer", "Batch", "Model", "ModelError", "QueueFull", "Text", "UnknownModel", "families", "load"]

MOST_POSITIONS = 2**24  # of a text: above it a position is no exact float
MOST_ROWS = 4096  # computed together: more gain nothing
_TRIALS = 3  # the first one touches memory that the others find
_WINDOW = 2048  # tokens of a text whose perplexity is measured together

Prompt = str | Sequence[int] | Sequence[dict[str, str]]


def families() -> list[str]:
    """The values of config.json's `model_type` that are known here."""
    return _core.inference_families()


def load(
    folder: str | os.PathLike,
    *,
    threads: int | None = None,
    weights: str | None = None,
    cache: str | None = None,
    budget: int | str | None = None,
    positions: int = 2048,
    rows: int = 128,
) -> Model:
    """Opens a Hugging Face folder (config.json, safetensors).

    Args:
        folder: of the model
        threads: None: as many as this process has cores
        weights: None keeps them as the files have them. "12bit" keeps bf16 in three quarters of the bytes, without
            loss: the tokens are the same. "q8" rounds them to eight bits and a scale for each 32 columns of a row, in
            about half the bytes of bf16: the tokens may be others
        cache: None keeps keys and values of earlier tokens in bf16 (fp32 where a matrix is). "int8" keeps them in
            eight bits and a scale for each token of a head, in about half the bytes: the tokens may be others
        budget: bytes of memory, as a number or a text like "1200MiB", for weights, caches and buffers. What it does not
            hold of the weights is read from the folder for each pass, ahead of use, and of a mixture's experts those
            that are asked for; the tokens are the same. None holds all
        positions: of all texts that are read at a time, for which a budget keeps room
        rows: tokens of a prompt that are computed together. What a budget does not hold is read once for so many, and
            their buffers take about 70 bytes a token and hidden element

    Raises:
        UnknownModel: a family that is not among `families()`, or a key of config.json that may change what is computed
            and is not known here
        ModelError: the folder is damaged
        BudgetError: the budget does not hold the least
        StoreError: a disk fails
        MemoryError: there is not so much memory
        WrongProcess: by the model's calls, in a forked child
    """
    return Model(
        folder, threads=threads, weights=weights, cache=cache, budget=budget, positions=positions, rows=rows
    )


class Model:
    """A model that is ready to run. Threads: any; their calls take turns."""

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        threads: int | None = None,
        weights: str | None = None,
        cache: str | None = None,
        budget: int | str | None = None,
        positions: int = 2048,
        rows: int = 128,
    ):
        """See `load`."""
        self.path = Path(folder)
        threads = len(os.sched_getaffinity(0)) if threads is None else threads
        if not 1 <= threads <= 1024:
            raise ValueError(f"threads is {threads}, and is to be from 1 to 1024")
        if not 1 <= positions <= MOST_POSITIONS:
            raise ValueError(f"positions is {positions}, and is to be from 1 to {MOST_POSITIONS}")
        for name, value, known in (("weights", weights, WEIGHTS), ("cache", cache, CACHES)):
            if value is not None and value not in known:
                raise ValueError(
                    f"{name} is {value!r}, and is to be one of {', '.join(map(repr, (None, *known)))}"
                )
        bytes_ = parse_size(budget) if budget is not None else None
        if not 1 <= rows <= MOST_ROWS:
            raise ValueError(f"rows is {rows}, and is to be from 1 to {MOST_ROWS}")
        self.budget_positions = positions if budget is not None else None
        """Tokens for whose caches the budget keeps room; None without a budget."""
        self._core = _core.InferenceModel(
            os.fspath(folder), threads, weights or "", cache or "", bytes_, positions, rows
        )

    @property
    def family(self) -> str:
        """config.json's `model_type`."""
        return self._core.family

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        return self._core.vocabulary

    @property
    def context(self) -> int:
        """Positions that the model was trained for."""
        return self._core.context

    @property
    def has_position_table(self) -> bool:
        """Whether positions are looked up in a table, so that none from `context` on can be computed."""
        return self._core.has_position_table

    @property
    def weight_bytes(self) -> int:
        """What the weights that stay in memory take, and the room for experts, of which some do."""
        return self._core.weight_bytes

    @property
    def streamed_bytes(self) -> int:
        """What a pass reads of the others: 0 where all stay. Of experts it is what a token reads where its router likes
        all experts alike; where it stays with some, less is read."""
        return self._core.streamed_bytes

    @property
    def read_bytes(self) -> int:
        """What passes have read so far."""
        return self._core.read_bytes

    def expected_tokens_per_second(self, together: int = 1) -> float:
        """What a text that is written token by token is expected to get, after measurements of a moment. Where all
        weights stay in memory, a few tokens are computed. Where some are read for each token, it is what a pass reads
        by the speed at which the disk is read for half a second, or all weights by the speed of memory where that
        takes longer. A long text is slower, since each token looks at all before it. together: of a text that is
        read, so many tokens at a time; for more than one, a pass is made. Raises what reading raises."""
        if together == 1 and self.streamed_bytes:
            return 1 / self._core.seconds_a_pass()
        passes = 1 if self.streamed_bytes else _TRIALS
        session = _core.InferenceSession(self._core, together)
        times = []
        for _ in range(passes):
            session.rewind(0)
            began = time.perf_counter()
            session.score([0] * together)
            times.append(time.perf_counter() - began)
        return together / min(times)

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The folder's tokenizer, as transformers loads it at the first use."""
        need("transformers")
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.path)

    @property
    def end_tokens(self) -> frozenset[int]:
        """Every token that ends a text: those of generation_config.json and config.json, and the tokenizer's."""
        of_tokenizer = self.tokenizer.eos_token_id
        return frozenset(self._core.end_tokens) | (
            {of_tokenizer} if of_tokenizer is not None else frozenset()
        )

    def encode(self, prompt: Prompt) -> list[int]:
        """The tokens of a text, of a chat, or of tokens: a chat is a list of {"role": …, "content": …}, which the
        folder's chat template makes a text of, up to where the answer begins. A text gets what the tokenizer puts
        before one (a begin token, in some families).

        Raises ValueError for a chat where the folder has no template, and for tokens that are none of the vocabulary.
        """
        if isinstance(prompt, str):
            return self.tokenizer(prompt)["input_ids"]
        prompt = list(prompt)
        if prompt and isinstance(prompt[0], dict):
            if not getattr(self.tokenizer, "chat_template", None):
                raise ValueError(
                    f"{self.path} has no chat template; give the prompt as a text, or another model"
                )
            text = self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        wrong = [token for token in prompt if not 0 <= token < self.vocabulary]
        if wrong:
            raise ValueError(f"token {wrong[0]} is not one of the vocabulary's {self.vocabulary}")
        return prompt

    def encode_some(self, prompt: Prompt) -> list[int]:
        """`encode`, of a prompt that is to be gone on with. Raises ValueError for one without tokens, too."""
        ids = self.encode(prompt)
        if not ids:
            raise ValueError("the prompt has no tokens to go on from")
        return ids

    def tokens(
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
        lookup: int = 0,
    ) -> Iterator[int]:
        """Token after token of what follows the prompt, up to an end token, which is left out.

        Args:
            prompt: a text, tokens, or a chat, as of `encode`
            max_new_tokens: the most
            temperature: 0 takes the likeliest token
            top_k: draws from the likeliest so many; 0: from all
            top_p: from the fewest whose probability is at least this (Holtzman et al. 2020)
            min_p: from those of at least this part of the largest probability (Nguyen et al. 2024)
            repetition: above 1, tokens of the prompt and the answer become less likely (Keskar et al. 2019)
            seed: of what is drawn
            bias: by token, what is added to its logit
            end_tokens: instead of the folder's
            lookup: up to so many tokens that followed the last ones where they stood before are computed in the same
                pass, and kept where they are what is drawn (Saxena 2023). The tokens are the same as without; a text
                that repeats its prompt comes faster

        Raises:
            ValueError: at once, for a prompt without tokens, more tokens than a model with a table of positions takes,
                or a value that is out of range
        """
        ids = self.encode_some(prompt)
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}, and is to be at least 1")
        if lookup < 0:
            raise ValueError(f"lookup is {lookup}, and is to be at least 0")
        sampler = _core.InferenceSampler(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition=repetition,
            seed=seed,
            bias=sorted((bias or {}).items()),
        )
        ends = self.end_tokens if end_tokens is None else frozenset(end_tokens)
        # The last token is drawn and never read.
        session = _core.InferenceSession(self._core, len(ids) + max_new_tokens - 1)
        return _draw(session, sampler, ids, max_new_tokens, ends, lookup)

    def generate(self, prompt: Prompt, **options: Any) -> Iterator[str]:
        """Piece after piece of the text that follows the prompt; `options` are those of `tokens`. A piece is whole
        characters, and is there as soon as its last token is."""
        ids = self.encode(prompt)
        found = self.tokens(ids, **options)
        return Text(self.tokenizer, ids).pieces(found)

    def logits(self, prompt: Prompt) -> torch.Tensor:
        """[tokens, vocabulary] fp32: row i has the logits of the token after token i."""
        ids = self.encode(prompt)
        found = torch.empty(len(ids), self.vocabulary)
        if ids:
            session = _core.InferenceSession(self._core, len(ids))
            session.extend_all(ids, found.data_ptr(), found.numel())
        return found

    def log_probabilities(self, prompt: Prompt) -> torch.Tensor:
        """[tokens - 1] fp32: of each token but the first, the natural logarithm of its probability after those before
        it. Raises ValueError for fewer than two tokens."""
        ids = self.encode(prompt)
        if len(ids) < 2:
            raise ValueError(
                f"{len(ids)} tokens: at least two are needed, of which the first predicts the second"
            )
        return torch.tensor(_core.InferenceSession(self._core, len(ids)).score(ids))

    def perplexity(self, prompt: Prompt, *, window: int | None = None) -> float:
        """exp of the mean of -log p over the tokens of a text. A long text is cut into windows of so many tokens (by
        default 2048, or the model's context where that is less); each is read by itself, and its first token is
        predicted by nothing and not counted. Raises ValueError for fewer than two tokens."""
        ids = self.encode(prompt)
        window = min(self.context, _WINDOW) if window is None else window
        if window < 2:
            raise ValueError(f"window is {window}, and is to be at least 2")
        parts = [ids[i : i + window] for i in range(0, len(ids), window)]
        if len(parts) > 1 and len(parts[-1]) < 2:
            parts.pop()
        found = torch.cat([self.log_probabilities(part) for part in parts] or [self.log_probabilities(ids)])
        return math.exp(-found.double().mean().item())


def _draw(
    session: Any, sampler: Any, ids: list[int], count: int, ends: frozenset[int], lookup: int
) -> Iterator[int]:
    unread = ids
    while count > 0:
        # Of what is drawn, the last is not read: it needs no room, and no guess would be right for one more.
        drawn = session.draw(unread, sampler, min(lookup, count - 1))
        for token in drawn:
            if token in ends:
                return
            yield token
        count -= len(drawn)
        unread = drawn[-1:]


class Text:
    """Tokens as the text that they are, as they come: what one token writes may depend on the ones before it, and a
    character may be several tokens."""

    def __init__(self, tokenizer: Any, before: Sequence[int] = ()):
        """before: tokens whose text is known already."""
        self._tokenizer = tokenizer
        self._ids = list(before)
        self._begin, self._shown = 0, len(self._ids)  # text is made of tokens from `_begin`; `_shown` are out

    def add(self, token: int) -> str:
        """What can be shown with one more token; maybe nothing."""
        self._ids.append(token)
        piece = self._rest()
        if not piece or piece.endswith("�"):
            return ""
        self._begin, self._shown = self._shown, len(self._ids)
        return piece

    def end(self) -> str:
        """What is left, be it half a character."""
        return self._rest()

    def pieces(self, tokens: Iterable[int]) -> Iterator[str]:
        """The text of the tokens, piece by piece."""
        for token in tokens:
            if piece := self.add(token):
                yield piece
        if piece := self.end():
            yield piece

    def _rest(self) -> str:
        shown = self._decode(self._ids[self._begin : self._shown])
        return self._decode(self._ids[self._begin :])[len(shown) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)
