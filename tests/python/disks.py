"""Small file systems for tests that need a full disk, or several of them. Needs root."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


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


def lies_in_a_file(tensor: torch.Tensor) -> bool:
    """Whether its memory is the page cache of a file on a disk."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, device, *_ = line.split(maxsplit=5)
        begin, end = (int(address, 16) for address in place.split("-"))
        if begin <= tensor.data_ptr() < end:
            return rights.endswith("s") and not device.startswith("00:")
    return False
