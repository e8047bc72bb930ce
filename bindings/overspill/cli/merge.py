"""Turn a checkpoint into a Hugging Face folder: safetensors, config, tokenizer.

Weights are streamed, in memory of about one tensor. bf16 reads only the halves that forward uses; fp32 writes the exact
masters. Buffers are written as they are. Names and shapes have to be those of a class that config.json means; the last
line names that class, or says why they were not compared. Experts of a mixture have the fused names of transformers 5
(experts.gate_up_proj), which older versions do not know. The folder appears under its name only when it is whole.
"""

import argparse
import json
import re
import shutil
import signal
import sys
from pathlib import Path

from overspill import durable
from overspill.cli import architecture
from overspill.cli.common import CliError, copy_saved_small_files, copy_small_files, path_of, size
from overspill.memory import human

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", type=path_of, metavar="CHECKPOINT", help="e.g. runs/first/checkpoints/step-000040"
    )
    parser.add_argument(
        "out", type=path_of, metavar="OUT", help="folder to write: a new name, or an empty folder"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument(
        "--shard-size", type=size, default=4 << 30, metavar="SIZE", help="largest file (default 4GiB)"
    )
    parser.add_argument(
        "--model",
        type=path_of,
        metavar="DIR",
        help="where config and tokenizer come from, if not from the checkpoint",
    )


def run(args: argparse.Namespace) -> int:
    progress = _progress if sys.stderr.isatty() else None
    # Like Ctrl-C, SIGTERM ends the merge by an exception, so that what is half written is removed.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        merge(args.checkpoint, args.out, args.dtype, args.shard_size, args.model, progress)
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _look_at_signals(done: int, total: int) -> None:
    """A signal is looked at when Python runs, which while the core merges is here."""


def _progress(done: int, total: int) -> None:
    print(
        f"\rmerge: {human(done)} of {human(total)} ",
        end="" if done < total else "\n",
        file=sys.stderr,
        flush=True,
    )


def merge(
    checkpoint: Path, out: Path, dtype: str = "bf16", shard_bytes: int = 4 << 30, model=None, progress=None
) -> dict:
    """Writes `out` and returns what core.merge counted. Raises on failure, with `out` as it was."""
    from overspill import _core, extra

    checkpoint, out = Path(checkpoint), Path(out)
    if not checkpoint.is_dir():
        raise CliError(
            f"checkpoint {checkpoint} is no folder; give a folder that training saved, e.g. OUT/checkpoints/step-…"
        )
    _check_out(out)
    manifest = _core.manifest(str(checkpoint))
    beside = extra.tensors(manifest["extra_json"], checkpoint)
    small = Path(model) if model else checkpoint / "hf"
    if not (small / "config.json").is_file():
        raise CliError(f"{small} has no config.json; name the folder the model came from with --model DIR")
    out = out.resolve()
    for leftover in _leftovers(out):
        print(
            f"merge: {leftover} was left by a merge that was killed, or belongs to one that runs now; if none runs, "
            "delete it",
            file=sys.stderr,
        )
    durable.make_folders(out.parent)
    part = durable.part_of(out)
    part.mkdir()
    try:
        (part / "small").mkdir()
        copy = copy_small_files if model else copy_saved_small_files
        copy(small, part / "small")
        _set_dtype(part / "small/config.json", small, DTYPES[dtype])
        said = architecture.check(_shapes(manifest, beside), checkpoint, part / "small", small)
        counted = _core.merge(
            str(checkpoint),
            str(part / "model"),
            dtype,
            shard_bytes,
            progress or _look_at_signals,
            [_given(name, tensor, checkpoint) for name, tensor in beside.items()],
        )
        for file in (part / "small").iterdir():
            file.rename(part / "model" / file.name)
        durable.rename_folder(part / "model", out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    print(f"merged {counted['tensors']} tensors, {human(counted['bytes'])}, into {out}; {said}")
    return counted


def _check_out(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CliError(f"{out} is there and not empty; name a new folder")
    if out.is_mount():
        raise CliError(
            f"{out} is where a file system is mounted, so no folder can take its place; name a folder in it"
        )


def _leftovers(out: Path) -> list[Path]:
    """Folders that were to become `out`. A running merge may own one, so merge only names them."""
    name = re.compile(re.escape(out.name) + r"\.part-[0-9a-f]{8}")
    return sorted(path for path in out.parent.glob("*") if name.fullmatch(path.name))


def _shapes(manifest: dict, beside: dict) -> dict[str, tuple[int, ...]]:
    shapes = {name: tuple(tensor.shape) for name, tensor in beside.items()}
    for unit in manifest["units"]:
        shapes.update({segment["name"]: tuple(segment["shape"]) for segment in unit["segments"]})
    return shapes


def _given(name: str, tensor, checkpoint: Path) -> tuple[str, str, list[int], bytes]:
    """As core.merge takes it."""
    import torch

    from overspill.units import DTYPES as NAMES

    if tensor.dtype not in NAMES:
        raise CliError(
            f"{checkpoint}: {name} is {tensor.dtype}, which safetensors cannot hold; give this buffer another dtype in "
            "the model (or persistent=False) and save again"
        )
    flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    return name, NAMES[tensor.dtype], list(tensor.shape), flat.numpy().tobytes()


def _set_dtype(config: Path, named: Path, dtype: str) -> None:
    try:
        values = json.loads(config.read_bytes())
        if not isinstance(values, dict):
            raise ValueError("it is no JSON object")
    except (ValueError, RecursionError) as error:
        raise CliError(
            f"{named}/config.json cannot be read ({error}); give another with --model DIR"
        ) from None
    if values.get("quantization_config"):
        raise CliError(
            f"{named}/config.json has a quantization_config, and merged weights are {dtype}: from_pretrained would "
            "take them for quantised ones; remove it there, or give another folder with --model DIR"
        )
    values.pop("torch_dtype", None)
    durable.write_text(config, json.dumps({**values, "dtype": dtype}, indent=2, sort_keys=True) + "\n")
