"""One process a run folder: two that train into one would delete each other's checkpoints."""

import contextlib
import dataclasses
import errno
import fcntl
import os
import socket
import stat
from pathlib import Path

from overspill.cli.common import CliError
from overspill.cli.output import warn

UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
NO_FILE = (
    errno.ELOOP,
    errno.ENXIO,
    errno.EISDIR,
)  # of what os.open below takes for no file: links, sockets, folders
TEXT_BYTES = 512  # more than a lock ever says
# File systems on which one machine alone can work, so that a lock that is free here is free everywhere. Others may
# carry locks between machines or not, and none says which. The same as io/lock_holder.cc has.
OF_ONE_MACHINE = frozenset(
    "ext2 ext3 ext4 xfs btrfs tmpfs ramfs zfs f2fs bcachefs overlay jfs vfat msdos exfat ntfs3".split()
)


@dataclasses.dataclass(frozen=True)
class Holder:
    """Who wrote a lock: two lines, `process PID on HOST` and the kernel's boot id. Earlier versions wrote the first."""

    name: str
    boot: str  # no two running kernels have the same; empty where it is not known
    since: float = 0.0  # when it was written, by the time of day

    MARK = "process "

    @classmethod
    def here(cls) -> "Holder":
        return cls(f"{cls.MARK}{os.getpid()} on {socket.gethostname()}", _boot_id())

    @classmethod
    def parse(cls, text: str) -> "Holder":
        name, _, rest = text.partition("\n")
        return cls("".join(letter if letter.isprintable() else "?" for letter in name), rest.strip())

    @property
    def text(self) -> str:
        return f"{self.name}\n{self.boot}\n"

    @property
    def lives(self) -> bool:
        """Whether a process of its number is there. Only of one on this machine does that say anything."""
        try:
            os.kill(int(self.name.removeprefix(self.MARK).partition(" ")[0]), 0)
        except PermissionError:
            return True
        except (OSError, ValueError, OverflowError):
            return False
        return True

    def on_this_machine(self) -> bool:
        return self.boot != "" and self.boot == _boot_id()


class RunLock:
    """Held from construction to `close`, or until the process ends. Raises CliError naming the process that has it.

    The file stays, empty when nobody holds the lock: to remove it would let two processes lock two files of one name.
    A file of this name that Overspill did not write is refused, and stays as it is.
    """

    NAME = "lock"

    def __init__(self, folder: Path):
        path = folder / self.NAME
        self._handle = _open(path)
        try:
            self._take(folder, path)
        except BaseException:
            os.close(self._handle)
            raise

    def _take(self, folder: Path, path: Path) -> None:
        _require_own(self._handle, path)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = Holder.parse(_text(self._handle)).name or "another process"
            raise CliError(
                f"--out {folder} is in use by {holder}; wait until it ends, or name another folder"
            ) from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            warn(
                f"overspill: {path} cannot be locked ({error.strerror}), so nothing stops a second process "
                "from training "
                "into this folder at the same time: start only one"
            )
        holder = Holder.parse(_text(self._handle))
        if holder.name and not holder.on_this_machine() and not is_of_one_machine(self._handle):
            raise CliError(
                f"--out {folder} was taken by {holder.name}; its lock is free here, but another machine may hold a "
                f"lock on this file system that this one does not see. If that run has ended, remove {path}; else "
                "wait until it ends, or name another folder"
            )
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, Holder.here().text.encode(), 0)

    @classmethod
    def holder(cls, folder: Path) -> Holder | None:
        """Who wrote the lock of `folder`, and did not clear it; None where nobody did. Takes nothing: a process that
        looks must keep none out."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            handle = os.open(folder / cls.NAME, flags)
        except OSError:
            return None
        try:
            status = os.fstat(handle)
            text = _text(handle) if stat.S_ISREG(status.st_mode) else ""
        finally:
            os.close(handle)
        if not text.startswith(Holder.MARK):
            return None
        return dataclasses.replace(Holder.parse(text), since=status.st_mtime)

    def close(self) -> None:
        with contextlib.suppress(
            OSError
        ):  # of a disk that failed: what ended the run is not to be hidden by it
            os.ftruncate(self._handle, 0)
        with contextlib.suppress(OSError):
            os.close(self._handle)


def _open(path: Path) -> int:
    # O_NONBLOCK: whatever else has the name must not hang the command.
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno not in NO_FILE:
            raise
        kind = "a symbolic link" if path.is_symlink() else "no file"
        raise CliError(_refusal(path, f"is {kind}")) from None


def _require_own(handle: int, path: Path) -> None:
    """Raises CliError unless the file is one that a lock may be written into."""
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        raise CliError(_refusal(path, "is no file"))
    if status.st_nlink > 1:
        raise CliError(_refusal(path, f"has {status.st_nlink} names"))
    text = _text(handle)
    if text and not text.startswith(Holder.MARK):
        raise CliError(_refusal(path, "holds something that Overspill did not write"))


def _refusal(path: Path, what: str) -> str:
    return (
        f"{path} {what}, but this is the name of the run's lock, which would overwrite it: move it out of the "
        "folder, or name another folder with --out"
    )


def _text(handle: int) -> str:
    """A power cut may leave zeros in place of what was written last."""
    return os.pread(handle, TEXT_BYTES, 0).decode(errors="replace").strip("\0")


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def is_of_one_machine(handle: int) -> bool:
    """Whether no other machine can work on the open file's file system; False where that is not known."""
    try:
        facts = Path(f"/proc/self/fdinfo/{handle}").read_text().splitlines()
        mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return False
    mount = next((fact.split()[1] for fact in facts if fact.startswith("mnt_id:")), None)
    kinds = {line.split()[0]: line.partition(" - ")[2].split()[0] for line in mounts}
    return kinds.get(mount) in OF_ONE_MACHINE
