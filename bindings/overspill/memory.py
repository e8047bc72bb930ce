"""Memory of this process, and of the machine, as the kernel counts it."""

from pathlib import Path


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}; this kernel does not count it")


def available_bytes() -> int:
    """Of the machine's memory, what processes can have without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable; this kernel does not count it")


def free_bytes(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """What this process can have: of the machine's memory, and of each memory cgroup that limits it (v2: memory.max,
    v1: memory.limit_in_bytes). File pages that the kernel can drop count as free."""
    free = available_bytes()
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version = _V1 if controllers else _V2
        folder = (cgroups / "memory" if controllers else cgroups) / path.lstrip("/")
        while folder != cgroups.parent:
            left = _left_of(folder, *version)
            free = free if left is None else min(free, left)
            folder = folder.parent
    return max(free, 0)


# The limit's file, the usage's, and the line of memory.stat that counts file pages that the kernel can drop.
_V2 = "memory.max", "memory.current", "inactive_file"
_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"


def _left_of(folder: Path, limit: str, usage: str, droppable: str) -> int | None:
    try:
        most = (folder / limit).read_text().strip()
        used = int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None  # no limit is told here
    return None if most == "max" else int(most) - used + int(stat.get(droppable, 0))


def rss_bytes() -> int:
    """Resident bytes now."""
    return _status_bytes("VmRSS")


def own_bytes() -> int:
    """Resident bytes now, but for those of files, which the kernel can take back."""
    return _status_bytes("RssAnon") + _status_bytes("RssShmem")


def left_of(limit: int) -> int:
    """Of `limit` bytes for the whole process, what is left beside what it holds already: its resident bytes but for
    those of files, which the kernel can take back. At least 0."""
    return max(0, limit - _status_bytes("RssAnon"))


def peak_rss_bytes() -> int:
    """Most resident bytes since the process started, or since `reset_peak_rss` returned True."""
    return _status_bytes("VmHWM")


def reset_peak_rss() -> bool:
    """Lets the peak start again from what is resident now; False where the kernel does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5\n")
    except OSError:
        return False
    return True


def human(count: float) -> str:
    """Bytes for people: 629145600 -> '600.0 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")
