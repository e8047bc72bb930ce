"""What a run's folder says of it while it trains: `overspill top` draws these figures, or prints them as JSON.

Only reads. The log is of rank 0: its loss and tokens are those of all ranks, its memory and disks are its own.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from overspill import _core
from overspill.cli import wear
from overspill.cli.common import CliError
from overspill.cli.display import TIMES
from overspill.cli.run_folder import RunFolder, is_number, parsed_line, wrong_line
from overspill.cli.run_lock import Holder, RunLock


def mean(values: Sequence[float]) -> float:
    """NaN where they have none: a log may say anything."""
    found = sum(values) / len(values)
    return found if math.isfinite(found) else math.nan


RECENT = 20  # steps over which durations are averaged
STALL_SECONDS = 10.0  # no step for so long, and for STALL_STEPS of the usual ones: the run stalls
STALL_STEPS = 5
WEAR_SECONDS = 60.0  # between two looks at the drives
POINTS = 240  # of the curve of losses


class Curve:
    """A loss for each of at most `points` stretches of a run, each as long as the others: the mean of its steps'."""

    def __init__(self, points: int = POINTS):
        self._points, self._each = points, 1
        self._done: list[float] = []
        self._open: list[float] = []

    def add(self, loss: float) -> None:
        self._open.append(loss)
        if len(self._open) < self._each:
            return
        self._done.append(mean(self._open))
        self._open = []
        if len(self._done) >= self._points:
            pairs = zip(self._done[::2], self._done[1::2])
            self._done, self._each = [(a + b) / 2 for a, b in pairs], self._each * 2

    def values(self) -> list[float]:
        return self._done + ([mean(self._open)] if self._open else [])


class LogTail:
    """The log's lines as they come: each is read once, unless the log is begun anew or cut, as a rewind does."""

    def __init__(self, path: Path):
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self._inode, self._offset, self._lines = 0, 0, 0
        self.last: dict[str, Any] | None = None
        self.seconds: deque[float] = deque(maxlen=RECENT)
        self.losses = Curve()
        self.moved: dict[str, dict[str, int]] = {}  # bytes by path, in all steps

    def read(self) -> None:
        """Raises CliError for a line that is damaged."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._forget()
                self._inode = status.st_ino
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):  # being written
                    break
                self._offset += len(line)
                self._lines += 1
                self._take(line)

    def _take(self, line: bytes) -> None:
        record = parsed_line(line)
        wrong = "it is no JSON" if record is None else wrong_line(record) or _wrong_parts(record)
        if wrong:
            raise CliError(f"{self.path}:{self._lines} is damaged: {wrong}. Delete that line, or mend it")
        self.last = record
        self.seconds.append(record["seconds"] + record.get("save_seconds", 0.0))
        self.losses.add(record["loss"])
        for path, moved in record.get("nvme_paths", {}).items():
            sums = self.moved.setdefault(path, {"read_bytes": 0, "written_bytes": 0})
            for key in sums:
                sums[key] += moved[key]


_NUMBERS = (  # of a line; earlier versions lack some
    "steps",
    "ranks",
    "ended",
    "lr",
    "norm",
    "tokens_per_s",
    "save_seconds",
    "host_budget_bytes",
    "device_bytes",
    "nvme_reserved_bytes",
    *TIMES,
)


def _wrong_parts(record: dict[str, Any]) -> str:
    """What of a line this module cannot use, in words; empty where there is nothing."""
    for name in _NUMBERS:
        if name in record and not is_number(record[name]):
            return f"{name} = {record[name]!r:.40} is no number"
    waited, paths = record.get("wait_by_cause", {}), record.get("nvme_paths", {})
    if not isinstance(waited, dict) or not all(map(is_number, waited.values())):
        return f"wait_by_cause = {waited!r:.60} has something else than seconds"
    keys = ("read_bytes", "written_bytes")
    if not isinstance(paths, dict) or not all(
        isinstance(moved, dict) and all(is_number(moved.get(key)) for key in keys) for moved in paths.values()
    ):
        return f"nvme_paths = {paths!r:.60} has something else than bytes by folder"
    return ""


class RunWatch:
    """The figures of one run, as often as they are asked for. `now` is the time of day. Raises CliError for a folder
    that holds no run."""

    def __init__(self, path: Path, now: Callable[[], float] = time.time):
        self.folder, self._now = RunFolder(path), now
        if not self.folder.path.is_dir():
            kind = "is a file" if self.folder.path.exists() else "does not exist"
            raise CliError(f"{path} {kind}; name the folder of a run (--out of overspill train)")
        if self.folder.stored() is None and RunLock.holder(self.folder.path) is None:
            raise CliError(
                f"{path} holds no run (no run.json); name the folder of a run (--out of overspill train)"
            )
        self._tail = LogTail(self.folder.log_path)
        self._drives: dict[str, list[dict[str, Any]]] = {}
        self._looked_at = -math.inf

    def figures(self) -> dict[str, Any]:
        """What `overspill top --json` prints: the parts of the view (docs/monitoring.md). None where nobody knows.
        Raises CliError for a damaged run.json or log."""
        stored = self.folder.stored() or {"settings": {}, "heldout": {}}
        self._tail.read()
        last = self._tail.last or {}
        holder = RunLock.holder(self.folder.path)
        settings = stored["settings"]
        steps = (None if settings.get("epochs") else settings.get("steps")) or last.get("steps")
        usual = mean(self._tail.seconds) if self._tail.seconds else None
        since = self._now() - last["ended"] if "ended" in last else None
        begun = holder is not None and "ended" in last and last["ended"] >= holder.since
        state, stalled = _state(holder, begun, last.get("step", 0), steps, since, usual)
        left = (steps - last["step"]) * usual if state == "training" and steps and usual is not None else None
        found = {"run": str(self.folder.path), "state": state, "process": holder and holder.name}
        found |= {"step": last.get("step", 0), "steps": steps, "ranks": last.get("ranks")}
        found |= {"seconds": last.get("seconds"), "since_seconds": since, "stalled_seconds": stalled}
        found |= {"left_seconds": left, "losses": self._tail.losses.values()}
        found["heldout"] = {int(step): loss for step, loss in stored["heldout"].items()}
        for name in ("loss", "lr", "norm", "skipped", "tokens_per_s", "rss_bytes"):
            found[name] = last.get(name)
        found["tiers"] = _tiers(last)
        found["spent"] = {name: last.get(name) for name in TIMES}
        found["wait_by_cause"] = last.get("wait_by_cause")
        found["disks"] = self._disks(last, settings.get("endurance_tbw"), holder)
        found["checkpoints"] = self._checkpoints()
        return found

    def _disks(
        self, last: dict[str, Any], rated_tb: float | None, holder: Holder | None
    ) -> list[dict[str, Any]]:
        """By NVMe folder. Drives are looked at where the run is on this machine."""
        here = holder is None or holder.on_this_machine()
        if here and time.monotonic() - self._looked_at >= WEAR_SECONDS:
            self._looked_at = time.monotonic()
            self._drives = {path: _core.drives(path) for path in self._tail.moved if Path(path).is_dir()}
        disks = []
        for path, sums in self._tail.moved.items():
            moved, seconds = last.get("nvme_paths", {}).get(path, {}), last["seconds"]
            rate = {f"{key}_per_s": moved.get(key, 0) / seconds if seconds > 0 else None for key in sums}
            drives = [wear.describe(drive, rated_tb) for drive in self._drives.get(path, [])]
            disks.append({"path": path, **rate, **sums, "drives": drives})
        return disks

    def _checkpoints(self) -> dict[str, Any]:
        complete = self.folder.checkpoints.complete()
        if not complete:
            return {"count": 0, "newest": None, "age_seconds": None}
        newest = complete[-1][1]
        try:
            age = self._now() - (newest / "manifest.json").stat().st_mtime
        except OSError:  # removed just now
            age = None
        return {"count": len(complete), "newest": newest.name, "age_seconds": age}


def _tiers(last: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Bytes that are held, and of how many: a budget, or on NVMe the room that the engine's files take."""
    if not last:
        return {}
    tiers = {"host": {"held_bytes": last["host_used_bytes"], "of_bytes": last.get("host_budget_bytes")}}
    if last.get("device_bytes"):
        tiers["device"] = {"held_bytes": last["device_bytes"], "of_bytes": None}
    reserved = last.get("nvme_reserved_bytes")
    tiers["nvme"] = {"held_bytes": last["nvme_allocated_bytes"], "of_bytes": reserved}
    return tiers


def _state(
    holder: Holder | None, begun: bool, step: int, steps: int | None, since: float | None, usual: float | None
) -> tuple[str, float | None]:
    """In a word, and for how long a run that trains has made no step, where that is too long. begun: the process that
    holds the lock has made a step."""
    patience = max(STALL_SECONDS, STALL_STEPS * (usual or 0.0))
    fresh = since is not None and since < patience
    if holder is None or (holder.on_this_machine() and not holder.lives and not fresh):
        if steps is not None and step >= steps:
            return "ended", None
        return ("stopped" if holder is None else "killed"), None
    if not begun:
        return "starting", None
    if steps is not None and step >= steps:
        return "finishing", None
    return "training", None if since is None or since < patience else since
