"""Recorded steps as a picture: which weights, gradients and states were on their way or in buffers, and what the caller
waited for. spans.py makes spans of what the core has noted (engine/telemetry/journal.h), page.py a page of them,
picture.py a picture for a paper."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .. import given
from . import page, picture
from .spans import Timeline, Unit

KINDS = (".html", ".svg", ".png", ".json")


def write(timeline: Timeline, path: str | Path) -> None:
    """By the name's ending: a page, a picture, or the spans themselves (Timeline.read). Raises MissingExtra for a
    picture without matplotlib, OSError."""
    path = Path(path)
    if path.suffix == ".html":
        page.write(timeline, path)
    elif path.suffix == ".json":
        timeline.write(path)
    else:
        picture.write(timeline, path)


def check(call: str, path: Any, kinds: tuple[str, ...] = KINDS) -> Path:
    """The file to write, in a folder that is there. Raises ValueError for another ending, OSError, MissingExtra."""
    found = Path(given.file(call, path))
    if found.suffix not in kinds:
        raise ValueError(f"overspill: {call}: {str(path)!r:.60}: give a name that ends in {', '.join(kinds)}")
    if found.suffix in picture.KINDS:
        picture.check()
    return found


@contextlib.contextmanager
def recorded(owner: Any, gradient_width: int, chunk_elements: int, shards: int, path: Path) -> Iterator[None]:
    """What happens inside the `with` is recorded, and written to `path` at its end, after an error too. `owner`: a
    Residency. Raises RuntimeError where a recording is under way."""
    core, units = owner.core, units_of(owner, gradient_width, chunk_elements, shards)
    with recording(owner) as last:
        begin = time.monotonic_ns()
        last.append(lambda: write(_taken(core, units, begin, time.monotonic_ns()), path))
        yield


def _taken(core: Any, units: list[Unit], begin: int, end: int) -> Timeline:
    return Timeline.of(core.take_journal(), core.take_device_spans(), units, begin, end)


@contextlib.contextmanager
def recording(owner: Any) -> Iterator[list[Callable[[], None]]]:
    """The core notes what happens, one recording at a time. At the end, unless the engine was closed meanwhile, it
    stops, and then what the block has appended is called, which takes the notes."""
    if owner.recording:
        raise RuntimeError(
            "overspill: engine.trace or engine.timeline is recording already, and both would take the same notes: end "
            "that `with` first"
        )
    last: list[Callable[[], None]] = []
    try:
        owner.recording = True
        owner.core.record_journal(True)
        yield last
    finally:
        owner.recording = False
        if not owner.closed:
            owner.core.record_journal(False)
            for take in last:
                take()


def units_of(owner: Any, gradient_width: int, chunk_elements: int, shards: int) -> list[Unit]:
    """`gradient_width`: bytes of a gradient's number where it is more than the weight's; `shards`: ranks among which a
    unit's states are divided."""
    homes = owner.core.plan.as_dict()["units"]
    plain = [unit.name.split(":")[0] for unit in owner.units]
    counts = Counter(plain)
    found = []
    for unit, home, name in zip(owner.units, homes, plain, strict=True):
        if counts[name] > 1:  # of one block: frozen ones beside trained ones, or others in another dtype
            name = f"{name} ({'' if unit.is_trained else 'frozen, '}{str(unit.dtype).removeprefix('torch.')})"
        elements = sum(s.memory.numel() for s in unit.segments)
        found.append(
            Unit(
                name=name,
                parameters=[name for s in unit.segments for name in s.names],
                weights_bytes=sum(s.bytes for s in unit.segments),
                gradient_bytes=elements * max(gradient_width, unit.dtype.itemsize),
                states_bytes=sum(home["states_bytes"].values()),
                chunks=max(1, -(-elements // (shards * chunk_elements))),
            )
        )
    return found
