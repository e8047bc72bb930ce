"""The small files of a Hugging Face folder, beside its weights: config, generation config, tokenizer."""

from __future__ import annotations

import errno
import fnmatch
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from . import durable
from ._core import CheckpointError

SMALL_FILES = (
    "*.json",
    "*.jinja",
    "*.txt",
    "*.model",
    "merges*",
    "vocab*",
)  # of a Hugging Face folder, beside weights
SMALL_FILE_BYTES = 256 << 20  # more than the largest tokenizers
OTHER_FOLDER = "name the folder that the model came from (--model DIR; in a script model=DIR)"


def small_files(folder: Path) -> list[Path]:
    """Config, generation config and tokenizer files of a Hugging Face folder.

    Links are followed: a folder of the hub's cache consists of them, and the user named it. Folders, and links that
    lead nowhere, are left out.
    """
    return [folder / name for name in _small(os.listdir(folder)) if (folder / name).is_file()]


def copy_small_files(source: Path, target: Path) -> None:
    """The `small_files` of a Hugging Face folder, durably, into a folder that is there."""
    for path in small_files(source):
        with path.open("rb") as file:
            _copy(file, target / path.name)


def copy_saved_small_files(source: Path, target: Path) -> None:
    """The same from a checkpoint's folder, which anybody may have made. Raises CheckpointError for a link: it could
    lead to any file of the user's, who would hand it on with the merged model."""
    try:
        folder = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if source.is_symlink():
            raise CheckpointError(_link(source)) from None
        raise CheckpointError(f"{source}: {error.strerror}; {OTHER_FOLDER}") from None
    try:
        for name in _small(os.listdir(folder)):
            _copy_saved(folder, name, source, target)
    finally:
        os.close(folder)


def read_saved(source: Path, name: str, most: int) -> bytes:
    """A file of a checkpoint's folder, which anybody may have made: no link, nothing that can hang, at most `most`
    bytes. Raises OSError, or ValueError which says what it is."""
    folder = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    finally:
        os.close(folder)
    with os.fdopen(opened, "rb") as file:
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode) or status.st_size > most:
            raise ValueError(f"it is no file of up to {most} bytes")
        return file.read()


def _copy_saved(folder: int, name: str, source: Path, target: Path) -> None:
    # O_NONBLOCK: a named pipe must not hang the reader.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        opened = os.open(name, flags, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(_link(source / name)) from None
        raise CheckpointError(f"{source / name}: {error.strerror}; {OTHER_FOLDER}") from None
    status = os.fstat(opened)
    if stat.S_ISDIR(status.st_mode):
        os.close(opened)
        return
    with os.fdopen(opened, "rb") as file:
        if not stat.S_ISREG(status.st_mode) or status.st_size > SMALL_FILE_BYTES:
            raise CheckpointError(
                f"{str(source / name)!r} is no file of up to {SMALL_FILE_BYTES} bytes (it has {status.st_size}), so "
                f"it is no configuration and no tokenizer; remove it, or {OTHER_FOLDER}"
            )
        _copy(file, target / name)


def _link(path: Path) -> str:
    return (
        f"{str(path)!r} is a symbolic link, and merge follows none in a checkpoint's hf/, because it would copy what "
        f"the link points to into the merged model; remove the link, or {OTHER_FOLDER}"
    )


def _small(names: Iterable[str]) -> list[str]:
    """Those of SMALL_FILES, but for the indexes of weights."""
    return sorted(n for n in names if _is_small(n) and not n.endswith((".index.json", ".safetensors")))


def _is_small(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in SMALL_FILES)


def not_of_a_model(folder: Path) -> list[str]:
    """Names in a checkpoint's hf/ that neither `copy_small_files` nor that of an earlier version, which copied indexes
    of weights too, can have made."""
    names = sorted(os.listdir(folder))
    return [n for n in names if not _is_small(durable.target_of(n)) or not (folder / n).is_file()]


def _copy(file: BinaryIO, target: Path) -> None:
    with durable.new_file(target) as out:
        shutil.copyfileobj(file, out)
