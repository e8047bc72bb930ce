"""Read every byte of a checkpoint and compare it with its checksum.

Exit code 0 and one line for a checkpoint that is whole; else 1, and an error that names the file and the place. Nothing
is changed. Memory: a few MiB.
"""

import argparse
import json

from overspill.cli.common import CliError, add_json, path_of
from overspill.cli.progress import on_terminal
from overspill.memory import human


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", type=path_of, metavar="CHECKPOINT", help="e.g. runs/first/checkpoints/step-000040"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from overspill import tensor_file

    if not args.checkpoint.is_dir():
        raise CliError(
            f"checkpoint {args.checkpoint} is no folder; give a folder that training saved, e.g. OUT/checkpoints/step-…"
        )
    counted = tensor_file.verify(args.checkpoint, on_terminal("verify"))
    if args.json:
        print(json.dumps({"checkpoint": str(args.checkpoint), "whole": True, **counted}))
        return 0
    print(
        f"{args.checkpoint}: whole: step {counted['step']}, {counted['parameters']} parameters, "
        f"{human(counted['bytes'])} in {counted['files']} files"
    )
    return 0
