"""The command `overspill`. Each of its commands is a file of this folder."""

import argparse
import importlib
import os
import sys
import traceback
from pathlib import Path

from overspill import __version__
from overspill.cli.common import CliError, describe
from overspill.cli.completion import add_completion
from overspill.cli.output import warn

COMMANDS = (
    "init",
    "doctor",
    "plan",
    "train",
    "top",
    "timeline",
    "verify",
    "checkpoint",
    "merge",
    "export",
    "generate",
    "chat",
    "serve",
    "evaluate",
    "config",
)

EXAMPLES = """examples:
  overspill init --nvme /mnt/disk
  overspill doctor --nvme /mnt/disk
  overspill plan --model ./smollm2 --host-budget 600MiB --nvme /mnt/disk
  overspill train --model ./smollm2 --data ./texts --host-budget 600MiB --nvme /mnt/disk --out runs/first --steps 40
  overspill train --out runs/first --resume
  overspill top runs/first
  overspill timeline runs/first
  overspill verify runs/first/checkpoints/step-000040
  overspill checkpoint ls runs/first
  overspill merge runs/first/checkpoints/step-000040 ./tuned --dtype bf16
  overspill export ./tuned tuned.gguf --type q8_0
  overspill generate --model ./tuned --prompt "def "
  overspill chat --model ./tuned
  overspill serve --model ./tuned
  overspill evaluate --model ./tuned --against ./smollm2 --text heldout.txt
"""


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = argparse.ArgumentParser(
        prog="overspill",
        description="Train models larger than the device: weights, gradients and optimizer states over RAM and NVMe.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"overspill {__version__}")
    top.add_argument("--debug", action="store_true", help="show where an error comes from")
    add_completion(top)
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"overspill.cli.{name}")
        summary = module.__doc__.splitlines()[0]
        sub = commands.add_parser(
            name,
            help=summary,
            description=module.__doc__,
            usage=getattr(module, "USAGE", None),  # where argparse cannot know what is required
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        module.options(sub)
        sub.set_defaults(run=module.run)
    return top


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit code. Errors are a message on stderr and a code that is not 0."""
    os.environ.setdefault(
        "HF_HUB_OFFLINE", "1"
    )  # models are folders here; a wrong name must not become a download
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return _run(parser().parse_args(argv))
    except KeyboardInterrupt:
        warn("overspill: stopped")
        return 130


def _run(args: argparse.Namespace) -> int:
    try:
        _check_paths(args)
        return args.run(args) or 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        known = isinstance(error, CliError)
        hint = "" if known or args.debug else describe(error).hint
        warn(f"overspill {args.command}: error: {describe(error).text}{hint}")
        return 1


def _check_paths(args: argparse.Namespace) -> None:
    """Raises CliError for one that is not UTF-8: the core and run.json cannot hold it. A prompt is no path, and
    `generate` checks it."""
    for name, value in vars(args).items():
        texts = value if isinstance(value, list) else [value]
        foreign = [text for text in texts if isinstance(text, (str, Path)) and not _is_utf8(str(text))]
        if foreign and name != "prompt":
            raise CliError(f"{name} {str(foreign[0])!a} is not UTF-8; rename the file or folder")


def _is_utf8(text: str) -> bool:
    """Bytes that are not UTF-8 come as lone surrogates."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


if __name__ == "__main__":
    sys.exit(main())
