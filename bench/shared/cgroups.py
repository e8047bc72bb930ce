"""Memory cgroups in which contenders run: real limits."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

MEMORY = Path("/sys/fs/cgroup/memory")


class Missing(Exception):
    """What cannot be run here; the message says why."""


@contextlib.contextmanager
def cgroup(name: str, limit: int) -> Iterator[Path]:
    """A memory cgroup of so many bytes; raises Missing where none can be made."""
    group = MEMORY / f"overspill-bench-{os.getpid()}-{name}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit))
    except OSError as error:
        raise Missing(f"no memory cgroup can be made here (root and cgroup v1 are needed): {error}") from None
    try:
        yield group
    finally:
        group.rmdir()


def inside(group: Path | None, command: list[str]) -> list[str]:
    """The command, which moves into the group before it becomes the contender."""
    if group is None:
        return command
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command]


def peak_bytes(group: Path) -> int:
    """The most that the kernel has charged to it, file pages included."""
    return int((group / "memory.max_usage_in_bytes").read_text())
