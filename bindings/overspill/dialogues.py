"""Conversations as training data: a text by the tokenizer's chat template, of which the answers alone are learned.

A token that is read and not learned is written as its complement, ~token: one stream of integers says both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from ._core import OverspillError

NOT_LEARNED = -100  # the label that torch's cross entropy leaves out


class Unusable(OverspillError, ValueError):
    """A record that cannot be learned from: what is wrong with it, in words."""


@dataclasses.dataclass(frozen=True)
class Document:
    """A text, and which of its characters are learned: pairs of the first and the one after the last."""

    text: str
    learned: tuple[tuple[int, int], ...]


def form_of(record: object) -> str:
    """The key that says what a record is: "text", "messages" or "prompt" (with "completion")."""
    keys = record.keys() if isinstance(record, dict) else ()
    return next((key for key in ("text", "messages", "prompt") if key in keys), "text")


def tokens_of(record: Any, form: str, tokenizer: Any) -> Iterator[np.ndarray]:
    """The tokens of each document that a record of this form makes, int64; ~token for one that is not learned. Raises
    Unusable.
    """
    documents = _conversation(record, tokenizer) if form == "messages" else [_completion(record)]
    for document in documents:
        yield _tokens(document, tokenizer)


def tokens(words: Any) -> Any:
    """The tokens of an array or a tensor, those that are not learned too."""
    return words ^ (words >> 63)  # ~ where it is negative; int64


def labels(words: Any) -> Any:
    """The labels of a tensor of int64: the tokens that are learned, NOT_LEARNED in place of the others."""
    return words.masked_fill(words < 0, NOT_LEARNED)


def _completion(record: Any) -> Document:
    prompt, completion = record.get("prompt"), record.get("completion")
    for name, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, str):
            raise Unusable(f"'{name}' has to be a text; conversations have 'messages'")
    if not completion:
        raise Unusable("'completion' is empty, so there is nothing to learn")
    return Document(prompt + completion, ((len(prompt), len(prompt) + len(completion)),))


def _conversation(record: Any, tokenizer: Any) -> list[Document]:
    """One document; or one for each answer, where the template writes an earlier turn otherwise once more follows (some
    leave its thoughts out)."""
    messages = record["messages"]
    if not isinstance(messages, list) or not all(
        isinstance(each, dict) and isinstance(each.get("role"), str) for each in messages
    ):
        raise Unusable("'messages' has to be a list of objects with 'role' and 'content'")
    for message in messages:
        if message.get("weight", 1) not in (0, 1):  # as OpenAI's records for fine-tuning have it
            raise Unusable(f"'weight' of a message is {message['weight']!r}, and it may be 0 or 1")
    answers = [
        i for i, message in enumerate(messages) if message["role"] == "assistant" and message.get("weight", 1)
    ]
    if not answers:
        raise Unusable(
            "no message has the role 'assistant' (and not the weight 0), so there is nothing to learn"
        )

    def text(count: int, answer_follows: bool) -> str:
        made = tokenizer.apply_chat_template(
            messages[:count],
            tools=record.get("tools"),
            tokenize=False,
            add_generation_prompt=answer_follows,
        )
        assert isinstance(made, str)
        return made

    try:
        turns = [(text(at, True), text(at + 1, False)) for at in answers]
        whole = text(len(messages), False)
    except Exception as error:  # of jinja2, or whatever a template's expression raises
        raise Unusable(
            f"the chat template refuses the conversation: {' '.join(str(error).split())[:200]}"
        ) from None
    for before, after in turns:
        if not after.startswith(before):
            raise Unusable(
                "the chat template does not begin an answer as it asks for one (add_generation_prompt), so where the "
                "answer begins cannot be told"
            )
    if all(whole.startswith(after) for _, after in turns):
        return [Document(whole, tuple((len(before), len(after)) for before, after in turns))]
    return [Document(after, ((len(before), len(after)),)) for before, after in turns]


def _tokens(document: Document, tokenizer: Any) -> np.ndarray:
    """With an end token, which is learned where the text ends with an answer, unless the template wrote one."""
    document.text.encode()  # half of a surrogate pair is an error here, with a name
    made = tokenizer(document.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = np.asarray(made["input_ids"], np.int64)
    begins, ends = np.asarray(made["offset_mapping"], np.int64).reshape(-1, 2).T
    learned = np.zeros(len(ids), bool)
    for (
        first,
        after,
    ) in document.learned:  # a token may begin with the question's last character, a space for one
        learned |= (ends > first) & (begins < after)
    words = np.where(learned, ids, ~ids)
    end = tokenizer.eos_token_id
    if end is None or end in ids[-2:]:
        return words
    ends_with_answer = document.learned[-1][1] == len(document.text)
    return np.append(words, end if ends_with_answer else ~end)
