"""How fast disks wear out at the rate at which they are written. What nobody knows is said to be unknown."""

from collections.abc import Mapping
from typing import Any

TB = 1e12  # as makers rate endurance
DAY_SECONDS = 86400


def endurance(drive: Mapping[str, Any], rated_tb: float | None) -> tuple[float, str] | None:
    """Bytes a drive may be written over its life, and who says so: a given rating goes before its own counters."""
    if rated_tb:
        return rated_tb * TB, "as given"
    used, written = drive["percentage_used"], drive["written_bytes"]
    if used and written:
        return written * 100 / used, "by the drive's own counters"
    return None


def describe(drive: Mapping[str, Any], rated_tb: float | None) -> str:
    """One drive's state, e.g. "nvme0n1: 12% used, 30 TB written; endurance 250 TB (by the drive's own counters)"."""
    if drive["percentage_used"] is None:
        state = f"wear unknown ({drive['unknown']})"
    else:
        state = f"{drive['percentage_used']}% used, {_tb(drive['written_bytes'])} written"
    rated = endurance(drive, rated_tb)
    return f"{drive['name']}: {state}; endurance {f'{_tb(rated[0])} ({rated[1]})' if rated else 'unknown'}"


def at_rate(
    written: Mapping[str, int], seconds: float, drives: Mapping[str, list[dict]], rated_tb: float | None
) -> list[str]:
    """A line for each path that was written: what it comes to a day, and how long its drives last at that.

    `written` are bytes by path, over `seconds`; `drives` by path, as _core.drives gives them.
    """
    lines = []
    for path, count in written.items():
        if not count or seconds <= 0:
            continue
        a_day = count / seconds * DAY_SECONDS
        lines.append(
            f"{path}: written at {_tb(a_day)} a day; {_lasts(drives[path], rated_tb, a_day, 'days')}"
        )
    return lines


def planned(bytes_a_step: int, drives: Mapping[str, list[dict]], rated_tb: float | None) -> list[str]:
    """A line for each path: what a thousand steps write there, were the paths equally fast."""
    if not bytes_a_step or not drives:
        return []
    count = bytes_a_step / len(drives)
    return [
        f"{path}: {_tb(count * 1000)} written in 1000 steps; {_lasts(below, rated_tb, count, 'steps')}"
        for path, below in drives.items()
    ]


def _lasts(drives: list[dict], rated_tb: float | None, count: float, unit: str) -> str:
    """For how many units of `count` bytes the drives last. Several below one path are taken to share evenly."""
    known = [(d, endurance(d, rated_tb)) for d in drives] if drives else []
    if rated_tb and not drives:
        known = [({"percentage_used": None}, (rated_tb * TB, "as given"))]
    left = [rated[0] * (1 - (d["percentage_used"] or 0) / 100) for d, rated in known if rated]
    if not left or len(left) < len(known):
        return "endurance unknown (give --endurance-tbw, the drive's rating)"
    total = min(left) * len(left)
    if total <= 0:
        return "the drive is past its rated endurance"
    return f"{_tb(total)} of endurance left: {total / count:.3g} {unit}"


def _tb(count: float) -> str:
    return f"{count / TB:.3g} TB"
