"""Token caches that a killed start left unfinished, gigabytes for a large corpus: removed, or named where another
process may be at work on one."""

import fcntl
import os
import re
import stat
import time
from pathlib import Path

from overspill import token_cache
from overspill.cli.output import warn
from overspill.cli.run_lock import is_of_one_machine
from overspill.memory import human

_CACHE = r"[0-9a-f]{32}"
_PART = r"\.part-[0-9a-f]{8}"
LOCKED = re.compile(_CACHE + re.escape(token_cache.SUFFIX) + _PART)  # while it is written
EARLIER = re.compile(f"{_CACHE}({'|'.join(map(re.escape, token_cache.EARLIER))}){_PART}")  # never locked
NEW_SECONDS = 60.0  # a part is made first and locked then


def remove_unfinished(cache: Path) -> None:
    """Removes those of this user that nobody has locked, and names those of which that cannot be known."""
    try:
        names = sorted(os.listdir(cache))
    except OSError:
        return  # who makes the cache says what is wrong
    left = []
    for path in (cache / name for name in names if LOCKED.fullmatch(name) or EARLIER.fullmatch(name)):
        try:
            if not _remove(path):
                left.append(path)
        except OSError:  # gone meanwhile, or somebody else's
            continue
    if left:
        total = sum(path.stat().st_size for path in left if path.exists())
        warn(
            f"overspill: {', '.join(map(str, left))}: left by a start that was killed, or written by one that runs "
            f"now; if none runs, delete what is left ({human(total)})"
        )


def _remove(path: Path) -> bool:
    """False where it stays and may be in vain."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return True
        if time.time() - status.st_mtime < NEW_SECONDS:
            return True
        if EARLIER.fullmatch(path.name):
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True  # it is being written
        except OSError:
            return False
        if not is_of_one_machine(file):  # a process elsewhere may have it, whose lock ends at its machine
            return False
        path.unlink()
        return True
    finally:
        os.close(file)
