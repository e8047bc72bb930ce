"""Disks and files of make bench-checkpoint."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

COPIED = ("extents-", "resident.bin")  # how the names of a checkpoint's own bytes begin; slabs are links
MEMORY = Path("/dev/shm")


class NoDisk(Exception):
    """The message says why none can be made here."""


@contextlib.contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A folder in there, which goes with all that is in it."""
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=folder) as made:
        yield Path(made)


@contextlib.contextmanager
def loop_disk(folder: Path, size: int) -> Iterator[Path]:
    """An ext4 file system of its own, whose image lies in the folder. Raises NoDisk."""
    if os.geteuid() != 0:
        raise NoDisk("only root mounts loop devices")
    if shutil.disk_usage(folder).free < size:
        raise NoDisk(f"{folder} has no room for an image of {size / 1e9:.1f} GB")
    with scratch(folder) as made:
        image, mounted = made / "image", made / "mounted"
        mounted.mkdir()
        _fill(image, size)
        _run("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(image))
        _run("mount", "-o", "loop", str(image), str(mounted))
        try:
            _without_second_cache(mounted)
            yield mounted
        finally:
            if subprocess.run(
                ["umount", mounted], capture_output=True
            ).returncode:  # somebody is still in there
                subprocess.run(["umount", "-l", mounted], check=True)


def _fill(image: Path, size: int) -> None:
    """Writes all of it: of a sparse file blocks are allocated while the file system in it is written, which no disk
    does."""
    zeros = bytes(8 << 20)
    with image.open("wb", buffering=0) as file:
        for _ in range(0, size, len(zeros)):
            file.write(zeros)
        os.fsync(file.fileno())


def _without_second_cache(mounted: Path) -> None:
    """What passes through the loop device does not stay in the page cache of its image too, where the kernel can."""
    device = subprocess.run(
        ["findmnt", "-no", "SOURCE", mounted], capture_output=True, text=True
    ).stdout.strip()
    subprocess.run(["losetup", "--direct-io=on", device], capture_output=True)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise NoDisk(f"there is no {command[0]}") from None
    except subprocess.CalledProcessError as error:
        raise NoDisk(f"{command[0]}: {error.stderr.strip()}") from None


def files_of(folder: Path) -> list[Path]:
    """In there, at any depth."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in files_of(folder))


def copied_bytes(checkpoint: Path) -> int:
    """Of weights and states that a save wrote, and did not link. A rank's name may come before the file's."""
    return sum(
        path.stat().st_size
        for path in files_of(checkpoint)
        if any(path.name.split("-", 1)[-1].startswith(name) or path.name.startswith(name) for name in COPIED)
    )


def drop_pages(folder: Path) -> None:
    """The next read of these files comes from the disk."""
    for path in files_of(folder):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)  # only clean pages go
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
