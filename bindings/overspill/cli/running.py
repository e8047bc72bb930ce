"""What the commands that run a model share: their options, opening it within the budget of the whole process, and
saying beforehand how fast it will be."""

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from overspill._core import BudgetError
from overspill.cli.common import CliError, load_tokenizer, model_folder, path_of, quiet_transformers, size
from overspill.cli.output import warn
from overspill.inference_formats import CACHES, WEIGHTS
from overspill.memory import human, left_of

if TYPE_CHECKING:
    from overspill.inference import Model


def add_model(parser: argparse.ArgumentParser) -> None:
    """Which model."""
    parser.add_argument(
        "--model", type=path_of, required=True, metavar="DIR", help="Hugging Face folder, e.g. of merge"
    )


def add_form(parser: argparse.ArgumentParser) -> None:
    """The form in which it is kept, and the memory it may take."""
    parser.add_argument(
        "--budget",
        type=size,
        metavar="SIZE",
        help="memory of the whole process, e.g. 1200MiB; the weights that it does not hold are read for each pass of "
        "the model (default: all stay in memory)",
    )
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        help="12bit: bf16 in three quarters of the bytes, without loss; q8: about half, rounded (default: as the "
        "files have them)",
    )
    parser.add_argument(
        "--cache",
        choices=CACHES,
        help="int8: keys and values of earlier tokens in about half the bytes, rounded (default: bf16, or fp32 with "
        "weights of fp32)",
    )


def load(folder: Path, args: argparse.Namespace, positions: int) -> "Model":
    """The model, as the options of `add_form` say. positions: of all texts at a time, for which a budget keeps room.
    What the process holds when this is called is taken off the budget.

    Raises CliError for a budget that does not hold the least, and what else `inference.load` raises."""
    from overspill import inference

    left = None if args.budget is None else left_of(args.budget)
    try:
        return inference.load(
            folder,
            budget=left,
            weights=args.weights,
            cache=args.cache,
            positions=min(positions, inference.MOST_POSITIONS),
        )
    except BudgetError as error:
        if left is None:
            raise
        raise CliError(
            f"--budget {human(args.budget)} is for the whole process, of which Python and its libraries hold "
            f"{human(args.budget - left)}: {error}"
        ) from None


def open_model(folder: Path, args: argparse.Namespace, positions: int) -> "Model":
    """`load`, with a tokenizer that works.

    Raises CliError for a family that overspill.inference does not know, and what `load` raises."""
    model_folder(folder)
    quiet_transformers()
    from overspill import inference

    tokenizer = load_tokenizer(folder)
    try:
        model = load(folder, args, positions)
    except inference.UnknownModel as reason:
        raise CliError(f"--model {folder}: {reason}; `overspill generate` lets transformers run it") from None
    model.tokenizer = tokenizer
    return model


def foretell(model: "Model", args: argparse.Namespace, together: int = 1) -> None:
    """With a budget, says what stays, what a pass reads, and the speed at which a text is written, or at which it is
    read where `together` tokens are read at a time."""
    if args.budget is None:
        return
    warn(
        f"overspill: {human(model.weight_bytes)} of the weights stay in memory, {human(model.streamed_bytes)} are read "
        f"for each pass; about {model.expected_tokens_per_second(together):.3g} tokens a second are expected"
    )


@contextlib.contextmanager
def naming(what: str | os.PathLike) -> Iterator[None]:
    """A ValueError inside becomes a CliError that begins with what it is about."""
    try:
        yield
    except ValueError as error:
        raise CliError(f"{os.fspath(what)}: {error}") from None
