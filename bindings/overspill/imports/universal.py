"""DeepSpeed's universal checkpoints, as ds_to_universal writes them: beside the files of model states a folder `zero`,
with a folder for each trained parameter, in which fp32.pt and each state have a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from .._core import CheckpointError
from . import torch_file
from .found import WEIGHT, Parameter, damaged, step_of
from .torch_file import Tensor

FOLDER = "zero"
_GROUPS = "optimizer_state.pt"
_WEIGHT = "fp32"
_STEP = "step"


class Universal:
    """`groups`: shapes of the parameters by name, by group."""

    def __init__(self, folder: Path, inert: frozenset[str]):
        self.folder, self.inert = folder / FOLDER, inert

    def wrong(self, path: Path, why: str) -> CheckpointError:
        return damaged(path, why, "ds_to_universal")

    def trained(self, groups: list[dict[str, tuple[int, ...]]]) -> dict[str, Parameter]:
        """Raises CheckpointError, OSError."""
        hyper, step = self.common()
        found: dict[str, Parameter] = {}
        for number, shapes in enumerate(groups):
            of_group = hyper[number] if len(hyper) == len(groups) else hyper[0]
            for name, shape in shapes.items():
                found[name] = self.parameter(name, shape, of_group, step)
        return found

    def common(self) -> tuple[list[dict[str, Any]], int]:
        """Hyper-parameters by group, and the step of all parameters that have none of their own."""
        path = self.folder / _GROUPS
        whole = torch_file.read(path, self.inert)
        inner = whole.get("optimizer_state_dict", whole) if isinstance(whole, Mapping) else None
        groups = inner.get("param_groups") if isinstance(inner, Mapping) else None
        if (
            not isinstance(groups, list)
            or not groups
            or not all(isinstance(group, Mapping) for group in groups)
        ):
            raise self.wrong(path, "it has no parameter groups")
        states = inner.get("state") if isinstance(inner, Mapping) else None
        first = next(iter(states.values()), {}) if isinstance(states, Mapping) else {}
        step = first.get(_STEP, 0) if isinstance(first, Mapping) else 0
        return [dict(group) for group in groups], self.count(path, step)

    def count(self, path: Path, value: Any) -> int:
        try:
            return step_of(value, "a parameter")
        except ValueError as error:
            raise self.wrong(path, str(error)) from None

    def parameter(self, name: str, shape: tuple[int, ...], hyper: dict[str, Any], step: int) -> Parameter:
        if "/" in name or name in (".", ".."):
            raise self.wrong(self.folder, f"a parameter is called {name!r:.60}")
        of = self.folder / name
        files = {path.stem: path for path in sorted(of.glob("*.pt"))}
        if _WEIGHT not in files:
            raise CheckpointError(f"overspill: {of} has no {_WEIGHT}.pt: the checkpoint is not whole")
        if _STEP in files:
            step = self.count(files[_STEP], torch_file.read(files[_STEP], self.inert))
        tensors = {
            (WEIGHT if stem == _WEIGHT else stem): self.tensor(path, shape)
            for stem, path in files.items()
            if stem != _STEP
        }
        states = tuple(state for state in tensors if state != WEIGHT)
        return Parameter(name, shape, states, step, _reader(tensors, shape), hyper)

    def tensor(self, path: Path, shape: tuple[int, ...]) -> Tensor:
        found = torch_file.read(path, self.inert)
        found = found.get("param") if isinstance(found, Mapping) else found
        if not isinstance(found, Tensor) or found.elements != math.prod(shape):
            raise self.wrong(path, f"it is no tensor of shape {shape}")
        return found


def _reader(tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> Callable[[str], torch.Tensor]:
    return lambda which: tensors[which].read().view(shape)
