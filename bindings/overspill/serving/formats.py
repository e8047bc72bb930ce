"""Answers in OpenAI's form, whole and in pieces."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

from .answering import Piece, TokenText

LEAST = -9999.0  # what OpenAI writes for a probability of nothing: JSON has no infinity


class Form:
    """The JSON of one answer. `kind`: "chat" or "text"."""

    def __init__(self, kind: str, model: str, tokenizer: Any, with_log_probabilities: bool, usage: bool):
        self._chat = kind == "chat"
        self._tokenizer, self._logs, self._usage = tokenizer, with_log_probabilities, usage
        self._offset = 0  # characters before the next token, of completions' text_offset
        self._head = {
            "id": ("chatcmpl-" if self._chat else "cmpl-") + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, pieces: list[Piece], reason: str, prompt_tokens: int, tokens: int) -> dict[str, Any]:
        """All of it at once."""
        text = "".join(piece.text for piece in pieces)
        logs = self._log([token for piece in pieces for token in piece.tokens])
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": logs}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": [choice], "usage": _usage(prompt_tokens, tokens)}

    def first(self) -> dict[str, Any] | None:
        """Before the first piece: who speaks."""
        return self._chunk(delta={"role": "assistant", "content": ""}) if self._chat else None

    def piece(self, piece: Piece) -> dict[str, Any]:
        """What became known."""
        body: dict[str, Any] = {"delta": {"content": piece.text}} if self._chat else {"text": piece.text}
        return self._chunk(logprobs=self._log(piece.tokens), **body)

    def last(self, reason: str, prompt_tokens: int, tokens: int) -> list[dict[str, Any]]:
        """How it ended, and, where that was asked for, what it took."""
        body: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        chunks = [self._chunk(finish_reason=reason, **body)]
        if self._usage:
            chunks.append({**chunks[0], "choices": [], "usage": _usage(prompt_tokens, tokens)})
        return chunks

    def _chunk(self, **choice: Any) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        usage = {"usage": None} if self._usage else {}
        return {
            **self._head,
            "object": kind,
            "choices": [{"index": 0, "logprobs": None, "finish_reason": None, **choice}],
            **usage,
        }

    def _log(self, tokens: list[TokenText]) -> dict[str, Any] | None:
        if not self._logs:
            return None
        if self._chat:
            return {"content": [self._token(token) for token in tokens], "refusal": None}
        texts = [self._text(token.token) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(token.log_probability) for token in tokens],
            "top_logprobs": [self._by_text(token.likeliest) for token in tokens],
            "text_offset": offsets,
        }

    def _by_text(self, likeliest: list[tuple[int, float]]) -> dict[str, float]:
        """Of tokens with one text, such as parts of characters, the likeliest counts."""
        return {self._text(token): _finite(probability) for token, probability in reversed(likeliest)}

    def _token(self, token: TokenText) -> dict[str, Any]:
        top = [self._entry(*each) for each in token.likeliest]
        return {**self._entry(token.token, token.log_probability), "top_logprobs": top}

    def _entry(self, token: int, probability: float) -> dict[str, Any]:
        text = self._text(token)
        # A token may be a part of a character, whose bytes its text does not tell.
        known = None if "�" in text else list(text.encode())
        return {"token": text, "logprob": _finite(probability), "bytes": known}

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([token])


def _usage(prompt_tokens: int, tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
    }


def _finite(probability: float) -> float:
    return max(LEAST, probability)


def event(data: dict[str, Any] | str) -> bytes:
    """A server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()
