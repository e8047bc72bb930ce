"""A checkpoint becomes a Hugging Face folder: safetensors, config, tokenizer."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from . import _core, architecture, durable, extra, folders, lora, packed
from ._core import CheckpointError
from .config.values import parse_size
from .divided import Division
from .model_files import OTHER_FOLDER, SMALL_FILE_BYTES, copy_saved_small_files, copy_small_files
from .pretrained import Folder, some
from .units import DTYPES

NAMES = {"bf16": "bfloat16", "fp32": "float32"}
DTYPES_OF = {"bf16": torch.bfloat16, "fp32": torch.float32}
_IN_A_SCRIPT = (
    "make the same model and engine, `engine.load_checkpoint(CHECKPOINT)`, then "
    "`with engine.gathered(list(model.parameters())): "
)
_WAY_OUT = (
    "In the training script save the model's configuration (`model.config.architectures = "
    "[type(model).__name__]; model.config.save_pretrained(DIR)`) and give merge that folder: --model DIR (in a script "
    f"model=DIR). Or in a script {_IN_A_SCRIPT}model.save_pretrained(OUT)`"
)


class Merged(NamedTuple):
    """What `merge` wrote: tensors, bytes of weights, files of weights, and which class of transformers opens it (or why
    nobody could tell)."""

    tensors: int
    bytes: int
    files: int
    said: str


def merge(
    checkpoint: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    folder: str | os.PathLike[str],
    *,
    dtype: str = "bf16",
    shard_size: int | str = "4GiB",
    model: str | os.PathLike[str] | None = None,
    rules: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Merged:
    """Turns a checkpoint into a Hugging Face folder that `from_pretrained` opens. Needs no engine and no GPU.

    Weights are streamed, in host memory of a few MiB, at most one tensor that is not row-major. Names and shapes have
    to be those of a class that config.json means. The folder appears under its name only when it is whole.

    Args:
        checkpoint: what `engine.save_checkpoint` or `overspill train` saved, of any number of ranks; or a list of such,
            the parts of one model divided by tensor or expert parallelism (docs/ranks.md), which are joined
        folder: to write: a new name, or an empty folder
        dtype: "bf16" reads only the halves that forward uses; "fp32" writes the exact masters
        shard_size: bytes of the largest file, a number or a text such as "4GiB"
        model: the folder with config.json and the tokenizer's files. None: the checkpoint's own copies, which
            `overspill train` adds. Of a checkpoint with an adapter (`overspill train --lora-rank`): the folder of the
            model that it was trained over, whose weights are read; None: that which the adapter names
        rules: how parts were divided that torch did not divide: a mapping from patterns of names to styles, such as
            {"*.qkv.weight": "qkv"}, or the path of a JSON file with one (docs/ranks.md lists the styles). None: the
            table of config.json's family. Of DTensors the checkpoints know it
        progress: called with (bytes done, bytes in all)

    Raises:
        CheckpointError: the checkpoint or config.json is damaged, or they are of two models; a part is missing, given
            twice, or of another run or step, or copies differ
        FolderError: `folder` is there and not empty
        OSError: there is no room; `folder` is as it was
    """
    if dtype not in NAMES:
        raise ValueError(f"overspill: merge: dtype = {dtype!r}: one of {', '.join(NAMES)}")
    out, size = Path(folder), parse_size(shard_size)
    source = _source(checkpoint, model, rules)
    folders.check_empty(out)
    small = Path(model) if model else source.folder / "hf"
    if not (small / "config.json").is_file():
        raise CheckpointError(f"{small} has no config.json; {OTHER_FOLDER}")
    out = out.resolve()
    _tell_leftovers(out)
    durable.make_folders(out.parent)
    part = durable.part_of(out)
    part.mkdir()
    try:
        (part / "small").mkdir()
        copy = copy_small_files if model else copy_saved_small_files
        copy(small, part / "small")
        _set_dtype(part / "small/config.json", small, NAMES[dtype])
        counted, said = source.write(part, small, dtype, size, progress or _look_at_signals)
        for file in (part / "small").iterdir():
            file.rename(part / "model" / file.name)
        durable.rename_folder(part / "model", out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Merged(counted["tensors"], counted["bytes"], counted["files"], said)


class Source(Protocol):
    """What is merged. `folder`: of the checkpoint whose hf/ describes the model."""

    folder: Path

    def write(
        self, part: Path, small: Path, dtype: str, shard_bytes: int, tell: Callable[[int, int], None]
    ) -> tuple[dict[str, int], str]:
        """Writes the weights into part/"model", which is new; part/"small" has config.json, which errors call `small`.
        Returns tensors, bytes and files, and which class opens them. Raises CheckpointError."""


def _source(
    checkpoint: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    model: str | os.PathLike[str] | None,
    rules: Mapping[str, Any] | str | os.PathLike[str] | None,
) -> Source:
    """Raises CheckpointError for what cannot be merged whatever the model, ValueError for wrong rules."""
    if isinstance(checkpoint, (str, os.PathLike)):
        if rules is not None:
            raise ValueError("overspill: merge: rules say how parts are joined, and one checkpoint is given")
        return _One(Path(checkpoint), model)
    from .joining.merged import Parts  # not at start-up

    return Parts([Path(each) for each in checkpoint], rules)


class _One:
    def __init__(self, folder: Path, model: str | os.PathLike[str] | None):
        if not folder.is_dir():
            raise CheckpointError(
                f"checkpoint {folder} is no folder; give a folder that training saved, e.g. OUT/checkpoints/step-…"
            )
        self.folder, self._model = folder, model
        self._manifest = _core.manifest(folder)
        _refuse_part(extra.division(self._manifest["extra_json"], folder), folder)
        self._adapter = lora.Adapter(folder / lora.FOLDER) if (folder / lora.FOLDER).is_dir() else None

    def write(
        self, part: Path, small: Path, dtype: str, shard_bytes: int, tell: Callable[[int, int], None]
    ) -> tuple[dict[str, int], str]:
        if self._adapter:
            base = _base(self._adapter, self._model, small)
            counted = lora.write_joined(
                self._adapter, base, part / "model", DTYPES_OF[dtype], shard_bytes, tell
            )
            return counted, _said_of_adapter(self._manifest, base, part, small)
        beside = extra.tensors(self._manifest["extra_json"], self.folder)
        _refuse_packed(self._manifest, self.folder)
        said = check_names(shapes(self._manifest, beside), str(self.folder), part / "small", small)
        given = [_given(name, tensor, self.folder) for name, tensor in beside.items()]
        written = _core.merge(self.folder, part / "model", dtype, shard_bytes, tell, given)
        weights = [file for file in written["files"] if file.endswith(".safetensors")]
        return {**written, "files": len(weights)}, said


def _refuse_part(division: Division | None, folder: Path) -> None:
    """Raises CheckpointError for a part alone that torch divided."""
    if division is not None and division.placements is not None:
        raise CheckpointError(
            f"{folder} is part {division.part} of {division.of} of a model; give all {division.of} parts "
            "(overspill merge PART0 PART1 ... OUT; in a script overspill.merge([PART0, PART1, ...], OUT))"
        )


def _base(adapter: lora.Adapter, model: str | os.PathLike[str] | None, small: Path) -> Path:
    """The folder with the weights that the adapter was trained over. One that the adapter names, which anybody may have
    made, has to have the configuration that lies beside it: no other model's weights go out."""
    if model is not None:
        return Path(model)
    base = Path(adapter.base)
    if adapter.base and _same_file(base / "config.json", small / "config.json"):
        return base
    raise CheckpointError(
        f"{adapter.folder} was trained over {adapter.base!r:.300}, which is no folder with that model here; name it "
        "(--model DIR; in a script model=DIR)"
    )


def _same_file(one: Path, other: Path) -> bool:
    try:
        return (
            one.is_file()
            and one.stat().st_size <= SMALL_FILE_BYTES
            and one.read_bytes() == other.read_bytes()
        )
    except (OSError, ValueError):
        return False


def _said_of_adapter(manifest: Mapping[str, Any], base: Path, part: Path, named: Path) -> str:
    shapes = {name: tensor.shape for name, tensor in Folder(part / "model").tensors.items()}
    found = architecture.fit(shapes, part / "small", named)
    if found.wrong:
        raise CheckpointError(f"{base} does not fit {found.wrong}")
    packings = packed.of_units(unit["name"] for unit in manifest["units"])
    rounded = f", which was held in {packings} while it trained," if packings else ""
    return f"{base}{rounded} with the adapter added; {found.said}"


def weights_alone(checkpoint: Path, folder: Path, dtype: str, shard_size: int) -> None:
    """Writes the weights and buffers of a checkpoint as safetensors into `folder`, which is new, by the names that the
    model had; there is no config, and nothing is looked at. Raises as `merge` does."""
    manifest = _core.manifest(checkpoint)
    _refuse_packed(manifest, checkpoint)
    beside = extra.tensors(manifest["extra_json"], checkpoint)
    given = [_given(name, tensor, checkpoint) for name, tensor in beside.items()]
    _core.merge(checkpoint, folder, dtype, shard_size, _look_at_signals, given)


def _look_at_signals(done: int, total: int) -> None:
    """A signal is looked at when Python runs, which while the core merges is here."""


def _tell_leftovers(out: Path) -> None:
    """Names folders that were to become `out`. A running merge may own one, so nobody removes them."""
    name = re.compile(re.escape(out.name) + r"\.part-[0-9a-f]{8}")
    for leftover in sorted(path for path in out.parent.glob("*") if name.fullmatch(path.name)):
        print(
            f"merge: {leftover} was left by a merge that was killed, or belongs to one that runs now; if none runs, "
            "delete it",
            file=sys.stderr,
        )


def shapes(manifest: Mapping[str, Any], beside: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Of everything that a merged checkpoint has, by name. `beside`: what extra.tensors found."""
    found = {name: tuple(tensor.shape) for name, tensor in beside.items()}
    for unit in manifest["units"]:
        found.update({segment["name"]: tuple(segment["shape"]) for segment in unit["segments"]})
    return found


def check_names(
    shapes: Mapping[str, tuple[int, ...]],
    said: str,
    folder: Path,
    named: Path,
) -> str:
    """Which class opens the model. `said`: what has these tensors. Raises CheckpointError where none does."""
    if adapted := architecture.names_of_peft(shapes):  # also where there is no class to compare with
        raise CheckpointError(
            f"{said} has names of PEFT, whose adapters merge does not join: {some(adapted)}. One of overspill "
            "train, which lacks its adapter/: `overspill train --out DIR --resume` adds that. Else in a script "
            "make the same model and engine, `engine.load_checkpoint(CHECKPOINT)`, then "
            "`engine.module.merge_and_unload(); engine.save_pretrained(OUT)`"
        )
    found = architecture.fit(shapes, folder, named)
    if found.wrong:
        raise CheckpointError(f"{said} does not fit {found.wrong}. {_WAY_OUT}")
    return found.said


def _refuse_packed(manifest: Mapping[str, Any], checkpoint: Path) -> None:
    if packings := packed.of_units(unit["name"] for unit in manifest["units"]):
        raise CheckpointError(
            f"{checkpoint} holds frozen weights in {packings}, which merge does not unpack. In a script make the same "
            "model and engine, `engine.load_checkpoint(CHECKPOINT)`, then `engine.save_pretrained(OUT)`"
        )


def _given(name: str, tensor: torch.Tensor, checkpoint: Path) -> tuple[str, str, list[int], bytes]:
    """As core.merge takes it."""
    if tensor.dtype not in DTYPES:
        raise CheckpointError(
            f"{checkpoint}: {name} is {tensor.dtype}, which safetensors cannot hold; give this buffer another dtype in "
            "the model (or persistent=False) and save again"
        )
    flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    return name, DTYPES[tensor.dtype], list(tensor.shape), flat.numpy().tobytes()


def _set_dtype(config: Path, named: Path, dtype: str) -> None:
    try:
        values = json.loads(config.read_bytes())
        if not isinstance(values, dict):
            raise ValueError("it is no JSON object")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{named}/config.json cannot be read ({error}); {OTHER_FOLDER}") from None
    if values.get("quantization_config"):
        raise CheckpointError(
            f"{named}/config.json has a quantization_config, and merged weights are {dtype}: from_pretrained would "
            f"take them for quantised ones; remove it there, or {OTHER_FOLDER}"
        )
    values.pop("torch_dtype", None)
    durable.write_text(config, json.dumps({**values, "dtype": dtype}, indent=2, sort_keys=True) + "\n")
