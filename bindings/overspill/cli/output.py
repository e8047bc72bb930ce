"""What a run says. It never ends because nobody can be told: stdout and stderr may lie on a disk that fills, or be a
pipe whose reader has ended, and the steps since the last save are worth more than a line."""

import atexit
import contextlib
import os
import sys

_unheard: set[str] = set()  # streams that have refused a line


def say(text: str) -> None:
    """A line on stdout."""
    _print(text, "stdout")


def warn(text: str) -> None:
    """A line on stderr."""
    _print(text, "stderr")


# All of C0 and C1 but tab and line feed: a terminal obeys them.
_CONTROLS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {0x09, 0x0A})


def harmless(text: str) -> str:
    """What a model wrote, without the characters by which a text can command a terminal."""
    return text.translate(_CONTROLS)


def _print(text: str, name: str) -> None:
    try:
        print(text, file=getattr(sys, name), flush=True)
    except (OSError, ValueError) as error:  # ValueError: closed, or of an encoding that lacks a letter
        refused(name, error)


def refused(name: str, error: Exception) -> None:
    """Takes note that the stream `name` did not take a line. The next ones are tried again: room may come back."""
    if not _unheard:
        atexit.register(_give_up)
    if name in _unheard:
        return
    _unheard.add(name)
    if name == "stdout":
        reason = error.strerror if isinstance(error, OSError) else error
        warn(f"overspill: stdout takes no lines ({reason}): the run goes on, and log.jsonl has its steps")


def _give_up() -> None:
    """Drops what was never taken: at its end Python would write it once more, fail, and change the exit code."""
    for name in _unheard:
        stream = getattr(sys, name)
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except ValueError:  # closed
            pass
