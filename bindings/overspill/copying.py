"""A checkpoint goes to another folder, on any file system: copied or moved. Only what it consists of goes: of a slab
that is shared with a run the bytes that the manifest names.

A copy is made under the name TARGET.copying, and gets its own when all of it is durable. What a copy that was cut off
left there is compared with its checksums, and goes into the next copy to the same target."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from . import _core, durable, folders, lora, saves, tensor_file
from .folders import FolderError
from .model_files import copy_saved_small_files

Progress = Callable[[int, int], None]
_UNFINISHED = ".copying"


class Copied(NamedTuple):
    """What a copy came to: bytes of weights and states in all, and how many of these an earlier one had left."""

    bytes: int
    kept: int


def unfinished(target: Path) -> Path:
    """Where a copy to `target` is made."""
    return target.with_name(target.name + _UNFINISHED)


def copy(source: Path, target: Path, progress: Progress | None = None) -> Copied:
    """Copies a checkpoint. Every byte of weights and states is compared with its checksum on the way.

    Args:
        source: a complete checkpoint
        target: a new name, or an empty folder
        progress: called with (bytes done, bytes in all) as weights and states are copied

    Raises:
        CheckpointError: `source` is damaged, or there is no room
        FolderError: `target` is there, or `source` is about to be removed
        OSError: a disk fails
    """
    _check(source, target)
    with saves.reading(source):
        return _copy(source, target, progress)


def move(source: Path, target: Path, progress: Progress | None = None) -> Copied | None:
    """Moves a checkpoint: renames it where both are on one file system (then None is returned), else copies it, reads
    the copy back from its disk, and removes `source`. Arguments and errors as of `copy`; FolderError also where
    `source` holds something that Overspill did not write."""
    _check(source, target)
    if foreign := saves.strange(source):
        raise FolderError(
            f"overspill: {source} is not moved: {foreign}, which Overspill did not write; move that away first, or "
            "copy the checkpoint, which leaves it where it is"
        )
    with saves.alone(source):
        if _rename(source, target):
            return None
        copied = _copy(source, target, progress)
        tensor_file.verify(target, progress)
        saves.note_verified(target)
        # Beyond this point the copy is whole on its disk.
        saves.remove_held(source)
        durable.sync_folder(source.absolute().parent)
    return copied


def _check(source: Path, target: Path) -> None:
    if source.is_symlink() or not source.is_dir():
        kind = "a symbolic link" if source.is_symlink() else "no folder"
        raise FolderError(f"overspill: checkpoint {source} is {kind}; name the folder that training saved")
    if not saves.is_complete(source):
        raise FolderError(
            f"overspill: {source} has no {saves.MANIFEST}, so it is no complete checkpoint; name one that "
            "`overspill checkpoint ls` lists as whole"
        )
    folders.check_empty(target)
    here, there = source.resolve(), target.resolve()
    if here == there or here in there.parents:
        raise FolderError(f"overspill: {target} lies in {source} itself; name another folder")


def _rename(source: Path, target: Path) -> bool:
    """Whether one file system has both, so that a new name is all that is needed."""
    durable.make_folders(target.absolute().parent)
    try:
        source.rename(target)
    except OSError as error:
        if error.errno == errno.EXDEV:
            return False
        raise
    for parent in {source.absolute().parent, target.absolute().parent}:
        durable.sync_folder(parent)
    _core.note_owner(target.absolute())
    return True


def _copy(source: Path, target: Path, progress: Progress | None) -> Copied:
    part = unfinished(target)
    durable.make_folders(part.absolute().parent)
    new = not os.path.lexists(part)
    if new:
        part.mkdir()
    elif foreign := "it is a symbolic link" if part.is_symlink() else saves.strange(part):
        raise FolderError(
            f"overspill: {part} is no copy that was cut off: {foreign}; move it away, or name another target"
        )
    with saves.alone(part):
        begun: list[int] = []
        try:
            copied = _fill(source, part, begun, progress)
            durable.rename_folder(part, target)
        except BaseException:
            if new and not begun:
                saves.remove_held(part)
            raise
    return copied


def _fill(source: Path, part: Path, begun: list[int], progress: Progress | None) -> Copied:
    """`begun` is no longer empty when there is something that the next copy can use."""

    def counted(done: int, total: int) -> None:
        begun[:] = [done]
        if progress is not None:
            progress(done, total)

    (part / saves.MANIFEST).unlink(missing_ok=True)
    for name in ("hf", lora.FOLDER):
        shutil.rmtree(part / name, ignore_errors=True)
        if (source / name).is_dir():
            (part / name).mkdir()
    if (source / "hf").is_dir():
        copy_saved_small_files(source / "hf", part / "hf")
    if (source / lora.FOLDER).is_dir():
        for name in lora.FILES:
            _copy_file(source / lora.FOLDER, name, part / lora.FOLDER)
    own = tensor_file.entries_of(_core.manifest(source)["extra_json"], source)
    _remove_others(part, own is not None)
    if own is not None:
        _copy_own_states(source, part, own, begun)
    copied = _core.copy_checkpoint(source, part, counted)
    for stale in part.glob("extents-*"):  # of an earlier copy, of a checkpoint with more files
        if stale.name not in {f"extents-{number}.bin" for number in range(copied["files"])}:
            stale.unlink()
    saved = os.lstat(source / saves.MANIFEST)
    os.utime(part / saves.MANIFEST, ns=(saved.st_atime_ns, saved.st_mtime_ns))  # its age is the checkpoint's
    return Copied(copied["bytes"], copied["kept"])


def _remove_others(part: Path, has_own_states: bool) -> None:
    """What an earlier copy, perhaps of another checkpoint, left and this one neither has nor can use."""
    for item in part.iterdir():
        own = has_own_states and item.name == _core.OWN_STATES_FILE
        if item.is_file() and not own and not item.name.startswith("extents-"):
            item.unlink()


def _copy_own_states(source: Path, part: Path, own: list[tensor_file.Entry], begun: list[int]) -> None:
    if (part / _core.OWN_STATES_FILE).exists():
        try:
            _verify_own_states(part, own)
            return
        except _core.CheckpointError:
            pass  # of another checkpoint
    begun.append(0)
    _verify_own_states(source, own)
    _copy_file(source, _core.OWN_STATES_FILE, part)
    _verify_own_states(part, own)


def _verify_own_states(checkpoint: Path, own: list[tensor_file.Entry]) -> None:
    with tensor_file.Reader(checkpoint / _core.OWN_STATES_FILE, own) as reader:
        for _ in reader.verify():
            pass


def _copy_file(source: Path, name: str, target: Path) -> None:
    """From a checkpoint's folder, which anybody may have made: no link, nothing that can hang."""
    try:
        folder = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise _core.CheckpointError(
            f"overspill: {source / name}: {error.strerror}; the checkpoint is damaged, use another one"
        ) from None
    with os.fdopen(opened, "rb") as file:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise _core.CheckpointError(
                f"overspill: {source / name} is no regular file; use another checkpoint"
            )
        with durable.new_file(target / name) as out:
            shutil.copyfileobj(file, out, 4 << 20)
