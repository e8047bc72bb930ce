"""Text to training batches: tokenised once into a file, cut into packed sequences, in an order that is a pure function.

What comes at position p depends on (tokens, seed, p) and on nothing else, so a run that stopped goes on exactly.
"""

import codecs
import dataclasses
import hashlib
import json
import os
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from . import dialogues, token_cache
from ._core import OverspillError
from .token_cache import TOKEN

PIECE_BYTES = 64 << 10  # text tokenised at once: what bounds memory, whatever the size of a file
FORMAT = b"overspill tokens 2\n"  # part of every cache key: change it when tokenising changes
RECORDS = (".jsonl", ".ndjson", ".json")  # suffixes, in lower case, of files of records; all others are text
ARRAY_BYTES = 64 << 20  # of a JSON array, which is read whole
BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}  # the longer ones first: UTF-16's is the beginning of UTF-32's


class DataError(OverspillError, ValueError):
    """Data that cannot be used: names the file, what is wrong, and the way out."""


@dataclasses.dataclass(frozen=True)
class Tokens:
    """A file of little-endian uint32 tokens, read by slices so that its size never counts in memory."""

    path: Path
    count: int
    digest: str  # of the texts and the tokenizer

    def read(self, first: int, count: int) -> np.ndarray:
        """`count` tokens from `first`, as int64; ~token is one that is not learned (dialogues.py). Raises DataError
        when the file is shorter than it was."""
        with self.path.open("rb") as file:
            raw = os.pread(file.fileno(), count * TOKEN.itemsize, first * TOKEN.itemsize)
        if len(raw) != count * TOKEN.itemsize or first + count > self.count:
            raise DataError(
                f"{self.path}: token cache is cut short at token {first}; delete it to make it again"
            )
        return np.frombuffer(raw, "<i4").astype(np.int64)


def text_files(path: Path) -> list[Path]:
    """The files that `path` stands for: itself, or all below it but hidden ones, sorted. Raises DataError if none."""
    path = Path(path)
    if not path.exists():
        raise DataError(
            f"data {path} does not exist; give a folder or file of text, or JSONL with a key 'text'"
        )
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"data {path} is neither a file nor a folder; give a folder or file of text")
    files = sorted(
        p
        for p in path.rglob("*")
        if p.is_file()
        and not any(part.startswith((".", "__pycache__")) for part in p.relative_to(path).parts)
    )
    if not files:
        raise DataError(f"data {path} is a folder without files; give a folder or file of text")
    return files


def _is_text(path: Path) -> bool:
    """Whether no NUL byte is near the beginning. Raises DataError for UTF-16 and UTF-32, which are full of them."""
    with path.open("rb") as file:
        head = file.read(8192)
    for mark, encoding in BYTE_ORDER_MARKS.items():
        if head.startswith(mark):
            raise DataError(f"{path} is {encoding}; text has to be UTF-8: {_convert(path, encoding)}")
    return b"\0" not in head


def _convert(path: Path, encoding: str) -> str:
    name = shlex.quote(str(path))
    return f"iconv -f {encoding} -t UTF-8 {name} > NEW"


def whole_text(path: Path) -> str:
    """A file's text. Raises DataError where it is no text in UTF-8, OSError."""
    if not _is_text(path):
        raise DataError(f"{path} has NUL bytes: it is no text")
    return "".join(_pieces(path))


def _pieces(path: Path) -> Iterator[str]:
    """A file's text in pieces of about PIECE_BYTES that end with a line. Raises DataError where it is no UTF-8."""
    with path.open(encoding="utf-8", newline="") as file:
        try:
            while lines := file.readlines(PIECE_BYTES):
                yield "".join(lines)
        except UnicodeDecodeError:
            raise _no_utf8(path) from None


def _no_utf8(path: Path) -> DataError:
    """Of a file that is no UTF-8: where it ceases to be."""
    decoder, at = codecs.getincrementaldecoder("utf-8")(), 0
    with path.open("rb") as file:
        while True:
            piece = file.read(PIECE_BYTES)
            held = len(decoder.getstate()[0])  # bytes of a character that began in the piece before
            try:
                decoder.decode(piece, final=not piece)
            except UnicodeDecodeError as error:
                at += error.start - held
                byte = error.object[error.start]
                break
            if not piece:
                return DataError(f"{path} changed while it was read; start again when it is complete")
            at += len(piece)
    return DataError(
        f"{path} is no UTF-8: byte {at} is 0x{byte:02x}; if it is text in another encoding, convert it (Latin-1: "
        f"{_convert(path, 'LATIN1')}), if it is no text, take it out of the data"
    )


def _documents(path: Path) -> Iterator[Iterator[str]]:
    """Documents of a file, each an iterator of pieces: the file itself, or the `text` of each of its records."""
    if not _has_records(path):
        yield _pieces(path)
    else:
        yield from (iter((_text(path, *found),)) for found in _records(path))


def _has_records(path: Path) -> bool:
    return path.suffix.lower() in RECORDS


def _is_array(path: Path) -> bool:
    """Whether a .json file is one JSON array. In a .jsonl file "[" begins a wrong line, so this is False."""
    if path.suffix.lower() != ".json":
        return False
    with path.open("rb") as file:
        return file.read(8192).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _form_of(path: Path) -> str:
    """What the records of a file are: that of the first, which the others have to share."""
    if not _has_records(path):
        return "text"
    return next((dialogues.form_of(record) for _, record, _ in _records(path)), "text")


def _dialogue_tokens(path: Path, form: str, tokenizer) -> Iterator[np.ndarray]:
    """Of each document of a file of conversations. Raises DataError."""
    if form == "messages" and not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"{path} has conversations ('messages'), and the model's folder has no chat template to make a text of "
            "them; add chat_template.jinja, or give records with 'text'"
        )
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(
            f"{path}: which tokens are an answer's cannot be told with a tokenizer in Python; add tokenizer.json to "
            "the model's folder"
        )
    for number, record, shown in _records(path):
        if (other := dialogues.form_of(record)) != form:
            raise DataError(
                f"{path}:{number}: expected a JSON object with '{form}', as the first record, got {shown[:60]!r}"
                f"{f' with {other!r}; a file has records of one form' if isinstance(record, dict) else ''}"
            )
        try:
            yield from dialogues.tokens_of(record, form, tokenizer)
        except dialogues.Unusable as error:
            raise DataError(f"{path}:{number}: {error}; mend the record or take it out") from None
        except UnicodeEncodeError:
            raise DataError(
                f"{path}:{number}: half of a surrogate pair is no text; mend what wrote it"
            ) from None


def _records(path: Path) -> Iterator[tuple[int, object, str]]:
    """The records of a file, counted from 1, and each as it stands there."""
    return _array(path) if _is_array(path) else _lines(path)


def _lines(path: Path) -> Iterator[tuple[int, object, str]]:
    """Of JSONL."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}:{number}: no UTF-8: byte {error.start} of the line is 0x{error.object[error.start]:02x}; "
                    f"convert the file (Latin-1: {_convert(path, 'LATIN1')})"
                ) from None
            if text.strip():
                yield number, _parsed(text), text


def _array(path: Path) -> Iterator[tuple[int, object, str]]:
    """Of a JSON array."""
    size = path.stat().st_size
    if size > ARRAY_BYTES:
        raise DataError(
            f"{path} is one JSON array of {size} bytes, and one of more than {ARRAY_BYTES} is not read; write one "
            f"record a line: jq -c '.[]' {shlex.quote(str(path))} > NEW.jsonl"
        )
    try:
        records = _parsed(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise _no_utf8(path) from None
    if not isinstance(records, list):
        raise DataError(
            f"{path} begins like a JSON array and is none; mend it, or name it .txt if it is text"
        )
    for number, record in enumerate(records, 1):
        yield number, record, json.dumps(record)


def _parsed(text: str) -> object:
    """None for what is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _text(path: Path, number: int, record: object, shown: str) -> str:
    """The text of a record. `shown`: as it stands in the file."""
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        hint = "; name the file .txt to train on it as it is" if path.suffix.lower() == ".json" else ""
        raise DataError(
            f"{path}:{number}: expected a JSON object with a string 'text' (or 'messages', or 'prompt' and "
            f"'completion', in all of the file), got {shown[:60]!r}{hint}"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{path}:{number}: 'text' has half of a surrogate pair (\\u{ord(text[error.start]):04x}) at character "
            f"{error.start}, which is no text; mend what wrote it"
        ) from None
    return text


def tokenizer_digest(tokenizer) -> str:
    """What identifies a tokenizer: its serialised rules and its end token."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.blake2b(f"{tokenizer.eos_token_id}\n{rules}".encode()).hexdigest()


def content_digest(files: dict[Path, str], root: Path, tokenizer) -> str:
    """Hash of names, contents and forms of `files`, and of the tokenizer: the name under which tokens are cached."""
    total = hashlib.blake2b(FORMAT, digest_size=16)
    total.update(tokenizer_digest(tokenizer).encode())
    for path, kind in files.items():
        with path.open("rb") as file:
            content = hashlib.file_digest(file, hashlib.blake2b).hexdigest()
        form = (
            "" if path.suffix == ".jsonl" or not _has_records(path) else "records\n"
        )  # they were text before
        if kind != "text":
            template = repr(tokenizer.chat_template) if kind == "messages" else ""
            form = f"{kind}\n{template}\n"
        total.update(f"{path.relative_to(root)}\n{content}\n{form}".encode(errors="surrogateescape"))
    return total.hexdigest()


def tokenize(path: Path, tokenizer, cache: Path) -> Tokens:
    """Tokens of all text under `path`, from `cache` when these very texts were tokenised before.

    Each document is followed by the end token. Of records with 'messages', or with 'prompt' and 'completion', the
    answers alone are learned. Files with NUL bytes are taken for binary and left out, with a warning.
    The cache file appears under its name only when it is whole, durable and of these very texts; one that is damaged is
    made again. Raises DataError for what is no text in UTF-8, or changes meanwhile, OSError (a full disk).
    """
    path = Path(path)
    found = text_files(path)
    files = {file: _form_of(file) for file in found if _is_text(file)}
    binary = sorted(set(found) - set(files))
    root = path if path.is_dir() else path.parent
    digest = content_digest(files, root, tokenizer)
    target = Path(cache) / f"{digest}{token_cache.SUFFIX}"
    count = token_cache.count(target)
    if count is None:
        _warn_of(target, digest)
        with token_cache.new(target) as out:
            for file, form in files.items():
                if form == "text":
                    for document in _documents(file):
                        _write_document(document, tokenizer, out)
                else:
                    for words in _dialogue_tokens(file, form, tokenizer):
                        out.write(words)
            # The texts were read a second time: a download that goes on would be trained on under a name not its own.
            if content_digest(files, root, tokenizer) != digest:
                raise DataError(f"data {path} changed while it was read; start again when it is complete")
            if out.count == 0:
                raise DataError(
                    f"data {path} has no text in it ({len(files)} text files, {len(binary)} with NUL bytes, which are "
                    "taken for binary); give a folder or file of text in UTF-8"
                )
        count = out.count
    if binary:
        warnings.warn(
            f"data {path}: {len(binary)} files with NUL bytes are taken for binary and left out: "
            f"{', '.join(str(file) for file in binary[:3])}{', …' if len(binary) > 3 else ''}",
            stacklevel=2,
        )
    return Tokens(target, count, digest)


def _warn_of(target: Path, digest: str) -> None:
    """Names what is in the way, or in vain, where a cache is about to be made."""
    if target.exists():
        warnings.warn(f"token cache {target} is damaged: it is made again from the texts", stacklevel=3)
    for old in (target.with_name(digest + suffix) for suffix in token_cache.EARLIER):
        if old.exists():
            warnings.warn(
                f"token cache {old} is of an earlier version, which did not keep what tells damage, and is not used: "
                "it is made again; delete it if that version is used no more",
                stacklevel=3,
            )


def _write_document(pieces: Iterator[str], tokenizer, out: token_cache.Writer) -> None:
    empty = True
    for piece in pieces:
        ids = tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        out.write(np.asarray(ids, dtype=TOKEN))
        empty = empty and not ids
    if not empty and tokenizer.eos_token_id is not None:
        out.write(np.asarray([tokenizer.eos_token_id], dtype=TOKEN))


class Sequences:
    """Packed sequences of `length` tokens, from token `first` on; the rest that fills no sequence is left out."""

    def __init__(self, tokens: Tokens, length: int, first: int = 0, count: int | None = None):
        self.tokens, self.length, self.first = tokens, length, first
        self.count = (tokens.count // length - first) if count is None else count
        if self.count < 1:
            raise DataError(
                f"{tokens.count} tokens are too few for one sequence of {length}; give more data or a smaller --seq-len"
            )

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return self.tokens.read((self.first + index) * self.length, self.length)


def split(tokens: Tokens, length: int, heldout: float = 0.05) -> tuple[Sequences, Sequences]:
    """Training and held-out sequences of one stream: the last `heldout` of it, at least one sequence, is held out.

    The tail is contiguous, so at most one document lies on both sides. Raises DataError with fewer than 2 sequences.
    """
    total = tokens.count // length
    if total < 2:
        raise DataError(
            f"{tokens.count} tokens make {total} sequence of {length}; at least 2 are needed to hold one out: "
            "give more data, a smaller --seq-len, or --heldout PATH"
        )
    tail = max(1, int(total * heldout))
    return Sequences(tokens, length, 0, total - tail), Sequences(tokens, length, total - tail, tail)


class Batches:
    """Batches by position, each epoch in its own permutation: a pure function of (sequences, seed, position).

    A position counts sequences since the start of training, over epochs.
    """

    def __init__(self, sequences: Sequences, batch: int, seed: int):
        self.sequences, self.batch, self.seed = sequences, batch, seed
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def index(self, position: int) -> int:
        """Which sequence comes at `position`."""
        epoch, offset = divmod(position, len(self.sequences))
        if epoch != self._epoch:
            rng = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            self._epoch, self._order = epoch, rng.permutation(len(self.sequences))
        return int(self._order[offset])

    def at(self, position: int) -> torch.Tensor:
        """The batch that starts at `position`: int64, [batch, length], as Tokens.read has them."""
        rows = [self.sequences[self.index(position + i)] for i in range(self.batch)]
        return torch.from_numpy(np.stack(rows))


def evaluation_batches(sequences: Sequences, batch: int, limit: int) -> Iterator[torch.Tensor]:
    """At most `limit` batches spread evenly over held-out sequences, always the same ones; the last may be smaller."""
    count = min(len(sequences), batch * limit)
    chosen = np.linspace(0, len(sequences) - 1, count).round().astype(np.int64)
    for start in range(0, count, batch):
        yield torch.from_numpy(np.stack([sequences[int(i)] for i in chosen[start : start + batch]]))
