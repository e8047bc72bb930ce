"""Files and folders that a power cut leaves whole: data, fsync, rename, fsync of the folder, in this order.

What is not finished has a random name beside its target (`part_of`), so it never meets a file of somebody else. Every
function raises OSError, which names the path (sync_file: the caller knows it).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_PART = re.compile(r"\.part-[0-9a-f]{8}$")
_CANNOT = (errno.EINVAL, errno.ENOTSUP)  # of a file system on which a folder has no fsync


def part_of(target: Path) -> Path:
    """A name beside `target` that nobody else has: `target.part-` and 8 random digits."""
    return target.with_name(f"{target.name}.part-{secrets.token_hex(4)}")


def target_of(name: str) -> str:
    """The name for which `part_of` gave `name`; any other one as it is."""
    return _PART.sub("", name)


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` durable."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise OSError(error.errno, error.strerror, str(folder)) from None
    finally:
        os.close(file)


def make_folders(folder: Path) -> None:
    """Makes `folder` and the folders above it that are missing, durably."""
    missing = [folder] if not folder.exists() else []
    while missing and not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    folder.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        sync_folder(made.parent)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write. It gets the name `path`, in place of what has it, when the block ends without an exception; else
    it is removed."""
    part = part_of(path)
    try:
        with part.open("xb") as file:
            yield file
            sync_file(file)
        part.replace(path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:  # of a write
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replaces `path`, whole or not at all."""
    with new_file(path) as file:
        file.write(text.encode())


def sync_file(file: BinaryIO) -> None:
    """Makes what was written to `file` durable."""
    file.flush()
    os.fsync(file.fileno())


def rename_folder(part: Path, target: Path) -> None:
    """Gives a folder, whose files are durable, its name: `target` is absent or an empty folder. A name that cannot be
    made durable is taken back, and `target` is as it was; where that fails too, the error says that it is there."""
    sync_folder(part)
    was_there = target.is_dir()
    part.rename(target)
    try:
        sync_folder(target.parent)
    except BaseException as error:
        try:
            target.rename(part)
            if was_there:
                target.mkdir()
        except OSError:
            reason = error.strerror if isinstance(error, OSError) else type(error).__name__
            raise OSError(
                getattr(error, "errno", None) or errno.EIO,
                f"{reason}; {target} is there and whole, but its name may not outlive a power cut",
                str(target.parent),
            ) from error
        raise
