"""The folder of one checkpoint: whether it is complete, locks on it, renaming and removing it, its size on the disk,
and when its bytes were last verified."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from . import _core, durable, lora
from .folders import FolderError
from .model_files import not_of_a_model

FOLDERS = re.compile(r"rank\d+|(hf|adapter)(\.part)?")  # in one that a save writes
MANIFEST = "manifest.json"  # the last that a save writes, the first that a removal takes
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)  # NFS: of a folder
_RECORD = "user.overspill.verified"
_RECORD_BYTES = 4096  # of any attribute that is read


def is_complete(path: Path) -> bool:
    """Raises OSError if that cannot be found out: a folder that cannot be read does not count as absent."""
    try:
        return stat.S_ISREG(os.stat(path / MANIFEST).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def rename_aside(path: Path, why: str) -> Path:
    """Gives `path` a free name that begins with its own and says why, durably, and returns it."""
    number = 1
    while os.path.lexists(target := path.with_name(f"{path.name}.{why}-{number}")):
        number += 1
    path.rename(target)
    durable.sync_folder(path.parent)
    _core.note_owner(target.absolute())
    return target


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Keeps others from moving and removing a checkpoint. Raises FolderError where one does."""
    with _locked(path, fcntl.LOCK_SH):
        yield


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Locks others out of a checkpoint, or of a folder that will become one. Raises FolderError while a save, a copy or
    a load uses it."""
    with _locked(path, fcntl.LOCK_EX):
        yield


@contextlib.contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    """A file system without locks of folders lets everyone in."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise FolderError(
            f"overspill: {path} is in use: it is saved, loaded, copied, moved or removed just now; wait until that ends"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(handle)
            raise
    try:
        yield
    finally:
        os.close(handle)


def remove_all(paths: list[Path]) -> None:
    """Raises FolderError, when all others are removed, for those that stay."""
    stay = []
    for path in paths:
        try:
            remove(path)
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            stay.append(f"{path} cannot be removed: {where}{error.strerror or error}")
        except FolderError as error:
            stay.append(str(error).removeprefix("overspill: "))
    if stay:
        raise FolderError("overspill: " + "; ".join(stay))


def remove(path: Path) -> None:
    """Removes a checkpoint, the manifest first: an interrupted removal leaves nothing that looks like a checkpoint. For
    a link it removes only the link. Raises FolderError, with nothing removed, if the folder holds anything that
    Overspill did not write, or is in use."""
    if path.is_symlink():
        path.unlink()
        return
    if foreign := strange(path):
        raise FolderError(
            f"overspill: {path} is not removed: {foreign}, which Overspill did not write; move it away first"
        )
    with alone(path):
        remove_held(path)


def remove_held(path: Path) -> None:
    """The same for a folder that the caller has locked (`alone`) and in which `strange` found nothing."""
    (path / MANIFEST).unlink(missing_ok=True)
    durable.sync_folder(path)
    if stay := remove_parts(path):
        raise FolderError(
            f"overspill: {path} is no checkpoint any more, and its part {stay[0]} cannot be removed: it holds files "
            "that Overspill did not write, or may not be changed; move them away, and remove it again"
        )
    shutil.rmtree(path)


def remove_parts(path: Path) -> list[Path]:
    """Removes a checkpoint's parts on other disks, while its folder, or a rank's in a save that was cut off, says where
    they are. Returns those that could not be removed."""
    ranks = [rank for rank in path.glob("rank*/") if not rank.is_symlink()]
    return [Path(part) for folder in (path, *ranks) for part in _core.remove_parts(folder)]


def strange(path: Path) -> str:
    """Describes the files in a checkpoint's folder that Overspill did not write; empty if there are none."""
    if not path.is_dir():
        return "it is a file"
    for item in path.iterdir():
        folder = item.is_dir() and not item.is_symlink()
        name = item.name if folder else durable.target_of(item.name)
        ours = FOLDERS.fullmatch(name) if folder else _core.is_file_of_a_save(name)
        if not ours:
            return f"it holds {item.name}"
        if folder and item.name.startswith("rank") and (deeper := strange(item)):
            return f"{deeper} in {item.name}"
        if folder and item.name.startswith("hf") and (others := not_of_a_model(item)):
            return f"it holds {item.name}/{others[0]}"
        adapter = folder and item.name.startswith(lora.FOLDER)
        if adapter and (others := lora.strange_files(item)):
            return f"it holds {item.name}/{others[0]}"
    return ""


# --- what it takes of the disk ------------------------------------------------------------------------------------


class DiskUse(NamedTuple):
    """Bytes on the disk. `alone` come back when the folder is removed; `shared` have other names, or belong to other
    files too (reflinks, snapshots)."""

    alone: int
    shared: int


def disk_bytes(folders: list[Path]) -> int:
    """What the files below these folders take of the disk; a file with several names there counts once. What cannot be
    looked at, or is deleted meanwhile, counts as nothing."""
    files = {}
    for path in _files(with_parts(folders)):
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            files[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(files.values())


def with_parts(folders: list[Path]) -> list[Path]:
    """The folders, and their parts on other file systems."""
    return [*folders, *(part for folder in folders for part in _core.parts_of(folder))]


def lacks_parts(path: Path) -> bool:
    """Whether it has parts on other file systems that are not there: their disk may not be mounted."""
    return len(list(path.glob("part-*.txt"))) > len(_core.parts_of(path))


def disk_use(folder: Path) -> DiskUse:
    """As `disk_bytes`, of one folder."""
    names: dict[tuple[int, int], list[str]] = {}
    for path in _files(with_parts([folder])):
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            names.setdefault((status.st_dev, status.st_ino), []).append(path)
    alone = shared = 0
    for paths in names.values():
        with contextlib.suppress(OSError):
            status = os.lstat(paths[0])
            taken = status.st_blocks * 512
            ours = status.st_nlink <= len(paths)
            theirs = (
                min(taken, _reflinked(paths[0]))
                if ours and stat.S_ISREG(status.st_mode)
                else taken * (not ours)
            )
            alone, shared = alone + taken - theirs, shared + theirs
    return DiskUse(alone, shared)


def _files(folders: list[Path]) -> Iterator[str]:
    for folder in folders:
        for parent, _, names in os.walk(folder):  # leaves out a folder that it cannot list
            yield from (os.path.join(parent, name) for name in names)


# linux/fiemap.h
_FIEMAP = 0xC020660B
_HEAD, _EXTENT = struct.Struct("=QQLLLL"), struct.Struct("=QQQQQLLLL")
_LAST, _SHARED = 0x1, 0x2000
_EXTENTS = 128  # asked for at a time


def _reflinked(path: str) -> int:
    """Bytes of a file that belong to other files too; 0 where the file system does not tell."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found, begin, last = 0, 0, False
        while not last:
            room = bytearray(_HEAD.size + _EXTENTS * _EXTENT.size)
            _HEAD.pack_into(room, 0, begin, 2**64 - 1 - begin, 0, 0, _EXTENTS, 0)
            fcntl.ioctl(handle, _FIEMAP, room)
            mapped = _HEAD.unpack_from(room)[3]
            last = mapped == 0
            for number in range(mapped):
                at, _, length, *_, flags, _, _, _ = _EXTENT.unpack_from(
                    room, _HEAD.size + number * _EXTENT.size
                )
                found += length if flags & _SHARED else 0
                begin, last = at + length, bool(flags & _LAST)
        return found
    except OSError:
        return 0
    finally:
        os.close(handle)


# --- when it was found whole --------------------------------------------------------------------------------------


def note_verified(path: Path) -> bool:
    """Notes, in an extended attribute of the manifest, that every byte was read and fits. False where the file system
    or its rights take no note."""
    try:
        record = _identity(path) | {"at": int(time.time())}
        os.setxattr(path / MANIFEST, _RECORD, json.dumps(record).encode(), follow_symlinks=False)
    except OSError:
        return False
    return True


def verified_at(path: Path) -> int | None:
    """When `note_verified` made its note, in seconds since 1970. None if there is no note, or if it was made for
    another file: a copy is not verified only because its source is."""
    try:
        text = os.getxattr(path / MANIFEST, _RECORD, follow_symlinks=False)
        record = json.loads(text) if len(text) <= _RECORD_BYTES else None
        identity = _identity(path)
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(at := record.get("at")) is not int:
        return None
    return at if identity == {key: record.get(key) for key in identity} else None


def _identity(path: Path) -> dict[str, int]:
    status = os.lstat(path / MANIFEST)
    return {"inode": status.st_ino, "modified_ns": status.st_mtime_ns, "bytes": status.st_size}
