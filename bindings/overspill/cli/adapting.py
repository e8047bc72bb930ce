"""Options of an adapter that is trained in place of the weights, which `train` and `plan` share."""

import argparse
from typing import Any

from overspill.cli.chosen import Chosen
from overspill.cli.common import CliError, more_than_zero, named, positive, share
from overspill.cli.settings import FIELDS, PACKED, Settings, default_text, option

OF_ONE = ("lora_alpha", "lora_dropout", "lora_targets", "frozen")


def add_adapter(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--lora-rank",
        type=positive,
        metavar="R",
        help="train a LoRA adapter of this rank, by PEFT, in place of the weights, which are frozen; it takes about "
        "ten times the --lr. Each checkpoint has it in adapter/, as PEFT reads it; `overspill merge` joins it with the "
        "model",
    )
    add("--lora-alpha", type=more_than_zero, metavar="A", help="its sums are scaled by A / R (default 2 R)")
    add("--lora-dropout", type=share, metavar="P", help=f"of its input {default_text('lora_dropout')}")
    add(
        "--lora-targets",
        nargs="+",
        type=named,
        metavar="LAYER",
        help="ends of the names of the layers that get one, e.g. q_proj v_proj (default all-linear: every linear layer "
        "but the output)",
    )
    add(
        "--frozen",
        choices=PACKED,
        help="with --lora-rank: hold the frozen weights of linear layers in 4 or 8 bits (docs/peft.md)",
    )


def check_adapter(chosen: Chosen) -> None:
    """Raises CliError for options of an adapter where there is none."""
    if chosen.settings.lora_rank is not None:
        return
    for name in OF_ONE:
        value = getattr(chosen.settings, name)
        if chosen.origins[name] == "typed" and value != FIELDS[name].default:
            raise CliError(
                f"{option(name)} is of an adapter: give its --lora-rank, or leave {option(name)} out"
            )


def adapted(model: Any, settings: Settings) -> Any:
    """The model, or PEFT's around it where an adapter is asked for. Its first values are drawn by the run's seed."""
    if settings.lora_rank is None:
        return model
    import torch

    from overspill import lora

    torch.manual_seed(settings.seed)
    targets = settings.lora_targets or [lora.ALL_LINEAR]
    try:
        return lora.add(model, settings.lora_rank, settings.lora_alpha, settings.lora_dropout, targets)
    except ValueError as error:
        raise CliError(f"--lora-targets {' '.join(targets)}: {str(error).splitlines()[0]}") from error
