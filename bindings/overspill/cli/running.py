"""What the commands that run a model share: opening it, and saying what a pass reads of it."""

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from overspill.cli.common import CliError, load_tokenizer, model_folder, path_of, quiet_transformers, size
from overspill.cli.output import warn

if TYPE_CHECKING:
    from overspill.inference import Model


def add_model(parser: argparse.ArgumentParser) -> None:
    """Which model, and the memory it may take."""
    parser.add_argument(
        "--model", type=path_of, required=True, metavar="DIR", help="Hugging Face folder, e.g. of merge"
    )
    parser.add_argument(
        "--budget",
        type=size,
        metavar="SIZE",
        help="memory for weights, cache and buffers, e.g. 1200MiB; the layers it does not hold are read for each pass "
        "(default: all stay in memory)",
    )


def open_model(folder: Path, budget: int | None, positions: int) -> "Model":
    """The model, with a tokenizer that works. positions: of all texts at a time, for which a budget keeps room.

    Raises CliError for a family that overspill.inference does not know, and what `inference.load` raises."""
    model_folder(folder)
    quiet_transformers()
    from overspill import inference
    from overspill.memory import human

    tokenizer = load_tokenizer(folder)
    try:
        model = inference.load(folder, budget=budget, positions=min(positions, inference.MOST_POSITIONS))
    except inference.UnknownModel as reason:
        raise CliError(f"--model {folder}: {reason}; `overspill generate` lets transformers run it") from None
    model.tokenizer = tokenizer
    if model.streamed_bytes:
        warn(
            f"overspill: {human(model.weight_bytes)} of the weights stay in memory, {human(model.streamed_bytes)} are "
            "read for each pass"
        )
    return model


@contextlib.contextmanager
def naming(what: str | os.PathLike) -> Iterator[None]:
    """A ValueError inside becomes a CliError that begins with what it is about."""
    try:
        yield
    except ValueError as error:
        raise CliError(f"{os.fspath(what)}: {error}") from None
