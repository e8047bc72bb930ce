"""Files that torch.save wrote, read without running anything in them.

Such a file is a zip archive: a pickle, and the bytes of each tensor beside it. A pickle is a program, which may call
any function that can be imported. Here it may call the few of FUNCTIONS, which build values, and nothing else: whatever
else it names is refused by that name before the pickle is run, or, where a caller says so, becomes an `Inert` object
that keeps what it was given and does nothing. Tensors are not read with it: a `Tensor` knows where its bytes are.
"""

from __future__ import annotations

import collections
import errno
import io
import math
import os
import pickle
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .._core import CheckpointError

_PICKLE_MOST = 1 << 28  # bytes
_LOCAL_HEADER = 30  # bytes of a zip entry's own header, before its name
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}
# Opcodes that put a value into the memo at a place of their own choice: a large one would take memory.
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT")


class Inert:
    """What a pickle names and nobody here knows: it keeps what it was given."""

    name = ""

    def __init__(self, *arguments: Any):
        self.arguments = arguments

    def __setstate__(self, given: Any) -> None:
        self.given = given


@dataclass(frozen=True)
class Tensor:
    """A contiguous tensor in such a file. `at`: of its first element in the file, in bytes."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    at: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def read(self, begin: int = 0, count: int | None = None) -> torch.Tensor:
        """All of it, in its shape; or `count` elements from `begin` on, as one dimension. Raises OSError,
        CheckpointError where the file has become shorter."""
        if count is None:
            return self.read(0, self.elements).view(self.shape)
        if begin < 0 or count < 0 or begin + count > self.elements:
            raise CheckpointError(
                f"overspill: {self.path}: elements {begin} to {begin + count} of a tensor of {self.elements} are wanted"
            )
        room = torch.empty(count, dtype=self.dtype)
        memory = memoryview(room.view(torch.uint8).numpy())
        with self.path.open("rb") as file:
            file.seek(self.at + begin * self.dtype.itemsize)
            if file.readinto(memory) != len(memory):  # type: ignore[attr-defined]
                raise CheckpointError(f"overspill: {self.path}: it has become shorter while it was read")
        return room


@dataclass(frozen=True)
class _Storage:
    at: int
    dtype: torch.dtype
    elements: int


def read(path: Path, inert: Collection[str] = (), part: tuple[int, int] | None = None) -> Any:
    """What torch.save wrote, with `Tensor`s in place of tensors. `inert`: full names of classes and functions that
    become Inert. `part`: the first byte and the number of bytes of an archive that is a part of the file. Raises
    CheckpointError for a file that torch.save did not write, and for one that names anything else; OSError."""
    try:
        size = os.stat(path).st_size
        begin, count = part or (0, size)
        if not (begin >= 0 and 0 <= count <= size - begin):
            raise CheckpointError(
                f"overspill: {path} has {size} bytes: {count} from byte {begin} on are not in it"
            )
        with path.open("rb") as file, zipfile.ZipFile(_Part(file, begin, count)) as archive:
            return _Reader(path, archive, begin, count).read(inert)
    except CheckpointError:
        raise
    except (zipfile.BadZipFile, zipfile.LargeZipFile) as error:
        raise CheckpointError(
            f"overspill: {path} is no file of torch.save in the form of today, a zip archive ({error}): it is damaged, "
            "or save it anew with a torch of version 1.6 or later"
        ) from None
    except OSError as error:
        if error.errno != errno.EINVAL:  # of a place that a damaged header names
            raise
        raise _damaged(path, error) from None
    except _OF_ZIPFILE as error:
        raise _damaged(path, error) from None


# What zipfile raises for headers that do not fit, besides BadZipFile.
_OF_ZIPFILE = (ValueError, LookupError, OverflowError, RuntimeError, EOFError, struct.error, zlib.error)


def _wrong(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"overspill: {path}: {why}: it is damaged, or torch did not write it")


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"overspill: {path} is damaged: its archive cannot be read ({error})")


def read_pickle(path: Path, inert: Collection[str]) -> Any:
    """The value of a file that is a pickle and nothing else. Raises as `read`."""
    size = os.stat(path).st_size
    if size > _PICKLE_MOST:
        raise CheckpointError(
            f"overspill: {path} has {size} bytes: a pickle of more than {_PICKLE_MOST} is not read"
        )
    code = _Code(path, path.read_bytes(), inert)

    def no_tensor(*_: Any) -> Any:
        raise code.wrong("it has a tensor in it")

    return code.run(no_tensor, no_tensor)


class _Part(io.RawIOBase):
    """A part of a file, as a file that can be read."""

    def __init__(self, file: Any, begin: int, count: int):
        self.file, self.begin, self.count, self.at = file, begin, count, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = 0) -> int:
        at = offset + {0: 0, 1: self.at, 2: self.count}[whence]
        if at < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self.at = at
        return at

    def readinto(self, room: Any) -> int:
        count = max(0, min(len(room), self.count - self.at))
        self.file.seek(self.begin + self.at)
        data = self.file.read(count)
        room[: len(data)] = data
        self.at += len(data)
        return len(data)


class _Code:
    """A pickle, which may name nothing but FUNCTIONS, storages and what is `inert`."""

    def __init__(self, path: Path, code: bytes, inert: Collection[str]):
        self.path, self.code, self.inert = path, code, inert

    def wrong(self, why: str) -> CheckpointError:
        return _wrong(self.path, why)

    def run(self, tensor: Callable[..., Any], storage: Callable[[Any], Any]) -> Any:
        """Its value. `tensor` makes one, of what `storage` gives for a reference."""
        self.check()
        try:
            return _Unpickler(self, tensor, storage).load()
        except CheckpointError:
            raise
        except Exception as error:  # of a pickle that does not fit itself
            raise self.unreadable(error) from None

    def check(self) -> None:
        """Refuses what it names before it is run."""
        try:
            for number, (operation, argument, _) in enumerate(pickletools.genops(self.code)):
                if operation.name in _PUTS and int(argument) > number:
                    raise self.wrong(f"its pickle keeps value {number} at place {argument}")
                if operation.name in ("GLOBAL", "INST"):
                    self.resolve(*argument.split(" ", 1))
        except CheckpointError:
            raise
        except Exception as error:
            raise self.unreadable(error) from None

    def unreadable(self, error: Exception) -> CheckpointError:
        return self.wrong(f"its pickle cannot be read ({type(error).__name__}: {error})")

    def resolve(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in FUNCTIONS:
            return FUNCTIONS[full]
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if full in self.inert:
            return type("Inert", (Inert,), {"name": full})
        if self.inert and full in ("builtins.getattr", "__builtin__.getattr"):
            return _member
        raise CheckpointError(
            f"overspill: {self.path} names {full}, which it would call or make. Nothing in a checkpoint is run: only "
            "tensors, numbers, texts, lists and dicts are read. Save it without that object"
        )


class _Unpickler(pickle.Unpickler):
    def __init__(self, code: _Code, tensor: Callable[..., Any], storage: Callable[[Any], Any]):
        super().__init__(io.BytesIO(code.code))
        self.code, self.tensor, self.storage = code, tensor, storage

    def find_class(self, module: str, name: str) -> Any:
        found = self.code.resolve(module, name)
        return self.tensor if found is _TENSOR else found

    def persistent_load(self, given: Any) -> Any:
        return self.storage(given)


class _Reader:
    def __init__(self, path: Path, archive: zipfile.ZipFile, begin: int, size: int):
        self.path, self.archive, self.begin, self.size = path, archive, begin, size
        found = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(found) != 1:
            raise self.wrong(f"it has {len(found)} entries data.pkl, where one is expected")
        self.folder = found[0].removesuffix("data.pkl")
        self.places: dict[str, tuple[int, int]] = {}

    def wrong(self, why: str) -> CheckpointError:
        return _wrong(self.path, why)

    def read(self, inert: Collection[str]) -> Any:
        order = self.folder + "byteorder"
        if order in self.archive.namelist() and self.archive.read(order) != b"little":
            raise CheckpointError(
                f"overspill: {self.path}: its numbers are big-endian, which nothing here reads"
            )
        info = self.archive.getinfo(self.folder + "data.pkl")
        if info.file_size > _PICKLE_MOST or info.file_size > self.size:
            raise self.wrong(f"its pickle would have {info.file_size} bytes")
        return _Code(self.path, self.archive.read(info), inert).run(self.tensor, self.reference)

    def reference(self, given: Any) -> _Storage:
        if not (isinstance(given, tuple) and len(given) == 5 and given[0] == "storage"):
            raise self.wrong(f"it refers to {given!r:.80}")
        _, dtype, key, _, elements = given
        if not (isinstance(dtype, torch.dtype) and isinstance(key, str) and type(elements) is int):
            raise self.wrong(f"it refers to {given!r:.80}")
        return self.storage(key, dtype, elements)

    def storage(self, key: str, dtype: torch.dtype, elements: int) -> _Storage:
        name = f"{self.folder}data/{key}"
        if name not in self.places:
            try:
                info = self.archive.getinfo(name)
            except KeyError:
                raise self.wrong(f"it has no entry {name}") from None
            if info.compress_type != zipfile.ZIP_STORED:
                raise self.wrong(f"its entry {name} is compressed")
            self.places[name] = self.place(info)
        at, size = self.places[name]
        if elements < 0 or elements * dtype.itemsize > size:
            raise self.wrong(
                f"its entry {name} has {size} bytes, {elements} elements of {dtype} are wanted of it"
            )
        return _Storage(at, dtype, elements)

    def place(self, info: zipfile.ZipInfo) -> tuple[int, int]:
        """Of an entry's bytes in the file, and how many they are."""
        with self.path.open("rb") as file:
            file.seek(self.begin + info.header_offset)
            header = file.read(_LOCAL_HEADER)
        if len(header) != _LOCAL_HEADER or header[:4] != b"PK\x03\x04":
            raise self.wrong(f"its entry {info.filename} begins nowhere")
        at = info.header_offset + _LOCAL_HEADER
        at += int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        if at + info.file_size > self.size:
            raise self.wrong(f"its entry {info.filename} ends behind the file")
        return self.begin + at, info.file_size

    def tensor(self, storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> Tensor:
        whole = all(type(n) is int and n >= 0 for n in (offset, *shape, *stride)) and len(shape) == len(
            stride
        )
        if not isinstance(storage, _Storage) or not whole:
            raise self.wrong(f"a tensor of shape {shape!r:.60} and strides {stride!r:.60}")
        last = sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if 0 not in shape else -1
        if offset + last >= storage.elements and 0 not in shape:
            raise self.wrong(f"a tensor of shape {tuple(shape)} lies beyond its bytes")
        if not _dense(shape, stride):
            raise CheckpointError(
                f"overspill: {self.path}: a tensor of shape {tuple(shape)} has strides {tuple(stride)}: only tensors "
                "that are contiguous are read: save it with .contiguous()"
            )
        at = storage.at + offset * storage.dtype.itemsize
        return Tensor(self.path, storage.dtype, tuple(shape), at)


def _dense(shape: Any, stride: Any) -> bool:
    step = 1
    for n, found in zip(reversed(shape), reversed(stride), strict=True):
        if n > 1 and found != step:
            return False
        step *= max(n, 1)
    return True


_TENSOR = object()


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _of_type(function: Callable[..., Any], _kind: Any, arguments: Any, _state: Any) -> Any:
    return function(*arguments)


def _member(kind: Any, name: Any) -> Inert:
    """In place of getattr, by which Python 3.11.0 to 3.11.3 pickle the members of an enum."""
    if isinstance(kind, type) and issubclass(kind, Inert) and isinstance(name, str):
        return kind(name)
    raise ValueError(f"it asks for {name!r:.40} of {kind!r:.80}, and nothing in a checkpoint is run")


FUNCTIONS: dict[str, Any] = {
    "torch._utils._rebuild_tensor_v2": _TENSOR,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch.Tensor": "torch.Tensor",  # the kind of a tensor, as text: nothing can be made of it
    "torch.nn.parameter.Parameter": "torch.nn.parameter.Parameter",
    "torch.Size": tuple,
    "collections.OrderedDict": collections.OrderedDict,
    "builtins.set": set,
    "__builtin__.set": set,
    **{f"torch.{dtype}".replace("torch.torch.", "torch."): dtype for dtype in set(_STORAGES.values())},
}
