"""Answers that fit a JSON schema: tokens that cannot go on in one are excluded before each is drawn (llguidance)."""

from __future__ import annotations

import ctypes
import json
import math
from typing import TYPE_CHECKING, Any

import numpy

from ..extras import need

if TYPE_CHECKING:
    from ..inference import Model


class Schemas:
    """Of one model. Threads: one at a time. The vocabulary is prepared at the first use, which takes about a second."""

    def __init__(self, model: Model):
        """Nothing is read of the model until the first use."""
        self._model = model
        self._tokenizer: Any = None

    def constraint(self, schema: dict[str, Any]) -> Schema:
        """For one answer. Raises ValueError for what is no schema, or is not known to llguidance; MissingExtra."""
        matcher = need("llguidance").LLMatcher
        if self._tokenizer is None:
            from llguidance.hf import from_tokenizer

            model = self._model
            self._tokenizer = from_tokenizer(model.tokenizer, model.vocabulary, sorted(model.end_tokens))
        grammar = matcher.grammar_from_json_schema(
            json.dumps(schema), defaults={"whitespace_flexible": False}
        )
        if error := matcher.validate_grammar(grammar, self._tokenizer):
            raise ValueError(error.strip().splitlines()[0])
        return Schema(matcher(self._tokenizer, grammar, log_level=0), self._model.vocabulary)


class Schema:
    """A constraint of inference.Batch.submit, for one answer. What is drawn is told by the next call."""

    def __init__(self, matcher: Any, vocabulary: int):
        """By Schemas.constraint."""
        self._matcher = matcher
        self._allowed = numpy.zeros(math.ceil(vocabulary / 32), dtype=numpy.uint32)  # a bit a token
        self._begun = False

    def __call__(self, length: int, last: int, address: int, count: int) -> None:
        if self._begun and not self._matcher.consume_token(last):
            raise ValueError(f"the schema has no place for token {last}: {self._matcher.get_error()}")
        self._begun = True
        self._matcher.unsafe_compute_mask_ptr(self._allowed.ctypes.data, self._allowed.nbytes)
        if self._matcher.is_error():
            raise ValueError(f"the schema cannot be gone on with: {self._matcher.get_error()}")
        allowed = numpy.unpackbits(self._allowed.view(numpy.uint8), bitorder="little")[:count]
        logits = numpy.ctypeslib.as_array((ctypes.c_float * count).from_address(address))
        logits[allowed == 0] = -numpy.inf
