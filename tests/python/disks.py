"""Small file systems for tests that need a full disk, or several of them. Needs root."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small(folder: Path, size: str) -> Iterator[Path]:
    """A file system of `size` at `folder`, in memory."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(ballast: Path) -> None:
    """Takes all that is free with one file."""
    with ballast.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while file.write(bytes(1 << 16)):
                pass
        with contextlib.suppress(OSError):
            while file.write(bytes(64)):
                pass
