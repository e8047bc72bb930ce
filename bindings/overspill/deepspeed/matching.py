"""load_module_strict=False: loads, from another model's checkpoint, the weights and buffers whose names both have."""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from .. import _core, calls, checkpointing, extra, given, merging, ranks
from .._core import CheckpointError
from ..segments import registry
from ..state import persistent_buffers
from . import fragments

if TYPE_CHECKING:
    from .engine import DeepSpeedEngine

_ONE_FILE = 1 << 62  # bytes
_SHOWN = 5  # names in a message


@dataclass(frozen=True)
class Other:
    """A checkpoint of another model than the engine's. `shapes`: of its weights and buffers, by name."""

    path: Path
    read: extra.Extra
    shapes: dict[str, tuple[int, ...]]


def of_another(engine: DeepSpeedEngine, path: Path) -> Other | None:
    """None where the checkpoint has the names of the engine's model, and no others: it can be loaded whole."""
    manifest = _core.manifest(path)
    text = manifest["extra_json"]
    shapes = merging.shapes(manifest, extra.tensors(text, path))
    return (
        None
        if shapes.keys() == _tensors(engine).keys()
        else Other(path, extra.Extra.read(text, path), shapes)
    )


def load(engine: DeepSpeedEngine, other: Other, with_states: bool, with_scheduler: bool) -> dict[str, Any]:
    """The exact weights of `other`, by name, in the engine; the rest of the model stays as it is, and so do the
    optimizer's states. Says which names only one of the two has. Host memory: one tensor; and for a while the weights
    in fp32 once more on the checkpoint's disk. All ranks call it. Returns the client state.

    Raises:
        CheckpointError: it is damaged, has no name or another shape of one, or states are wanted; nothing is changed
    """
    read, mine, theirs = other.read, _tensors(engine), other.shapes
    common = [name for name in mine if name in theirs]
    _check(other.path, mine, theirs, common, with_states)
    with calls.Alone(), _exported(engine, other.path) as weights:
        copy = functools.partial(_copy, weights, mine, set(common))
        if with_scheduler:
            checkpointing.after_scheduler(engine, read.restore_scheduler, copy)
        else:
            copy()
        engine.global_steps, engine.micro_steps = read.global_steps, read.micro_steps
    _say(other.path, mine.keys() - theirs.keys(), theirs.keys() - mine.keys(), len(common))
    return read.client_state


@contextlib.contextmanager
def _exported(engine: DeepSpeedEngine, path: Path) -> Iterator[Path]:
    """A folder of safetensors with the checkpoint's exact weights, which rank 0 writes for all."""
    with ranks.ByOne(engine._group, "load_checkpoint"):
        made = tempfile.mkdtemp(dir=path.parent, prefix=".fp32-") if engine.rank == 0 else None
    folder = ranks.rank_0s(engine._group, made)
    try:
        with ranks.ByOne(engine._group, "load_checkpoint"):
            if engine.rank == 0:
                merging.weights_alone(path, Path(folder) / "weights", "fp32", _ONE_FILE)
        yield Path(folder) / "weights"
        ranks.rank_0s(engine._group, None)  # all have read
    finally:
        if engine.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _copy(weights: Path, mine: Mapping[str, torch.Tensor], names: set[str]) -> None:
    for file in sorted(weights.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in sorted(names.intersection(tensors.keys())):
                value = tensors.get_tensor(name)
                if id(mine[name]) in registry:
                    fragments.set_weight(mine[name], value, "load_checkpoint")
                else:
                    with torch.no_grad():
                        mine[name].copy_(value)


def _tensors(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, a tied one by its first, which the core has it by."""
    return dict(engine.module.named_parameters()) | persistent_buffers(engine.module)


def _check(
    path: Path,
    mine: Mapping[str, torch.Tensor],
    theirs: Mapping[str, tuple[int, ...]],
    common: list[str],
    with_states: bool,
) -> None:
    if with_states:
        raise CheckpointError(
            f"overspill: load_checkpoint: {path} is of another model, whose optimizer's states are not this one's: "
            "give load_optimizer_states=False beside load_module_strict=False"
        )
    if not common:
        raise CheckpointError(
            f"overspill: load_checkpoint: {path} has {_some(theirs)}, of which this model has none: load the "
            "checkpoint of a model with the same names"
        )
    for name in common:
        if tuple(mine[name].shape) != theirs[name]:
            raise CheckpointError(
                f"overspill: load_checkpoint: {name} is of shape {list(theirs[name])} in {path}, and "
                f"{list(mine[name].shape)} here: load_module_strict=False takes what has the same shape; rename it in "
                "the model, or build the model with that shape"
            )


def _say(path: Path, missing: Collection[str], left: Collection[str], taken: int) -> None:
    warnings.warn(
        f"overspill: load_checkpoint: {taken} weights and buffers of {path} are loaded. In this model alone, and as "
        f"they were: {_some(missing)}. In the checkpoint alone: {_some(left)}",
        stacklevel=given.script_level(),
    )


def _some(names: Collection[str]) -> str:
    some = sorted(names)[:_SHOWN]
    return (", ".join(some) if some else "none") + (
        f" and {len(names) - len(some)} more" if len(names) > len(some) else ""
    )
