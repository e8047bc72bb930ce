"""Turn a checkpoint into a Hugging Face folder: safetensors, config, tokenizer.

Weights are streamed, in memory of about one tensor. bf16 reads only the halves that forward uses; fp32 writes the exact
masters. The folder appears under its name only when it is whole.
"""

import argparse
import json
import shutil
import signal
import sys
from pathlib import Path

from overspill.cli.common import CliError, copy_small_files, size
from overspill.memory import human

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="e.g. runs/first/checkpoints/step-000040"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; must not exist or be empty")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument(
        "--shard-size", type=size, default=4 << 30, metavar="SIZE", help="largest file (default 4GiB)"
    )
    parser.add_argument(
        "--model",
        type=Path,
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
    from overspill import _core

    if not checkpoint.is_dir():
        raise CliError(
            f"checkpoint {checkpoint} is no folder; give a folder that training saved, e.g. OUT/checkpoints/step-…"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CliError(f"{out} is there and not empty; name a new folder")
    small = model or checkpoint / "hf"
    if not (small / "config.json").is_file():
        raise CliError(f"{small} has no config.json; name the folder the model came from with --model DIR")
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        counted = _core.merge(str(checkpoint), str(part), dtype, shard_bytes, progress or _look_at_signals)
        copy_small_files(small, part)
        _set_dtype(part / "config.json", DTYPES[dtype])
        if out.exists():
            out.rmdir()
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    print(f"merged {counted['tensors']} tensors, {human(counted['bytes'])}, into {out}")
    return counted


def _set_dtype(config: Path, dtype: str) -> None:
    values = json.loads(config.read_text())
    values.pop("torch_dtype", None)
    config.write_text(json.dumps({**values, "dtype": dtype}, indent=2, sort_keys=True) + "\n")
