"""Text to training batches: tokenised once into a file, cut into packed sequences, in an order that is a pure function.

What comes at position p depends on (tokens, seed, p) and on nothing else, so a run that stopped goes on exactly.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

PIECE_BYTES = 64 << 10  # text tokenised at once: what bounds memory, whatever the size of a file
TOKEN = np.dtype("<u4")
FORMAT = b"overspill tokens 1\n"  # part of every cache key: change it when tokenising changes


class DataError(ValueError):
    """Data that cannot be used: names the file, what is wrong, and the way out."""


@dataclasses.dataclass(frozen=True)
class Tokens:
    """A file of little-endian uint32 tokens, read by slices so that its size never counts in memory."""

    path: Path
    count: int
    digest: str  # of the texts and the tokenizer

    def read(self, first: int, count: int) -> np.ndarray:
        """`count` tokens from `first`, as int64. Raises DataError when the file is shorter than it was."""
        with self.path.open("rb") as file:
            raw = os.pread(file.fileno(), count * TOKEN.itemsize, first * TOKEN.itemsize)
        if len(raw) != count * TOKEN.itemsize:
            raise DataError(
                f"{self.path}: token cache is cut short at token {first}; delete it to make it again"
            )
        return np.frombuffer(raw, TOKEN).astype(np.int64)


def text_files(path: Path) -> list[Path]:
    """The files that `path` stands for: itself, or all below it but hidden ones, sorted. Raises DataError if none."""
    path = Path(path)
    if not path.exists():
        raise DataError(
            f"data {path} does not exist; give a folder or file of text, or JSONL with a key 'text'"
        )
    if path.is_file():
        return [path]
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
    with path.open("rb") as file:
        return b"\0" not in file.read(8192)


def _pieces(path: Path) -> Iterator[str]:
    """A file's text in pieces of about PIECE_BYTES that end with a line; bytes that are no UTF-8 are replaced."""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        while lines := file.readlines(PIECE_BYTES):
            yield "".join(lines)


def _documents(path: Path) -> Iterator[Iterator[str]]:
    """Documents of a file, each an iterator of pieces: the file itself, or the `text` of each line of JSONL."""
    if path.suffix != ".jsonl":
        yield _pieces(path)
        return
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError):
                text = None
            if not isinstance(text, str):
                raise DataError(
                    f"{path}:{number}: expected a JSON object with a string 'text', got {line[:60]!r}"
                )
            yield iter((text,))


def tokenizer_digest(tokenizer) -> str:
    """What identifies a tokenizer: its serialised rules and its end token."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.blake2b(f"{tokenizer.eos_token_id}\n{rules}".encode()).hexdigest()


def content_digest(files: list[Path], root: Path, tokenizer) -> str:
    """Hash of names and contents of `files` and of the tokenizer: the name under which the tokens are cached."""
    total = hashlib.blake2b(FORMAT, digest_size=16)
    total.update(tokenizer_digest(tokenizer).encode())
    for path in files:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, hashlib.blake2b).hexdigest()
        total.update(f"{path.relative_to(root)}\n{content}\n".encode())
    return total.hexdigest()


def tokenize(path: Path, tokenizer, cache: Path) -> Tokens:
    """Tokens of all text under `path`, from `cache` when these very texts were tokenised before.

    Each document is followed by the end token. Files with NUL bytes are taken for binary and left out. The cache
    file appears under its name only when it is whole. Raises DataError, OSError (a full disk).
    """
    path = Path(path)
    files = [file for file in text_files(path) if _is_text(file)]
    digest = content_digest(files, path if path.is_dir() else path.parent, tokenizer)
    target = Path(cache) / f"{digest}.u32"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(f".part{os.getpid()}")
        try:
            with part.open("wb") as out:
                for file in files:
                    for document in _documents(file):
                        _write_document(document, tokenizer, out)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    size = target.stat().st_size
    if size == 0:
        target.unlink()
        raise DataError(
            f"data {path} has no text in it ({len(files)} text files); give a folder or file of text"
        )
    return Tokens(target, size // TOKEN.itemsize, digest)


def _write_document(pieces: Iterator[str], tokenizer, out) -> None:
    empty = True
    for piece in pieces:
        ids = tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        out.write(np.asarray(ids, dtype=TOKEN).tobytes())
        empty = empty and not ids
    if not empty and tokenizer.eos_token_id is not None:
        out.write(np.asarray([tokenizer.eos_token_id], dtype=TOKEN).tobytes())


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
        """The batch that starts at `position`: int64, [batch, length]."""
        rows = [self.sequences[self.index(position + i)] for i in range(self.batch)]
        return torch.from_numpy(np.stack(rows))


def evaluation_batches(sequences: Sequences, batch: int, limit: int) -> Iterator[torch.Tensor]:
    """At most `limit` batches spread evenly over held-out sequences, always the same ones; the last may be smaller."""
    count = min(len(sequences), batch * limit)
    chosen = np.linspace(0, len(sequences) - 1, count).round().astype(np.int64)
    for start in range(0, count, batch):
        yield torch.from_numpy(np.stack([sequences[int(i)] for i in chosen[start : start + batch]]))
