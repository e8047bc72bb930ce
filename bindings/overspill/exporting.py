"""Writes an engine's model as a Hugging Face folder, from one rank or several, with one weight in memory at a time."""

from __future__ import annotations

import copy
import functools
import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunction

from . import architecture, calls, durable, folders, given, reading, replaced, tensor_file
from ._core import CheckpointError, OverspillError
from .adapters import is_adapted
from .config.values import parse_size
from .divided import is_divided
from .extras import need
from .model_files import SMALL_FILE_BYTES, small_files
from .pretrained import wanted
from .ranks import ByOne
from .segments import registry
from .state import persistent_buffers
from .units import DTYPES

if TYPE_CHECKING:
    from .engine import Engine
    from .ranks import Group

_CONFIGS = ("config.json", "generation_config.json")
_CONVERTED = (torch.float32, torch.bfloat16)  # what a caller may ask for
FLOATS = (torch.bfloat16, torch.float16, torch.float32)  # what is converted then, as merge does


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file. `read` gives it, on the CPU and row-major, in `dtype`; with several ranks all call it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Shard:
    file: str
    tensors: list[Tensor]


def save_engine(
    engine: Engine,
    folder: Any,
    dtype: torch.dtype | None,
    tokenizer: Any,
    shard_size: int | str,
    of_transformers: dict[str, Any],
) -> None:
    """`Engine.save_pretrained`."""
    check_arguments(of_transformers)
    engine._settle()
    model = exported(engine.module)
    target = Path(given.path("save_pretrained", folder))
    most, wide = parse_size(shard_size), check_dtype(dtype)
    with calls.Alone():
        calls.check(sys._getframe())
        if model is engine.module:
            replaced.check(model, engine._residency)
        else:  # adapters have left it
            replaced.check_new(model, engine._residency)
        reading.hand_over(engine._residency.units)
        save(model, engine._group, target, wide, tokenizer, most)


def save(
    module: torch.nn.Module,
    group: Group | None,
    folder: Path,
    dtype: torch.dtype | None,
    tokenizer: Any,
    shard_bytes: int,
) -> None:
    """Writes `folder`. All ranks call it, and rank 0 writes. Inside calls.Alone. Raises on all ranks."""
    tensors = _tensors(module, dtype)
    shards = _shards(tensors, shard_bytes)
    writer = group is None or group.rank == 0
    part = durable.part_of(folder.absolute())
    try:
        with ByOne(group, "save_pretrained"):
            if writer:
                folders.check_new_model(folder)
                durable.make_folders(part.parent)
                part.mkdir()
                _write_small_files(module, part, dtype or _most(tensors), tokenizer)
                _check_names(module, {t.name: t.shape for t in tensors}, part)
        # Beyond this point every rank reads every weight: none may stop where another goes on.
        with ByOne(group, "save_pretrained") as failures:
            for shard in shards:
                _write(part / shard.file if writer else None, shard.tensors, failures)
            if writer and not failures:
                _write_index(part, shards)
                put(part, folder.absolute())
    finally:
        if writer:
            shutil.rmtree(part, ignore_errors=True)


def write_shards(
    folder: Path, tensors: Sequence[Tensor], shard_bytes: int, progress: Callable[[int], None]
) -> int:
    """Writes the tensors, one in memory at a time, into `folder`, which is there; `progress` is called with the bytes
    that are written. Returns how many files of weights there are."""
    shards = _shards(tensors, shard_bytes)
    done = 0
    for shard in shards:
        with durable.new_file(folder / shard.file) as file:
            file.write(_header(shard.tensors))
            for tensor in shard.tensors:
                _write_value(file, tensor.read())
                done += tensor.bytes
                progress(done)
    _write_index(folder, shards)
    return len(shards)


def _write_index(folder: Path, shards: Sequence[Shard]) -> None:
    if len(shards) > 1:
        durable.write_text(folder / "model.safetensors.index.json", _index(shards))


def _tensors(module: torch.nn.Module, dtype: torch.dtype | None) -> list[Tensor]:
    """The tensors of a state dict, each once, under its first name."""
    found = []
    buffers = {id(buffer) for buffer in persistent_buffers(module).values()}
    empty = [([name], p) for name, p in module.named_parameters() if p.numel() == 0]
    for names, tensor in [*wanted(module), *empty]:
        if is_divided(tensor):
            raise OverspillError(
                f"overspill: save_pretrained: {names[0]} is a DTensor, of which this rank has a part: take "
                "engine.weight(p).full_tensor() of each on all ranks, and save those"
            )
        own = tensor.dtype
        wide = own if dtype is None or own not in FLOATS or id(tensor) in buffers else dtype
        if wide not in DTYPES:
            raise OverspillError(
                f"overspill: save_pretrained: {names[0]} is {wide}, which safetensors cannot hold; give it another "
                "dtype, or persistent=False where it is a buffer"
            )
        found.append(Tensor(names[0], wide, tuple(tensor.shape), functools.partial(_read, tensor, wide)))
    return found


def _read(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    segment = registry.get(id(tensor))
    if segment is None:
        value = tensor.detach().cpu()
    else:
        exact = dtype is not segment.unit.dtype and segment.unit.trainable  # else it would be rounded twice
        value = reading.weight(segment, torch.float32 if exact else None).detach()
    return value.to(dtype).contiguous()


def _most(tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype of most floating elements."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        if tensor.dtype.is_floating_point:
            sizes[tensor.dtype] += tensor.bytes // tensor.dtype.itemsize
    return sizes.most_common(1)[0][0] if sizes else torch.float32


def _shards(tensors: Sequence[Tensor], most: int) -> list[Shard]:
    """Divides the tensors into files in the model's order, as merge does; within a file wide elements come first, so
    that all are aligned."""
    cut: list[list[Tensor]] = [[]]
    held = 0
    for tensor in tensors:
        if cut[-1] and held + tensor.bytes > most:
            cut.append([])
            held = 0
        cut[-1].append(tensor)
        held += tensor.bytes
    count = len(cut)
    return [
        Shard(
            "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors",
            sorted(each, key=lambda tensor: -tensor.dtype.itemsize),
        )
        for number, each in enumerate(cut, 1)
    ]


def _write(path: Path | None, tensors: Sequence[Tensor], failures: list[Exception]) -> None:
    """One file of safetensors. A failure of the disk is put into
    the list, and the rest is read all the same. `path`: None on ranks that do not write."""
    values = (tensor.read() for tensor in tensors)
    if path is not None and not failures:
        try:
            with durable.new_file(path) as file:
                file.write(_header(tensors))
                for value in values:
                    _write_value(file, value)
        except OSError as error:
            failures.append(error)
    for _ in values:
        pass


def _write_value(file: Any, value: torch.Tensor) -> None:
    with DisableTorchFunction():
        if value.numel():
            file.write(value.view(-1).view(torch.uint8).numpy().data)


def _header(tensors: Sequence[Tensor]) -> bytes:
    return tensor_file.header((t.name, DTYPES[t.dtype], t.shape, t.bytes) for t in tensors)


def _index(shards: Sequence[Shard]) -> str:
    total = sum(tensor.bytes for shard in shards for tensor in shard.tensors)
    names = {tensor.name: shard.file for shard in shards for tensor in shard.tensors}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=2) + "\n"


def _write_small_files(module: Any, part: Path, dtype: torch.dtype, tokenizer: Any) -> None:
    config = copy.deepcopy(module.config)
    config.architectures, config.dtype = [type(module).__name__], dtype
    config.save_pretrained(part)
    if getattr(module, "generation_config", None) is not None and module.can_generate():
        module.generation_config.save_pretrained(part)
    if tokenizer is not None:
        tokenizer.save_pretrained(part)
    else:
        for path in _tokenizer_files(module):
            shutil.copyfile(path, part / path.name)
    for path in part.iterdir():
        with path.open("rb") as file:
            durable.sync_file(file)


def _tokenizer_files(module: Any) -> Iterator[Path]:
    """Of the folder that the model came from, where there is one."""
    name = getattr(module.config, "_name_or_path", "")
    if isinstance(name, str) and name and (Path(name) / "config.json").is_file():
        for path in small_files(Path(name)):
            if path.name not in _CONFIGS and path.stat().st_size <= SMALL_FILE_BYTES:
                yield path


def _check_names(module: torch.nn.Module, shapes: dict[str, tuple[int, ...]], part: Path) -> None:
    found = architecture.fit(shapes, part, part)
    if found.wrong:
        raise CheckpointError(
            f"overspill: save_pretrained: the weights do not fit {found.wrong}. Let transformers save it, with all of "
            "it in memory once: engine.module.save_pretrained(FOLDER)"
        )


def put(part: Path, target: Path) -> None:
    """Gives the folder its name. In an existing model's folder it replaces each file whole, and removes weight files
    that the new model does not have."""
    if not target.is_dir() or not any(target.iterdir()):
        durable.rename_folder(part, target)
        return
    durable.sync_folder(part)
    new = {path.name for path in part.iterdir()}
    for path in sorted(part.iterdir()):
        path.replace(target / path.name)
    for path in folders.weights_in(target):
        if path.name not in new:
            path.unlink()
    durable.sync_folder(target)


def check_dtype(dtype: Any) -> torch.dtype | None:
    if dtype is not None and dtype not in _CONVERTED:
        raise ValueError(
            f"overspill: save_pretrained: dtype = {dtype!r:.60}: give torch.float32 (the exact masters), "
            "torch.bfloat16, or None for each weight's own"
        )
    chosen: torch.dtype | None = dtype
    return chosen


def exported(module: Any) -> Any:
    """The model of transformers that `module` is, or that PEFT has merged its adapters into. Raises TypeError where
    there is none, CheckpointError where its weights are not all that was trained."""
    need("transformers")
    from transformers import PreTrainedModel

    if is_adapted(module):
        module = _merged(module)
    if not isinstance(module, PreTrainedModel):
        own = ""
        if hasattr(module, "save_pretrained"):
            own = f"; {type(module).__name__} has a save_pretrained of its own: engine.module.save_pretrained(FOLDER)"
        raise TypeError(
            f"overspill: save_pretrained: {type(module).__name__} is no model of transformers, so no config.json "
            f"describes it: save engine.state_dict(){own}"
        )
    if getattr(module.config, "quantization_config", None):
        raise CheckpointError(
            "overspill: save_pretrained: the model's config has a quantization_config, and its weights are written as "
            "they are: from_pretrained would take them for quantised ones; set it to None, or "
            "let transformers save it: engine.module.save_pretrained(FOLDER)"
        )
    return module


def check_arguments(of_transformers: dict[str, Any]) -> None:
    """Accepts arguments of transformers' save_pretrained that agree with what the engine does anyway. Raises TypeError
    for others."""
    if not of_transformers.pop("safe_serialization", True):
        raise TypeError("overspill: save_pretrained: safe_serialization = False is a pickle; leave it out")
    unknown = of_transformers.keys() - {"is_main_process", "save_function", "state_dict"}
    if unknown:
        raise TypeError(
            f"overspill: save_pretrained: unknown {', '.join(sorted(unknown))}; it takes dtype, tokenizer and "
            "shard_size (docs/guide.md)"
        )


def _merged(module: Any) -> Any:
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapter = "engine.module.save_pretrained(FOLDER) writes the adapter alone, which PEFT opens"
    if any(config.is_prompt_learning for config in module.peft_config.values()):
        raise CheckpointError(
            f"overspill: save_pretrained: {type(module).__name__} has a prompt beside its weights, which no model of "
            f"transformers has: {adapter}"
        )
    if any(isinstance(each, BaseTunerLayer) for each in module.modules()):
        raise CheckpointError(
            f"overspill: save_pretrained: {type(module).__name__} has adapters beside its weights: {adapter}; for the "
            "merged model call engine.module.merge_and_unload() first, then engine.save_pretrained(FOLDER)"
        )
    return module.get_base_model()


__all__ = ["check_dtype", "exported", "put", "save"]
