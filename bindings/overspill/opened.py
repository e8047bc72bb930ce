"""A checkpoint of any number of ranks, that each parameter can be read from alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import _core, extra
from .units import DTYPES

_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
FLOATS = ("F16", "BF16", "F32")  # what a merge, and a load into another format, converts


@dataclass(frozen=True)
class Stored:
    """A parameter of a checkpoint, of a unit, or a buffer, which has a `value`. `states`: the components that hold its
    optimizer's states; `format`: how they are held."""

    shape: tuple[int, ...]
    dtype: str  # of safetensors
    aliases: tuple[str, ...] = ()
    value: torch.Tensor | None = None
    unit: str = ""
    optimizer: str = ""
    format: str = ""
    states: tuple[str, ...] = ()
    updates: int = 0
    group: int = 0


class Opened:
    """Raises CheckpointError for what is no checkpoint."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._reader = _core.CheckpointParameters(folder)
        self.manifest: dict[str, Any] = self._reader.manifest()
        self.step: int = self.manifest["step"]
        self.extra_json: str = self.manifest["extra_json"]
        self.tensors = _parameters(self.manifest)
        self.parameters = len(self.tensors)
        for name, value in extra.tensors(self.extra_json, folder).items():
            self.tensors[name] = Stored(tuple(value.shape), DTYPES.get(value.dtype, ""), value=value)

    def read(self, name: str, dtype: str) -> torch.Tensor:
        """A weight in `dtype`, its own or, of FLOATS, BF16, F16 or F32; or a buffer as it is. Every byte is
        verified."""
        stored = self.tensors[name]
        if stored.value is not None:
            return stored.value
        read = "F32" if dtype == "F16" != stored.dtype else dtype  # the core converts to the other two
        tensor = torch.empty(stored.shape, dtype=_BY_NAME[read])
        self._reader.read_weight(name, read, tensor.data_ptr(), tensor.nbytes)
        return tensor.to(_BY_NAME[dtype])

    def exact(self, name: str) -> torch.Tensor:
        """The master where there is one."""
        return self.read(name, self.dtype_of(name, "F32"))

    def state(self, name: str, component: str) -> torch.Tensor:
        """A state of the optimizer in fp32."""
        tensor = torch.empty(self.tensors[name].shape, dtype=torch.float32)
        self._reader.read_state(name, component, tensor.data_ptr(), tensor.nbytes)
        return tensor

    def dtype_of(self, name: str, wanted: str) -> str:
        """What a merge to `wanted` writes: a buffer, and what is no plain float, stay as they are."""
        stored = self.tensors[name]
        return wanted if stored.value is None and stored.dtype in FLOATS else stored.dtype


def _parameters(manifest: Mapping[str, Any]) -> dict[str, Stored]:
    found = {}
    for unit in manifest["units"]:
        states = _states(unit["optimizer"], unit["format"])
        for segment in unit["segments"]:
            found[segment["name"]] = Stored(
                shape=tuple(segment["shape"]),
                dtype=unit["dtype"],
                aliases=tuple(segment["aliases"]),
                unit=unit["name"],
                optimizer=unit["optimizer"],
                format=unit["format"],
                states=states,
                updates=segment["step"],
                group=segment["group"],
            )
    return found


def _states(optimizer: str, format: str) -> tuple[str, ...]:
    if not optimizer:  # frozen
        return ()
    return tuple(name for name, number, *_ in _core.optim.components(optimizer, format, 1) if number >= 0)
