"""What must still be there after a power cut: files replaced whole, and names that reached the disk."""

import os
from pathlib import Path


def replace(path: Path, text: str) -> None:
    """Puts `text` at `path`, whole or not at all; durable, its name too, when this returns."""
    part = path.with_name(f"{path.name}.part")
    with part.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_files(folder: Path) -> None:
    """Makes the files that lie directly in `folder`, and their names, durable."""
    for path in folder.iterdir():
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


def make_folder(folder: Path) -> None:
    """Makes `folder` and what is missing above it, their names durable."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def disk_bytes(folders: list[Path]) -> int:
    """What the files below these folders take of the disk; a file with several names there counts once."""
    files = {}
    for folder in folders:
        for path in folder.rglob("*"):
            status = path.lstat()
            files[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(files.values())
