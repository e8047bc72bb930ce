"""Whether a model can take what it is given: sequences no longer than its positions, tokens no larger than its
vocabulary. Else forward fails with torch's IndexError, which names neither."""

from collections.abc import Iterable, Sequence
from typing import Any

from overspill import dialogues
from overspill.cli.common import CliError

OFFSET = 8  # rows that some tables of positions have beside them: OPT's 2, for one
PIECE = 1 << 22  # tokens looked at together


def positions(model: Any) -> tuple[int | None, bool]:
    """How many positions config.json names, None where it names none; and whether the model looks them up in a table,
    so that it cannot compute any other."""
    config = model.config.get_text_config()
    count = getattr(config, "max_position_embeddings", None)
    if not isinstance(count, int) or count < 1:
        return None, False
    return count, any(count <= rows <= count + OFFSET for rows in _rows(model))


def _rows(model: Any) -> Iterable[int]:
    """Of all tables but that of the tokens."""
    from torch import nn

    tokens = model.get_input_embeddings()
    yield from (m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding) and m is not tokens)
    for _, buffer in model.named_buffers():  # sines, or a causal mask
        if buffer.dim() > 1:
            yield buffer.shape[0] if buffer.dim() == 2 else buffer.shape[-1]


def check_length(model: Any, seq_len: int, folder: str) -> str:
    """Raises CliError where sequences are longer than the model can take; a note where it was not made for them."""
    count, is_table = positions(model)
    if count is None or seq_len <= count:
        return ""
    said = f"--seq-len {seq_len} is more than the {count} positions of {folder} (config.json, max_position_embeddings)"
    if is_table:
        raise CliError(f"{said}, which has a table of them; give at most --seq-len {count}")
    return f"WARNING: {said}: the model was not trained on such sequences"


def check_tokens(model: Any, tokenizer: Any, found: Iterable[Any], folder: str) -> None:
    """Raises CliError where one of `found` (data.Tokens) has a token that the model has no row for. Tokens are looked
    at only where the tokenizer knows one: a padding token that no text has does no harm."""
    rows = model.get_input_embeddings().num_embeddings
    if max(tokenizer.get_vocab().values(), default=-1) < rows:
        return
    for tokens in found:
        largest = max(
            int(dialogues.tokens(tokens.read(at, min(PIECE, tokens.count - at))).max())
            for at in range(0, tokens.count, PIECE)
        )
        if largest >= rows:
            raise CliError(_no_row(tokenizer, largest, rows, folder))


def check_prompt(model: Any, tokenizer: Any, ids: Any, new_tokens: int, folder: str) -> None:
    """Raises CliError for a prompt that the model cannot take, alone or with what it is to write after it."""
    count, is_table = positions(model)
    rows = model.get_input_embeddings().num_embeddings
    check_ids(tokenizer, ids.flatten().tolist(), rows, count if is_table else None, new_tokens, folder)


def check_ids(
    tokenizer: Any, ids: Sequence[int], rows: int, count: int | None, new_tokens: int, folder: str
) -> None:
    """The same for a model with `rows` tokens and, where there is a table of positions, `count` of them."""
    if max(ids) >= rows:
        raise CliError(_no_row(tokenizer, max(ids), rows, folder))
    length = len(ids)
    if count is not None and length + new_tokens - 1 > count:
        ways = (
            f"give at most --max-new-tokens {count - length + 1}"
            if length <= count
            else "give a shorter --prompt"
        )
        raise CliError(
            f"--max-new-tokens {new_tokens} after a --prompt of {length} tokens is more than the {count} positions of "
            f"{folder} (config.json, max_position_embeddings); {ways}"
        )


def _no_row(tokenizer: Any, largest: int, rows: int, folder: str) -> str:
    token = tokenizer.convert_ids_to_tokens(largest)
    return (
        f"--model {folder}: the tokenizer makes token {largest} ({token!r}) of the text, and the model has {rows} "
        "(vocab_size of config.json): they are of two models; fetch both again, or resize the model's embeddings"
    )
