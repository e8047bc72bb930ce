"""A file of safetensors in a checkpoint: the manifest has the form of every tensor and checksums of all bytes, so that
nothing of the file is taken on its own word. No torch here: `overspill verify` reads it too."""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from . import _core
from .durable import sync_file

# Bytes of an element, by safetensors' names.
ELEMENT = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("I16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "F32"), 4),
    **dict.fromkeys(("I64", "F64", "C64"), 8),
}
_PIECE = 4 << 20  # bytes, each with a checksum
_FIELDS = {"name", "dtype", "shape", "strides", "device", "checksums"}


@dataclass(frozen=True)
class Entry:
    """A tensor of the file. `strides`: in elements, of the tensor in memory, which is dense. `device`: "cpu", or the
    kind of accelerator that it lies on. `checksums`: XXH3-64 of each 4 MiB."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: str = "cpu"
    checksums: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ELEMENT[self.dtype]

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "strides": list(self.strides),
            "device": self.device,
            "checksums": list(self.checksums),
        }

    @classmethod
    def from_json(cls, value: Any) -> Entry:
        """What to_json gave. Raises ValueError for anything else."""
        if not isinstance(value, dict) or value.keys() != _FIELDS:
            raise ValueError(f"a tensor of the file has {', '.join(sorted(_FIELDS))}")
        name, dtype, device = value["name"], value["dtype"], value["device"]
        if not isinstance(name, str) or not isinstance(device, str) or not device.isalnum():
            raise ValueError(f"{name!r:.40} on {device!r:.40} is no tensor's name and device")
        name.encode()  # JSON can spell what no file can: half of a surrogate pair
        if not isinstance(dtype, str) or dtype not in ELEMENT:
            raise ValueError(f"{name}: {dtype!r:.40} is no dtype of safetensors")
        for key in ("shape", "strides"):
            if not isinstance(value[key], list) or not all(
                type(n) is int and 0 <= n < 2**62 for n in value[key]
            ):
                raise ValueError(f"{name}: {key} {value[key]!r:.40} are no sizes")
        shape, strides = tuple(value["shape"]), tuple(value["strides"])
        if not is_dense(shape, strides):
            raise ValueError(f"{name}: strides {strides} do not fill the memory of the shape {shape}")
        sums = value["checksums"]
        entry = cls(name, dtype, shape, strides, device)
        if not isinstance(sums, list) or not all(isinstance(each, str) for each in sums):
            raise ValueError(f"{name}: checksums are a list of texts")
        if len(sums) != -(-entry.bytes // _PIECE):
            raise ValueError(f"{name}: {len(sums)} checksums are not those of {entry.bytes} bytes")
        return cls(name, dtype, shape, strides, device, tuple(sums))


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements with these strides fill their memory, each once, in any order of the dimensions."""
    if len(shape) != len(strides):
        return False
    expected = 1
    wide = (dim for dim in range(len(shape)) if shape[dim] != 1)
    for dim in sorted(wide, key=lambda dim: strides[dim]):
        if strides[dim] != expected and 0 not in shape:
            return False
        expected *= shape[dim]
    return True


def header(tensors: Iterable[tuple[str, str, Sequence[int], int]]) -> bytes:
    """The beginning of a file of safetensors (https://github.com/huggingface/safetensors, "Format") with these tensors
    in this order: name, dtype, shape, bytes."""
    found: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, dtype, shape, size in tensors:
        found[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + size]}
        begin += size
    text = json.dumps(found).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _order(entries: Sequence[Entry]) -> list[int]:
    """Numbers of the entries as they lie in the file: wide elements first, so that all are aligned."""
    return sorted(range(len(entries)), key=lambda number: -ELEMENT[entries[number].dtype])


def _header(entries: Sequence[Entry]) -> bytes:
    """Shapes as the bytes lie: what has other strides than row-major has its dimensions in that order."""
    return header(
        (e.name, e.dtype, _shape_in_memory(e), e.bytes) for e in (entries[n] for n in _order(entries))
    )


def _shape_in_memory(entry: Entry) -> list[int]:
    dims = sorted(range(len(entry.shape)), key=lambda dim: -entry.strides[dim])
    return [entry.shape[dim] for dim in dims]


def write(path: Path, entries: Sequence[Entry], value: Callable[[int], memoryview]) -> list[Entry]:
    """A new file. Its data is durable; the caller syncs the folder for its name. `value` gives the bytes of an entry by
    its number, one at a time. Returns the entries with their checksums. Raises OSError."""
    summed = list(entries)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:  # as the checkpoint's other files
            file.write(_header(entries))
            for number in _order(entries):
                entry, data = entries[number], value(number)
                sums = []
                for piece in (data[at : at + _PIECE] for at in range(0, entry.bytes, _PIECE)):
                    sums.append(_checksum(piece))
                    file.write(piece)
                summed[number] = Entry(
                    entry.name, entry.dtype, entry.shape, entry.strides, entry.device, tuple(sums)
                )
            sync_file(file)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    return summed


def _checksum(piece: memoryview) -> str:
    """Of memory that can be written."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(piece))
    return f"{_core.digest(address, piece.nbytes):016x}"


class Reader:
    """The file with these entries, open while a block lasts. Raises CheckpointError, which names the file and the
    tensor, for anything that does not fit them; OSError where the disk fails."""

    def __init__(self, path: Path, entries: Sequence[Entry]):
        self.path, self.entries = path, entries
        self._head = _header(entries)
        self._begins = {}
        self.bytes = len(self._head)
        for number in _order(entries):
            self._begins[number] = self.bytes
            self.bytes += entries[number].bytes

    def __enter__(self) -> Reader:
        try:
            # O_NONBLOCK: a pipe of that name would wait for a writer.
            number = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP):
                raise
            self._refuse(f"it cannot be opened: {error.strerror}")
        if not stat.S_ISREG(os.fstat(number).st_mode):
            os.close(number)
            self._refuse("it is no regular file")
        self._file = os.fdopen(number, "rb")
        try:
            self._check()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()

    def _check(self) -> None:
        there = os.fstat(self._file.fileno()).st_size
        if there != self.bytes:
            self._refuse(f"it has {there} bytes, and its manifest says {self.bytes}")
        if self._file.read(len(self._head)) != self._head:
            self._refuse("its header is not what its manifest says")

    def read(self, number: int, into: memoryview) -> None:
        """The bytes of an entry."""
        for _ in self._pieces(number, lambda at, size: into[at : at + size]):
            pass

    def verify(self) -> Iterator[int]:
        """Reads all, from the disk where the kernel lets go of what it keeps; gives bytes as they are read."""
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        room = memoryview(bytearray(_PIECE))
        for number in range(len(self.entries)):
            yield from self._pieces(number, lambda _, size: room[:size])

    def _pieces(self, number: int, room: Callable[[int, int], memoryview]) -> Iterator[int]:
        entry = self.entries[number]
        self._file.seek(self._begins[number])
        for at, expected in zip(range(0, entry.bytes, _PIECE), entry.checksums, strict=True):
            piece = room(at, min(_PIECE, entry.bytes - at))
            if self._file.readinto(piece) != len(piece) or _checksum(piece) != expected:
                self._refuse(f"{entry.name} does not fit its checksum at byte {at}")
            yield len(piece)

    def _refuse(self, why: str) -> NoReturn:
        raise _core.CheckpointError(f"overspill: {self.path}: {why}: it is damaged; use another checkpoint")


def verify(checkpoint: Path, progress: Callable[[int, int], None] | None = None) -> dict[str, int]:
    """Reads every byte of a checkpoint and compares it with its checksum. Returns step, parameters, files and bytes.
    `progress`: called with bytes done, and in all. Raises CheckpointError that names what does not fit."""
    counted: dict[str, int] = _core.verify(str(checkpoint), progress)
    own = entries_of(_core.manifest(str(checkpoint))["extra_json"], checkpoint)
    if own is not None:
        with Reader(checkpoint / _core.OWN_STATES_FILE, own) as reader:
            total, done = counted["bytes"] + reader.bytes, counted["bytes"]
            for size in reader.verify():
                done += size
                if progress is not None:
                    progress(done, total)
        counted |= {"files": counted["files"] + 1, "bytes": total}
    return counted


def entries_of(extra_json: str, checkpoint: Any) -> list[Entry] | None:
    """The tensors of optimizers that run their own code; None where the checkpoint has none of these. Raises
    CheckpointError."""
    try:
        extra = json.loads(extra_json, parse_constant=no_number)
        own = extra.get("own_states") if isinstance(extra, dict) else None
        return None if own is None else entries_from_json(own["tensors"])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _core.CheckpointError(
            f"overspill: {checkpoint}: own_states cannot be read ({type(error).__name__}: {error!s:.150}); it is "
            "damaged, or another program wrote it: use another checkpoint"
        ) from None


def entries_from_json(value: Any) -> list[Entry]:
    if not isinstance(value, list):
        raise ValueError("tensors are a list")
    found = [Entry.from_json(each) for each in value]
    if len({entry.name for entry in found}) < len(found):
        raise ValueError("two tensors have one name")
    return found


def no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")
