"""deepspeed.utils.zero_to_fp32: the exact weights of a checkpoint that the engine saved, without an engine."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from .. import _core, durable, extra, merging
from ..config.values import parse_size
from . import tags

_ONE_FILE = 1 << 62  # bytes


def _folder_of(checkpoint_dir: str | os.PathLike[str], tag: str | None) -> Path:
    base = Path(checkpoint_dir)
    name = tags.latest(base) if tag is None else tag
    if name is not None and sorted((base / tags.checked(name)).glob("stage-*")):
        whole = str(base / name)
        raise ValueError(
            f"overspill: {whole} is a pipeline's, with a folder per stage: give checkpoint_dir={whole!r} and "
            "tag='stage-00', then the others; names of layers are those of the whole model"
        )
    if name is None:
        raise ValueError(f"overspill: {base} has no file {tags.LATEST!r}: give the tag of a checkpoint in it")
    return base / tags.checked(name)


def _refuse_left_out(exclude_frozen_parameters: bool) -> None:
    if exclude_frozen_parameters:
        raise TypeError(
            "overspill: exclude_frozen_parameters is not supported: a checkpoint does not say which were frozen; drop "
            "them from what this returns"
        )


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor]:
    """Weights in fp32 and buffers, by their names in the model, on the CPU: all of them in memory, and for a while on
    the checkpoint's disk once more. A tied weight is one tensor, by all its names, as DeepSpeed gives it.

    Args:
        checkpoint_dir, tag: as load_checkpoint's
        lazy_mode: without a meaning here

    Raises:
        ValueError: there is no tag
        CheckpointError: it is damaged, or DeepSpeed's own
    """
    _refuse_left_out(exclude_frozen_parameters)
    checkpoint = _folder_of(checkpoint_dir, tag)
    with tempfile.TemporaryDirectory(dir=checkpoint_dir, prefix=".fp32-") as folder:
        merging.weights_alone(checkpoint, Path(folder) / "weights", "fp32", _ONE_FILE)
        found = {
            name: tensor.clone()
            for file in sorted(Path(folder).rglob("*.safetensors"))
            for name, tensor in load_file(file).items()
        }
    names = extra.tied(_core.manifest(checkpoint)["extra_json"], checkpoint)
    return found | {name: found[one] for name, one in names.items() if one in found}


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """The checkpoint's weights in a model that no engine has, on the CPU. Returns the model."""
    model.cpu().load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes output_dir/*.safetensors with the exact weights, a tied one by its first name. Raises TypeError unless
    safe_serialization is True."""
    if not safe_serialization:
        raise TypeError(
            "overspill: safe_serialization=False is not supported: it would write a pickle; give True for safetensors"
        )
    _refuse_left_out(exclude_frozen_parameters)
    checkpoint, out = _folder_of(checkpoint_dir, tag), Path(output_dir)
    durable.make_folders(out)
    with tempfile.TemporaryDirectory(dir=out, prefix=".fp32-") as folder:
        weights = Path(folder) / "weights"
        merging.weights_alone(checkpoint, weights, "fp32", parse_size(max_shard_size))
        for file in sorted(weights.iterdir()):
            file.replace(out / file.name)
