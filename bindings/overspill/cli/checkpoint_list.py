"""`overspill checkpoint ls`."""

import argparse
import dataclasses
import json
import os
import time
from pathlib import Path

from overspill import CheckpointError, _core, saves
from overspill.cli.common import CliError
from overspill.cli.output import harmless, say
from overspill.memory import human

UNFINISHED = (".partial", ".copying")  # names of a save and of a copy that are under way, or were cut off
_CHECKPOINTS = "checkpoints"  # in a run's folder


@dataclasses.dataclass(frozen=True)
class Row:
    """A checkpoint, or what was to become one. `step` None: it cannot be read; `state` says why. Times in seconds since
    1970."""

    path: str
    state: str
    step: int | None
    alone_bytes: int
    shared_bytes: int
    saved_at: int | None
    verified_at: int | None


def run(args: argparse.Namespace) -> int:
    rows = [row for folder in args.folders for row in rows_of(folder)]
    if args.json:
        print(json.dumps({"checkpoints": [dataclasses.asdict(row) for row in rows]}))
        return 0
    if not rows:
        say(f"no checkpoint in {', '.join(map(str, args.folders))}")
        return 0
    _print(rows, time.time())
    return 0


def rows_of(folder: Path) -> list[Row]:
    """Oldest step first, behind them what has none. Raises CliError for what is no folder, OSError."""
    if not folder.is_dir():
        raise CliError(
            f"{folder} is no folder; name what train calls --out, or a folder with checkpoints in it"
        )
    if saves.is_complete(folder) or folder.name.endswith(UNFINISHED):
        return [_row(folder)]
    inside = folder / _CHECKPOINTS
    where = inside if inside.is_dir() and not inside.is_symlink() else folder
    found = [path for path in where.iterdir() if path.is_dir() and _is_listed(path)]
    return sorted(map(_row, found), key=lambda row: (row.step is None, row.step or 0, row.path))


def _is_listed(path: Path) -> bool:
    try:
        return saves.is_complete(path) or path.name.endswith(UNFINISHED)
    except OSError:
        return True  # what cannot be looked at is not absent


def _row(path: Path) -> Row:
    state, step = _read(path)
    use = saves.disk_use(path)
    try:
        saved_at = int(os.stat(path / saves.MANIFEST).st_mtime)
    except OSError:
        saved_at = None
    return Row(str(path), state, step, use.alone, use.shared, saved_at, saves.verified_at(path))


def _read(path: Path) -> tuple[str, int | None]:
    try:
        if not saves.is_complete(path):
            return "unfinished", None
        return "complete", _core.manifest(path)["step"]
    except CheckpointError as error:
        return f"damaged: {' '.join(str(error).removeprefix('overspill: ').split())}", None
    except OSError as error:
        return f"cannot be read: {error.strerror}", None


def _print(rows: list[Row], now: float) -> None:
    lines = [("step", "alone", "shared", "age", "verified", "checkpoint")]
    for row in rows:
        known = row.saved_at is not None
        lines.append(
            (
                "-" if row.step is None else str(row.step),
                human(row.alone_bytes),
                human(row.shared_bytes),
                age(now - row.saved_at) if known else "-",  # type: ignore[operator]
                "no" if row.verified_at is None else f"{age(now - row.verified_at)} ago",
                row.path if row.state == "complete" else f"{row.path}  ({row.state})",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(5)]
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=False)]
        say(harmless("  ".join([*cells, line[5]])))


def age(seconds: float) -> str:
    """For people: 93600 -> '26 h'."""
    for unit, length, most in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172800)):
        if seconds < most:
            return f"{max(0, seconds) // length:.0f} {unit}"
    return f"{seconds // 86400:.0f} days"
