"""Completion of commands, options and paths in a shell, by shtab where it is installed."""

import argparse
from typing import Any

from overspill.cli.output import warn
from overspill.extras import MissingExtra, need

SHELLS = ("bash", "zsh", "tcsh")


def add_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--print-completion",
        action=_Print,
        choices=SHELLS,
        help="print what completes this command in a shell (pip install 'overspill[cli]'), e.g. for bash: "
        "overspill --print-completion bash > ~/.local/share/bash-completion/completions/overspill",
    )


class _Print(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, shell: Any, option: str | None = None
    ) -> None:
        try:
            shtab = need("shtab")
        except MissingExtra as error:
            warn(str(error))
            parser.exit(1)
        _complete_paths(parser, shtab.FILE, shtab.DIRECTORY)
        print(shtab.complete(parser, shell=shell))
        parser.exit(0)


def _complete_paths(parser: argparse.ArgumentParser, file: Any, folder: Any) -> None:
    """By what an option calls its value."""
    kinds = {"DIR": folder, "CHECKPOINT": folder, "OUT": folder, "FILE": file, "PATH": file}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _complete_paths(each, file, folder)
        elif isinstance(action.metavar, str) and action.metavar in kinds:
            action.complete = kinds[action.metavar]  # type: ignore[attr-defined]
