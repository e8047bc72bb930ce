"""`overspill checkpoint export`."""

import argparse

from overspill import dcp_folder
from overspill.cli import progress
from overspill.cli.common import path_of, sigterm_ends
from overspill.cli.output import say
from overspill.memory import human


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=path_of, metavar="CHECKPOINT", help="the one to take")
    parser.add_argument("folder", type=path_of, metavar="FOLDER", help="a new name, or an empty folder")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16"), default="fp32", help="of weights; states are fp32 (default fp32)"
    )
    parser.add_argument(
        "--model-key",
        default="model",
        metavar="KEY",
        help="what the script calls the model's state dict; '' for none (default model)",
    )
    parser.add_argument(
        "--optimizer-key",
        default="optim",
        metavar="KEY",
        help="what the script calls the optimizer's state dict (default optim)",
    )


def run(args: argparse.Namespace) -> int:
    with sigterm_ends():
        done = dcp_folder.export_dcp(
            args.checkpoint,
            args.folder,
            dtype=args.dtype,
            model=args.model_key,
            optimizer=args.optimizer_key,
            progress=progress.on_terminal("export"),
        )
    say(
        f"{args.folder}: {done.tensors} tensors, {human(done.bytes)}; torch.distributed.checkpoint.load opens it"
    )
    return 0
