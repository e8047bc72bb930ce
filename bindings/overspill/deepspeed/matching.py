"""load_module_strict=False: loads, from another model's checkpoint, the weights and buffers whose names both have."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from .. import _core, calls, extra, given, merging, ranks
from .._core import CheckpointError
from ..boundary import SchedulerState
from ..segments import registry
from ..state import persistent_buffers
from . import fragments

if TYPE_CHECKING:
    from .engine import DeepSpeedEngine

_ONE_FILE = 1 << 62  # bytes
_SHOWN = 5  # names in a message


def is_of(engine: DeepSpeedEngine, path: Path) -> bool:
    """Whether the checkpoint has the names of the engine's model, and no others: it can be loaded whole."""
    return _shapes(path).keys() == _tensors(engine).keys()


def load(engine: DeepSpeedEngine, path: Path, with_states: bool, with_scheduler: bool) -> dict[str, Any]:
    """The exact weights of `path`, by name, in the engine; the rest of the model stays as it is, and so do the
    optimizer's states. Says which names only one of the two has. Host memory: one tensor; and for a while the weights
    in fp32 once more on the checkpoint's disk. All ranks call it. Returns the client state.

    Raises:
        CheckpointError: it is damaged, has no name or another shape of one, or states are wanted; nothing is changed
    """
    read = extra.Extra.read(_core.manifest(path)["extra_json"], path)
    mine, theirs = _tensors(engine), _shapes(path)
    common = [name for name in mine if name in theirs]
    _check(path, mine, theirs, common, with_states)
    with calls.Alone(), _exported(engine, path) as weights:
        if with_scheduler and engine.lr_scheduler is not None:
            _restore_scheduler(engine, read)
        _copy(weights, mine, set(common))
        engine.global_steps, engine.micro_steps = read.global_steps, read.micro_steps
    _say(path, mine.keys() - theirs.keys(), theirs.keys() - mine.keys(), len(common))
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


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    manifest = _core.manifest(path)
    return merging.shapes(manifest, extra.tensors(manifest["extra_json"], path))


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


def _restore_scheduler(engine: DeepSpeedEngine, read: extra.Extra) -> None:
    before = SchedulerState(engine.lr_scheduler, engine.optimizer.param_groups)
    try:
        read.restore_scheduler(engine.lr_scheduler)
    except BaseException:
        before.restore()
        raise
