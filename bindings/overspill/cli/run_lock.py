"""One process a run folder: two that train into one would delete each other's checkpoints."""

import errno
import fcntl
import os
import socket
import sys
from pathlib import Path

from overspill.cli.common import CliError

UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class RunLock:
    """Held from construction to `close`, or until the process ends. Raises CliError naming the process that has it.

    The file stays, empty when nobody holds the lock: to remove it would let two processes lock two files of one name.
    """

    NAME = "lock"

    def __init__(self, folder: Path):
        path = folder / self.NAME
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._take(folder, path)
        except BaseException:
            os.close(self._handle)
            raise

    def _take(self, folder: Path, path: Path) -> None:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = path.read_text().strip() or "another process"
            raise CliError(
                f"--out {folder} is in use by {holder}; wait until it ends, or name another folder"
            ) from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            print(
                f"overspill: {path} cannot be locked ({error.strerror}), so nothing stops a second process "
                "from training "
                "into this folder at the same time: start only one",
                file=sys.stderr,
            )
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def close(self) -> None:
        os.ftruncate(self._handle, 0)
        os.close(self._handle)
