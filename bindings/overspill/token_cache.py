"""The file in which the tokens of a text are kept: little-endian uint32, and at the end what tells a whole file from a
damaged one, since whatever has the name is trained on.

A CRC-32 of the tokens is compared each time a file is opened: that reads the file once, and takes about a quarter of a
second of a core for each GB (zlib, 4 GB/s), a fourth of what the digest of the texts takes, which is made then too. It
finds damage, not intent: who may write to the folder may change it.
"""

from __future__ import annotations

import contextlib
import fcntl
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from . import durable

TOKEN = np.dtype("<u4")
SUFFIX = "-sealed.u32"
EARLIER = ("-utf8.u32", ".u32")  # suffixes of files without an end that could be compared
_MAGIC = b"tokens 1"
_END = struct.Struct("<8sQI4x")  # magic, tokens, their CRC-32
_PIECE_BYTES = 1 << 20


class Writer:
    """Takes tokens, and counts them."""

    def __init__(self, file: BinaryIO):
        self._file, self.count, self._crc = file, 0, 0

    def write(self, tokens: np.ndarray) -> None:
        raw = tokens.astype(TOKEN, copy=False).tobytes()
        self._file.write(raw)
        self.count += len(tokens)
        self._crc = zlib.crc32(raw, self._crc)

    def seal(self) -> None:
        self._file.write(_END.pack(_MAGIC, self.count, self._crc))


@contextlib.contextmanager
def new(path: Path) -> Iterator[Writer]:
    """Writes the file `path`, which appears, whole and durable, when the block ends without an exception. Until then it
    is locked: what a kill leaves is not, so the next start can tell (cli/leftovers.py). Raises OSError."""
    durable.make_folders(path.parent)
    with durable.new_file(path) as file:
        with contextlib.suppress(OSError):  # of a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        writer = Writer(file)
        yield writer
        writer.seal()


def count(path: Path) -> int | None:
    """The tokens in the file; None where it is absent or damaged. Raises OSError where it cannot be read."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    with file:
        left = path.stat().st_size - _END.size
        crc = 0
        while left > 0 and (raw := file.read(min(left, _PIECE_BYTES))):
            crc = zlib.crc32(raw, crc)
            left -= len(raw)
        end = file.read()
        found = file.tell() - _END.size
    whole = len(end) == _END.size and end == _END.pack(_MAGIC, found // TOKEN.itemsize, crc)
    return found // TOKEN.itemsize if whole and found % TOKEN.itemsize == 0 else None
