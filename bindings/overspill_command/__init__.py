"""The command `overspill`, as it is started. A package of its own: whoever imports a part of `overspill` imports torch
first, which takes seconds, and in them Ctrl-C would be a traceback through other people's files."""

import os
import signal
from types import FrameType


def main() -> int:
    """Runs the command; returns its exit code."""
    before = signal.getsignal(signal.SIGINT)
    if (
        before is signal.default_int_handler
    ):  # else it is ignored, as of what a shell starts in the background
        signal.signal(signal.SIGINT, _end)
    from overspill.cli import main as command

    signal.signal(signal.SIGINT, before)
    return command()


def _end(number: int, frame: FrameType | None) -> None:
    """Nothing has begun. An exception would not do: extension modules turn one into an ImportError of their own."""
    os.write(2, b"overspill: stopped\n")
    os._exit(130)
