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


def rss_bytes() -> int:
    """Resident bytes now."""
    return _status_bytes("VmRSS")


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
