"""Checkpoints of torch.distributed.checkpoint (DCP), as scripts with FSDP2 save them: `.metadata` says in which file
and where the pieces of each tensor are; each piece there is an archive of torch.save.

What a script calls its dicts is its own choice: `{"model": ..., "optimizer": ...}`, or the model's names alone. The
optimizer's states are found by their names, PREFIXstate.PARAMETER.exp_avg, and the weights by the parameters' names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from .._core import CheckpointError
from . import torch_file
from .found import WEIGHT, Checkpoint, Parameter, damaged, shape_of, step_of
from .torch_file import Inert, Tensor

NAME = ".metadata"
_MODULE = "torch.distributed.checkpoint."
_TENSOR = _MODULE + "metadata.TensorStorageMetadata"
_BYTES = _MODULE + "metadata.BytesStorageMetadata"
_INERT = frozenset(
    {
        _TENSOR,
        _BYTES,
        *(
            f"{_MODULE}metadata.{name}"
            for name in (
                "Metadata",
                "ChunkStorageMetadata",
                "TensorProperties",
                "MetadataIndex",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        _MODULE + "filesystem._StorageInfo",
        "torch.serialization._get_layout",
        "pathlib.PosixPath",
        "pathlib.PurePosixPath",
        "pathlib._local.PosixPath",
    }
)
_STATE = re.compile(r"(.*?)state\.(.+)\.([A-Za-z_]+)")
_HYPER = re.compile(r"param_groups\.(.+)\.([A-Za-z_]+)")
_FILE = re.compile(r"[A-Za-z0-9_.\-]+")

Place = tuple[str, int, int]  # file, first byte, bytes


def is_one(folder: Path) -> bool:
    return (folder / NAME).is_file()


def open_one(folder: Path) -> Checkpoint:
    """Raises CheckpointError, OSError."""
    return _Opening(folder).open()


class _Entry:
    """A tensor, or (`pieces` is None) another object."""

    def __init__(
        self, shape: tuple[int, ...], pieces: list[tuple[tuple[int, ...], Place]] | None, place: Place | None
    ):
        self.shape, self.pieces, self.place = shape, pieces, place


class _Opening:
    def __init__(self, folder: Path):
        self.folder = folder
        self.path = folder / NAME
        self.entries = self.read()

    def wrong(self, why: str) -> CheckpointError:
        return damaged(self.path, why, "torch.distributed.checkpoint")

    # ---- the metadata

    def read(self) -> dict[str, _Entry]:
        whole = self.fields(torch_file.read_pickle(self.path, _INERT), "state_dict_metadata", "storage_data")
        if not isinstance(whole[0], Mapping) or not isinstance(whole[1], Mapping):
            raise self.wrong("it names no tensors")
        places: dict[str, dict[tuple[int, ...], Place]] = {}
        for index, info in whole[1].items():
            (name,) = self.fields(index, "fqn")
            offset = self.given(index).get("offset")  # none: of another object
            file, begin, count = self.fields(info, "relative_path", "offset", "length")
            if not isinstance(file, str) or not _FILE.fullmatch(file) or file in (".", ".."):
                raise self.wrong(f"it names a file {file!r:.60}, which is not in its folder")
            if not all(type(n) is int and n >= 0 for n in (begin, count)):
                raise self.wrong(f"a place in {file} is {begin!r:.40}, {count!r:.40}")
            places.setdefault(str(name), {})[self.numbers(offset or ())] = (file, begin, count)
        return {
            str(name): self.entry(str(name), value, places.get(str(name), {}))
            for name, value in whole[0].items()
        }

    def given(self, value: Any) -> Mapping[str, Any]:
        """What an object of torch's was made of."""
        given = getattr(value, "given", None)
        given = given[1] if isinstance(given, tuple) and len(given) == 2 else given
        if not isinstance(value, Inert) or not isinstance(given, Mapping):
            raise self.wrong(f"it has a {type(value).__name__} where an object of torch's is expected")
        return given

    def fields(self, value: Any, *names: str) -> tuple[Any, ...]:
        given = self.given(value)
        if not all(name in given for name in names):
            raise self.wrong(f"it lacks {' or '.join(names)}")
        return tuple(given[name] for name in names)

    def numbers(self, value: Any) -> tuple[int, ...]:
        try:
            return shape_of(value)
        except ValueError as error:
            raise self.wrong(str(error)) from None

    def entry(self, name: str, value: Any, places: dict[tuple[int, ...], Place]) -> _Entry:
        if getattr(value, "name", "") != _TENSOR:
            return _Entry((), None, next(iter(places.values()), None))
        size, chunks = self.fields(value, "size", "chunks")
        shape = self.numbers(size)
        if not isinstance(chunks, list):
            raise self.wrong(f"{name} has no pieces")
        pieces, elements = [], 0
        for chunk in chunks:
            offset, sizes = map(self.numbers, self.fields(chunk, "offsets", "sizes"))
            elements += math.prod(sizes)
            fits = len(offset) == len(sizes) == len(shape)
            if not fits or any(o + s > n for o, s, n in zip(offset, sizes, shape, strict=True)):
                raise self.wrong(f"a piece of {name} lies beyond its shape {shape}")
            if math.prod(sizes) == 0 and shape:
                continue
            if offset not in places:
                raise self.wrong(f"it does not say where the piece {offset} of {name} is")
            pieces.append((offset, places[offset]))
        if elements != math.prod(shape):
            raise self.wrong(f"the pieces of {name} are not all of its shape {shape}")
        return _Entry(shape, pieces, None)

    # ---- the content

    def value(self, place: Place | None) -> Any:
        if place is None:
            raise self.wrong("an entry is nowhere")
        return torch_file.read(self.folder / place[0], part=place[1:])

    def tensor(self, name: str) -> torch.Tensor:
        """All of it, in its shape."""
        entry = self.entries[name]
        whole: torch.Tensor | None = None
        for offset, place in entry.pieces or ():
            piece = self.value(place)
            if not isinstance(piece, Tensor) or len(piece.shape) != len(offset):
                raise self.wrong(f"a piece of {name} is no tensor of its shape")
            if any(o + s > n for o, s, n in zip(offset, piece.shape, entry.shape, strict=True)):
                raise self.wrong(f"a piece of {name} lies beyond its shape {entry.shape}")
            whole = torch.empty(entry.shape, dtype=piece.dtype) if whole is None else whole
            place_of = tuple(slice(o, o + s) for o, s in zip(offset, piece.shape, strict=True))
            whole[place_of] = piece.read()
        return torch.empty(entry.shape) if whole is None else whole

    def plain(self, name: str) -> Any:
        """A number, a text, a list of such, or a tensor's values."""
        entry = self.entries[name]
        return self.value(entry.place) if entry.pieces is None else self.tensor(name)

    def open(self) -> Checkpoint:
        states: dict[str, dict[str, str]] = {}  # parameter -> state -> entry
        before = set()
        for name in self.entries:
            if (match := _STATE.fullmatch(name)) and (not match[1] or match[1].endswith(".")):
                before.add(match[1])
                states.setdefault(match[2], {})[match[3]] = name
        if len(before) != 1:
            found = ", ".join(sorted(before)) or "none"
            raise CheckpointError(
                f"overspill: {self.folder} has states of {len(before)} optimizers ({found}): one is expected, saved as "
                "get_state_dict of torch.distributed.checkpoint.state_dict gives it"
            )
        (optimizer,) = before
        model = self.prefix(states, optimizer)
        hyper = self.hyper(optimizer)
        trained = {
            name: self.parameter(name, model + name, found, hyper.get(name, {}))
            for name, found in states.items()
        }
        rest, others = {}, {}
        for name, entry in self.entries.items():
            if name.startswith((optimizer + "state.", optimizer + "param_groups.")):
                continue
            inside = (
                name.startswith(model)
                and entry.pieces is not None
                and (model or "." in name or name in trained)
            )
            if inside and name.removeprefix(model) not in trained:
                rest[name.removeprefix(model)] = (entry.shape, self.reader(name))
            elif not inside:
                others[name] = self.plain(name)
        scheduler = self.scheduler(others)
        return Checkpoint(
            folder=self.folder,
            trained=trained,
            rest=rest,
            aliases={},
            global_steps=max((parameter.step for parameter in trained.values()), default=0),
            lr_scheduler=scheduler,
            client_state=others,
        )

    def prefix(self, states: Mapping[str, Any], optimizer: str) -> str:
        """What stands before the parameters' names in those of the weights."""
        first = next(iter(states))
        found = [
            name.removesuffix(first)
            for name, entry in self.entries.items()
            if entry.pieces is not None and name.endswith(first) and not name.startswith(optimizer + "state.")
        ]
        for before in sorted(found, key=len):
            if (not before or before.endswith(".")) and all(before + name in self.entries for name in states):
                return before
        raise CheckpointError(f"overspill: {self.folder} has states of {first}, and no weight of that name")

    def reader(self, name: str) -> Callable[[], torch.Tensor]:
        return lambda: self.tensor(name)

    def parameter(self, name: str, weight: str, states: dict[str, str], hyper: dict[str, Any]) -> Parameter:
        entry = self.entries[weight]
        if entry.pieces is None:
            raise self.wrong(f"{weight} is no tensor")
        try:
            step = step_of(self.plain(states["step"]) if "step" in states else 0, name)
        except ValueError as error:
            raise self.wrong(str(error)) from None
        entries = {WEIGHT: weight} | {state: found for state, found in states.items() if state != "step"}
        for state, found in entries.items():
            if self.entries[found].shape != entry.shape or self.entries[found].pieces is None:
                raise self.wrong(f"{state} of {name} has not its shape")
        names = tuple(state for state in entries if state != WEIGHT)
        return Parameter(name, entry.shape, names, step, lambda which: self.tensor(entries[which]), hyper)

    def hyper(self, optimizer: str) -> dict[str, dict[str, Any]]:
        """By parameter: its own, or, where groups have numbers, those of the group that lists it."""
        groups: dict[str, dict[str, Any]] = {}
        for name in self.entries:
            if name.startswith(optimizer) and (match := _HYPER.fullmatch(name.removeprefix(optimizer))):
                groups.setdefault(match[1], {})[match[2]] = self.plain(name)
        listed = {str(name): group for group in groups.values() for name in group.get("params") or ()}
        return listed | groups

    def scheduler(self, others: dict[str, Any]) -> dict[str, Any] | None:
        """Taken out of what is the script's: the dict that counts epochs as torch's schedulers do."""
        for name in list(others):
            before, _, last = name.rpartition(".")
            if last == "last_epoch" and before:
                keys = [each for each in others if each.startswith(before + ".")]
                return {each.removeprefix(before + "."): others.pop(each) for each in keys}
        return None
