"""The dataflow graph of a training step: what of it needs what, whatever the order in which the script runs it.
trace.py follows tensors through a forward, making.py adds what the engine does around it, nodes.py answers questions,
file.py reads and writes it, picture.py draws it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import timeline
from ..timeline.spans import Timeline, Unit
from . import file, making, picture
from .nodes import CriticalPath, Graph, Node
from .trace import Tracer

__all__ = ["CriticalPath", "Graph", "Node", "check", "of_step", "write"]

KINDS = (".json", ".svg", ".png")


def check(path: Any) -> Path:
    """The file to write, as timeline.check."""
    return timeline.check("graph.write", path, KINDS)


def write(graph: Graph, path: Path) -> None:
    """By the name's ending. Raises MissingExtra for a picture without matplotlib, OSError."""
    if path.suffix == ".json":
        file.write(graph, path)
    else:
        picture.write(graph, path)


def of_step(
    owner: Any, step: Callable[[], Any], units: list[Unit], synchronize: Callable[[], None], ranks: int
) -> Graph:
    """Calls `step` twice: the first call is traced, the second is timed, since tracing slows each operation down.
    `owner`: a Residency. `synchronize`: waits for updates. Raises RuntimeError where the first makes no forward."""
    tracer = Tracer(owner)
    owner.tracer = tracer
    try:
        with tracer.tracing():
            step()
    finally:
        owner.tracer = None
    if not tracer.uses:
        raise RuntimeError(
            "overspill: engine.graph: the step used no weight of this engine: give a function that calls the engine, "
            "engine.backward and engine.step"
        )
    synchronize()
    found: list[Timeline] = []
    with timeline.recording(owner) as last:
        begin = time.monotonic_ns()
        core = owner.core
        last.append(
            lambda: found.append(
                Timeline.of(core.take_journal(), core.take_device_spans(), units, begin, time.monotonic_ns())
            )
        )
        step()
        synchronize()
    trained = [unit.is_trained for unit in owner.units]
    return making.make(tracer, found[0], trained, ranks)
