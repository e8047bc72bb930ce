"""How much a piece of work makes a process grow."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


@contextlib.contextmanager
def growth() -> Iterator[dict[str, int]]:
    """Fills in `peak`, the most resident bytes during the `with`, and `bytes`, what of it is above those at its
    start."""
    found: dict[str, int] = {}
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _status_bytes("VmRSS")
    yield found
    found["peak"] = _status_bytes("VmHWM")
    found["bytes"] = found["peak"] - before
