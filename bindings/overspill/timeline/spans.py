"""What the core has noted, as spans of time in lanes: what the caller did, updates, disks, buffers in host memory. All
times are nanoseconds since the recording began."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from .. import durable

VERSION = 1
Entry = tuple[int, str, int, int, int]  # time, what happened, unit, chunk, slot

# What the caller's time was bound by, and in words.
BOUNDS = {
    "compute": "not waiting",
    "update": "waiting for updates",
    "disk": "waiting for disks",
    "other": "other waits",
}
# For what a caller waits, by the cause's number (engine/telemetry/report.h).
_CAUSES = (
    "an update of {}",
    "the last updates of the step before",
    "weights of {}",
    "free memory",
    "memory or reads of gradients",
    "activations",
    "other ranks, or transfers that a read of the engine's contents needs ended",
)
_UPDATES = (0, 1)
_LANES = {
    "bound": "Bound by",
    "caller": "Forward and backward",
    "updates": "Updates on the CPU",
    "reads": "Disks read",
    "writes": "Disks write",
    "coming": "Weights on their way into memory",
    "weights": "Weights in memory beside their home",
    "gradients": "Gradients that wait for their update",
    "sums": "Gradients that the ranks add up",
    "ring": "States in buffers: read, updated, written",
    "copy_up": "Device: copies up",
    "compute": "Device: computes",
    "copy_down": "Device: copies down",
    "update": "Device: updates",
}


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together. `weights_bytes`: of all of it; `states_bytes` and `chunks`, the pieces in
    which it is updated: of this rank's share."""

    name: str
    parameters: list[str]
    weights_bytes: int
    gradient_bytes: int
    states_bytes: int
    chunks: int


@dataclass(frozen=True)
class Span:
    """`row`: of its lane; no two spans of a row overlap. `unit`: -1 for none. `state`: what is so meanwhile."""

    begin: int
    end: int
    row: int
    unit: int
    kind: str
    bytes: int
    state: str


@dataclass
class Lane:
    key: str
    name: str
    rows: int = 0
    spans: list[Span] = field(default_factory=list)


@dataclass
class Timeline:
    """`steps`: when each update was decided. `totals`: seconds of the caller's time by what bound it; their sum is
    `duration`."""

    duration: int
    units: list[Unit]
    lanes: list[Lane]
    steps: list[int]
    totals: dict[str, float]

    @classmethod
    def of(
        cls,
        entries: Iterable[Entry],
        device: Iterable[tuple[int, int, str, int]],
        units: list[Unit],
        begin: int,
        end: int,
    ) -> Timeline:
        """Of the core's journal between two moments of time.monotonic_ns(). `device`: begin, end, what, unit."""
        return _Reader(units, begin, end).read(list(entries), list(device))

    def write(self, path: Path) -> None:
        text = json.dumps({"version": VERSION, **asdict(self)}, separators=(",", ":"))
        with durable.new_file(path) as file:
            file.write(text.encode())

    @classmethod
    def read(cls, path: Path) -> Timeline:
        """Raises ValueError for a file that is no timeline, OSError."""
        try:
            return _checked(json.loads(path.read_text(encoding="utf-8")))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"overspill: {path} is no timeline that this version wrote ({error!r:.80}): give a file of "
                "engine.timeline(FILE.json), or a run of overspill train --timeline"
            ) from None

    def lane(self, key: str) -> Lane:
        return next(lane for lane in self.lanes if lane.key == key)


def _checked(data: Any) -> Timeline:
    """Of a file from outside. Raises ValueError, KeyError, TypeError."""
    if _whole(data["version"]) != VERSION:
        raise ValueError(f"version {data['version']}")
    duration = _whole(data["duration"], 1, 2**62)
    units = [
        Unit(
            _text(each["name"]),
            [_text(name) for name in _list(each["parameters"])],
            *(
                _whole(each[key], 0, 2**62)
                for key in ("weights_bytes", "gradient_bytes", "states_bytes", "chunks")
            ),
        )
        for each in _list(data["units"])
    ]
    lanes = []
    for each in _list(data["lanes"]):
        key = _of(each["key"], _LANES)
        lane = Lane(key, _LANES[key])
        spans = _list(each["spans"])
        lane.rows = _whole(each["rows"], 0, len(spans) + 1)
        for span in spans:
            begin = _whole(span["begin"], 0, duration + 1)
            kind = _of(span["kind"], BOUNDS) if lane.key == "bound" else _text(span["kind"])
            lane.spans.append(
                Span(
                    begin,
                    _whole(span["end"], begin, duration + 1),
                    _whole(span["row"], 0, lane.rows),
                    _whole(span["unit"], -1, len(units)),
                    kind,
                    _whole(span["bytes"], 0, 2**62),
                    _text(span["state"]),
                )
            )
        lanes.append(lane)
    keys = [lane.key for lane in lanes]
    if len(set(keys)) < len(keys) or not {"bound", "caller"} <= set(keys):
        raise ValueError(f"lanes {keys}")
    steps = [_whole(each, 0, duration + 1) for each in _list(data["steps"])]
    return Timeline(
        duration, units, lanes, steps, _totals(next(lane for lane in lanes if lane.key == "bound"))
    )


def _whole(value: Any, least: int = 0, below: int = 2**31) -> int:
    if type(value) is not int or not least <= value < below:
        raise ValueError(f"{value!r:.40} where a number from {least} to {below - 1} belongs")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} where a text belongs")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.40} where a list belongs")
    return value


def _of(value: Any, among: Iterable[str]) -> str:
    if value not in list(among):
        raise ValueError(f"{value!r:.40} is not known")
    return str(value)


def _totals(bound: Lane) -> dict[str, float]:
    totals = dict.fromkeys(BOUNDS, 0.0)
    for span in bound.spans:
        totals[span.kind] += (span.end - span.begin) * 1e-9
    return totals


class _Reader:
    def __init__(self, units: list[Unit], begin: int, end: int):
        self.units, self.begin, self.end = units, begin, max(end, begin + 1)
        self.causes: list[int] = []  # of the caller's waits, in order
        self.lanes = {key: Lane(key, name) for key, name in _LANES.items()}
        self.steps: list[int] = []
        self.first_chunk: dict[int, int] = {}  # of each unit that has been seen in chunks
        self.open: dict[tuple[str, int], tuple[int, int, str, int, str]] = {}
        self.left: dict[int, set[int]] = {}  # of each unit: chunks that are scheduled and not updated

    def read(self, entries: list[Entry], device: list[tuple[int, int, str, int]]) -> Timeline:
        for _, _, unit, chunk, _ in entries:
            if chunk >= 0 and unit >= 0:
                self.first_chunk[unit] = min(chunk, self.first_chunk.get(unit, chunk))
        caller = _Caller(self)
        for time, what, unit, chunk, slot in entries:
            now = min(max(time, self.begin), self.end) - self.begin
            caller.note(now, what, unit, slot)
            self._note(now, what, unit, chunk, slot)
        whole = self.end - self.begin
        caller.close(whole)
        for key in list(self.open):
            self._end(key, whole)
        for first, last, what, unit in device:
            at, until = max(first, self.begin) - self.begin, min(last, self.end) - self.begin
            if at < until:
                said = {"copy_up": "weights are copied up", "copy_down": "a gradient is copied down"}.get(
                    what, what
                )
                self._add(what, at, until, unit, what, self._weights(unit), said)
        self._bound()
        for key, lane in self.lanes.items():
            if key not in ("bound", "caller"):
                _pack(lane)
        used = [lane for lane in self.lanes.values() if lane.spans or lane.key in ("bound", "caller")]
        return Timeline(whole, self.units, used, self.steps, _totals(self.lanes["bound"]))

    def _note(self, now: int, what: str, unit: int, chunk: int, slot: int) -> None:
        if what == "stepped":
            self.steps.append(now)
        elif what == "forward":
            self._forget_unused()
        elif what in ("disk_busy", "disk_rests"):
            key = ("reads", "writes")[chunk], 0
            if what == "disk_rests":
                self._end(key, now)
            else:
                self._begin(key, now, -1, "disk", 0, f"at least one {key[0][:-1]} is under way")
        elif what == "gathering":
            self._begin(
                ("coming", unit), now, unit, "weights", self._weights(unit), "weights are on their way"
            )
        elif what == "gathered":
            self._end(("coming", unit), now)
            self._begin(("weights", unit), now, unit, "weights", self._weights(unit), "weights are in memory")
        elif what == "freed":
            self._end(("coming", unit), now)
            self._end(("weights", unit), now)
        elif what == "gradient":
            if ("gradients", unit) not in self.open:
                size = self.units[unit].gradient_bytes
                self._begin(
                    ("gradients", unit), now, unit, "gradients", size, "gradients wait for their update"
                )
        elif what == "summing":
            size = self.units[unit].gradient_bytes
            self._begin(("sums", unit), now, unit, "sum", size, "the ranks add up its gradients")
        elif what == "summed":
            self._end(("sums", unit), now)
        elif what == "scheduled":
            self.left.setdefault(unit, set()).add(chunk)
        elif what == "reading":
            said = f"states{self._part(unit, chunk)} in buffer {slot}"
            self._begin(("ring", slot), now, unit, "states", self._states(unit), said)
        elif what in ("updating", "guessing"):
            guess = ", before the norm is known" if what == "guessing" else ""
            said = f"a worker updates weights and states{self._part(unit, chunk)}{guess}"
            self._begin(("updates", chunk), now, unit, "update", self._states(unit), said)
        elif what in ("updated", "guessed"):
            self._end(("updates", chunk), now)
            if what == "updated" and chunk in self.left.get(unit, ()):
                self.left[unit].discard(chunk)
                if not self.left[unit]:
                    self._end(("gradients", unit), now)
        elif what == "writing":
            said = f"states{self._part(unit, chunk)} are written from buffer {slot}"
            self._begin(("ring", slot), now, unit, "writing", self._states(unit), said)
        elif what == "written":
            self._end(("ring", slot), now)

    def _forget_unused(self) -> None:
        """Gradients of before the last step that no update was scheduled for: a guess had been made with them, or they
        were cleared."""
        since = self.steps[-1] if self.steps else -1
        for key in [key for key, its in self.open.items() if key[0] == "gradients" and its[0] <= since]:
            if not self.left.get(key[1]):
                self._end(key, since)

    def _weights(self, unit: int) -> int:
        return self.units[unit].weights_bytes if unit >= 0 else 0

    def _states(self, unit: int) -> int:
        return self.units[unit].states_bytes // max(1, self.units[unit].chunks)

    def _part(self, unit: int, chunk: int) -> str:
        of = self.units[unit].chunks
        return "" if of < 2 else f" of chunk {chunk - self.first_chunk.get(unit, chunk) + 1} of {of}"

    def _begin(self, key: tuple[str, int], now: int, unit: int, kind: str, size: int, state: str) -> None:
        self._end(key, now)
        self.open[key] = now, unit, kind, size, state

    def _end(self, key: tuple[str, int], now: int) -> None:
        found = self.open.pop(key, None)
        if found is not None:
            begin, unit, kind, size, state = found
            self._add(key[0], begin, now, unit, kind, size, state)

    def _add(self, lane: str, begin: int, end: int, unit: int, kind: str, size: int, state: str) -> None:
        self.lanes[lane].spans.append(Span(begin, end, 0, unit, kind, size, state))

    def _bound(self) -> None:
        """Where the caller waits for an update: that, as long as one runs. Else the disks, as long as a transfer is
        under way (StepReport::wait_for_disk_ns)."""
        updates = _covered(self.lanes["updates"].spans)
        disks = _covered(self.lanes["reads"].spans + self.lanes["writes"].spans)
        cuts = sorted({at for run in updates + disks for at in run})
        causes = iter(self.causes)
        for span in self.lanes["caller"].spans:
            if span.kind != "wait":
                self._extend("compute", span.begin, span.end)
                continue
            for_update = next(causes) in _UPDATES
            inside = cuts[bisect_right(cuts, span.begin) : bisect_left(cuts, span.end)]
            edges = [span.begin, *inside, span.end]
            for begin, end in pairwise(edges):
                if for_update and _is_in(updates, begin):
                    self._extend("update", begin, end)
                else:
                    self._extend("disk" if _is_in(disks, begin) else "other", begin, end)
        self.lanes["bound"].rows = self.lanes["caller"].rows = 1

    def _extend(self, kind: str, begin: int, end: int) -> None:
        spans = self.lanes["bound"].spans
        if spans and spans[-1].kind == kind and spans[-1].end == begin:
            begin = spans.pop().begin
        said = {
            "compute": "the caller does not wait",
            "update": "the caller waits, and an update runs",
            "disk": "the caller waits, and a disk reads or writes",
            "other": "the caller waits, and no disk is at work for it",
        }[kind]
        if begin < end:
            spans.append(Span(begin, end, 0, -1, kind, 0, said))


class _Caller:
    """The caller's time without a gap: what it computes, or waits for."""

    def __init__(self, reader: _Reader):
        self.reader = reader
        self.since, self.phase, self.unit = 0, "outside", -1
        self.waits: list[tuple[int, int]] = []  # unit and cause, of several threads at once

    def note(self, now: int, what: str, unit: int, cause: int) -> None:
        if what not in ("forward", "backward", "stepped", "acquired", "waiting", "resumed", "gradient"):
            return
        if what == "gradient" and self.phase != "forward":
            return
        self.close(now)
        if what in ("forward", "backward"):
            self.phase, self.unit = what, -1
        elif what == "gradient":
            self.phase = "backward"
        elif what == "stepped":
            self.phase, self.unit = "outside", -1
        elif what == "acquired":
            self.unit = unit
        elif what == "waiting":
            self.waits.append((unit, cause if 0 <= cause < len(_CAUSES) else len(_CAUSES) - 1))
        elif self.waits:
            self.waits.pop()

    def close(self, now: int) -> None:
        if now > self.since:
            if self.waits:
                unit, cause = self.waits[-1]
                self.reader.causes.append(cause)
                of = self.reader.units[unit].name if unit >= 0 else "a layer"
                said = f"waits for {_CAUSES[cause].format(of)}"
                self.reader._add("caller", self.since, now, unit, "wait", 0, said)
            else:
                where = {"forward": "forward", "backward": "backward"}.get(self.phase, "between passes")
                self.reader._add("caller", self.since, now, self.unit, self.phase, 0, where)
        self.since = max(self.since, now)


def _covered(spans: list[Span]) -> list[tuple[int, int]]:
    """The runs of time that spans cover together, in order."""
    runs: list[tuple[int, int]] = []
    for begin, end in sorted((span.begin, span.end) for span in spans):
        if runs and begin <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(runs[-1][1], end)
        else:
            runs.append((begin, end))
    return runs


def _is_in(runs: list[tuple[int, int]], at: int) -> bool:
    found = bisect_right(runs, at, key=lambda run: run[0]) - 1
    return found >= 0 and at < runs[found][1]


def _pack(lane: Lane) -> None:
    """Puts each span into the first row where it overlaps no other."""
    ends: list[int] = []
    packed: list[Span] = []
    for span in sorted(lane.spans, key=lambda each: (each.begin, each.end)):
        row = next((i for i, end in enumerate(ends) if end <= span.begin), len(ends))
        if row == len(ends):
            ends.append(0)
        ends[row] = span.end
        packed.append(replace(span, row=row))
    lane.spans, lane.rows = packed, len(ends)
