"""What training needs, component by component, and where it would live.

Works from the model's config and the headers of its safetensors files; no weight is read and nothing is allocated. What
cannot work is refused with the sum and the smallest budget that would do.

For a machine that is not here, or a model whose weights are not, it simulates a step: what fits, seconds, tokens a
second, what the disks have to take, and what would help most.
"""

import argparse
import json
from pathlib import Path

from overspill.cli import imagined, room, wear
from overspill.cli.adapting import adapted, add_adapter, check_adapter
from overspill.cli.chosen import choose
from overspill.cli.common import (
    CliError,
    add_json,
    add_tiers,
    add_update,
    model_folder,
    model_of_config,
    path_of,
    positive,
    quiet_transformers,
)
from overspill.cli.device import planned_line
from overspill.cli.settings import default_text
from overspill.config import Budget
from overspill.plan import Plan

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


USAGE = """overspill plan --model DIR --host-budget SIZE [--nvme DIR ...] [OPTIONS]
       overspill plan --model DIR --config FILE [OPTIONS]
       overspill plan (--parameters N | --model FILE) --host SIZE --tflops X [OPTIONS]

examples:
  overspill plan --model ./smollm2 --host-budget 600MiB --nvme /mnt/disk
  overspill plan --parameters 70B --host 128GiB --device 24GiB --link 25GB/s --disk 6GB/s --tflops 300
  overspill plan --model ./llama/config.json --host 2TiB --device 80GiB --tflops 400 \\
      --ranks 512 --per-machine 8 --network 200Gb/s --table --plot plan.png
  overspill plan --parameters 1B --measure    # this machine, measured for some seconds"""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=path_of, metavar="DIR", help="Hugging Face folder, or a config.json without weights"
    )
    add_tiers(parser)
    parser.add_argument("--accumulate", type=positive, metavar="N", help="micro-batches a step (default 1)")
    parser.add_argument(
        "--vertical",
        action=argparse.BooleanOptionalAction,
        help="with --accumulate: micro-batches pass each layer together",
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="plan for overspill train --compile, which needs memory for all weights of a block at once",
    )
    add_update(parser)
    add_adapter(parser)
    parser.add_argument("--dtype", choices=DTYPES, help=f"what forward computes in {default_text('dtype')}")
    parser.add_argument(
        "--keep", type=positive, metavar="N", help=f"checkpoints that are kept {default_text('keep')}"
    )
    parser.add_argument(
        "--out",
        type=path_of,
        metavar="DIR",
        help="folder of the run (default: the first --nvme, else the current folder)",
    )
    imagined.options(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if imagined.wanted(args):
        return imagined.run(args)
    if args.model is None:
        raise CliError(
            "--model is missing: give a Hugging Face folder, or --parameters 7B for a model that is not here"
        )
    folder = model_folder(args.model)
    chosen = choose(vars(args), required=False)
    check_adapter(chosen)
    config = chosen.config
    device = planned_line(config.engine.device, config.budget.device)
    quiet_transformers()
    made = plan(adapted(empty_model(folder, chosen.settings.dtype), chosen.settings), config)
    planned = room.planned(
        made.as_dict(),
        config.budget.nvme,
        args.model,
        args.out,
        chosen.settings.keep,
        config.engine.train_after_save,
    )
    disks = planned.lines() + _wear(made, config.budget)
    if args.json:
        print(json.dumps({"device": device, "notes": chosen.notes, "disks": disks, **made.as_dict()}))
    else:
        print("\n".join([*chosen.notes, device]))
        print(made, end="")
        for line in disks:
            print(f"  {line}")
    planned.check()
    return 0


def _wear(made: Plan, budget: Budget) -> list[str]:
    """What the planned steps do to the disks."""
    from overspill import _core

    drives = {folder: _core.drives(folder) for folder in budget.nvme}
    return wear.planned(made.nvme_written_bytes_per_step, drives, budget.endurance_tbw)


def plan(model, config) -> Plan:
    """Of a model, whose weights are not looked at. Raises ConfigError, BudgetError."""
    from overspill import _core
    from overspill.estimate.step import described

    settings, _, units = described(model, config)
    return Plan.of(_core.plan(units, settings.to_core(_core)))


def empty_model(folder: Path, dtype: str):
    """The module tree of a model folder without memory for its parameters, its names and shapes checked against the
    weights.

    Raises CliError or CheckpointError when config and weights are not of one model.
    """
    import torch

    from overspill.pretrained import Folder, empty_causal_lm

    stored = Folder(folder)
    model = model_of_config(folder, lambda: empty_causal_lm(stored, getattr(torch, DTYPES[dtype])))
    _check_shapes(model, stored)
    return model


def _check_shapes(model, folder) -> None:
    """Every tensor whose name the model knows has the shape it expects, and no tensor is left out or made up."""
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for name in expected.keys() & folder.tensors.keys():
        if expected[name] != folder.tensors[name].shape:
            raise CliError(
                f"{folder.path}: {name} has shape {list(folder.tensors[name].shape)} in the weights and "
                f"{list(expected[name])} by config.json; they are of two models: fetch both again"
            )
    folder.check_names(model)
