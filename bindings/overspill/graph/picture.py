"""A graph as a picture, SVG or PNG, drawn by matplotlib: what depends on something lies to the right of it, a unit
has a row of its own, the critical path is red."""

from __future__ import annotations

import itertools
from pathlib import Path

from .. import durable
from ..extras import need
from .nodes import KINDS, Graph

_COLORS = dict(
    zip(
        KINDS,
        "#8250df #2da44e #8c959f #24292f #1a7f37 #bf8700 #9a6700 #24292f #0969da #54aeff".split(),
        strict=True,
    )
)


def write(graph: Graph, path: Path) -> None:
    """Raises MissingExtra, OSError."""
    need("matplotlib")  # not pyplot, whose choice of a backend is the script's
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    places = _places(graph)
    path_nodes = graph.critical_path()
    critical = set(path_nodes.nodes)
    columns = 1 + max((x for x, _ in places), default=0)
    rows = 1 + max((y for _, y in places), default=0)
    figure = Figure(figsize=(min(60, 1 + 0.9 * columns), min(40, 1 + 0.5 * rows)), layout="constrained")
    axis = figure.subplots()
    for i, node in enumerate(graph.nodes):
        x, y = places[i]
        for j in node.after:
            on = i in critical and j in critical
            axis.annotate(
                "",
                (x, y),
                places[j],
                arrowprops={
                    "arrowstyle": "->",
                    "color": "#cf222e" if on else "#c8c8c8",
                    "lw": 1.6 if on else 0.6,
                },
            )
    for i, node in enumerate(graph.nodes):
        name = graph.units[node.unit] if node.unit >= 0 else node.kind
        took = "" if node.seconds is None else f"\n{node.seconds * 1e3:.2f} ms"
        edge = "#cf222e" if i in critical else "white"
        box = {"boxstyle": "round", "facecolor": _COLORS[node.kind], "edgecolor": edge}
        axis.text(*places[i], name[-22:] + took, size=5, color="white", ha="center", va="center", bbox=box)
    axis.set_xlim(-0.6, columns - 0.4)
    axis.set_ylim(rows - 0.4, -0.6)
    axis.axis("off")
    kinds = {node.kind for node in graph.nodes}
    handles = [Patch(color=_COLORS[kind], label=kind) for kind in KINDS if kind in kinds]
    handles.append(Patch(color="#cf222e", label=f"critical path: {path_nodes.seconds * 1e3:.1f} ms measured"))
    figure.legend(handles=handles, loc="outside upper center", ncols=6, frameon=False, fontsize=7)
    with durable.new_file(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=150)


def _places(graph: Graph) -> list[tuple[int, int]]:
    """Of each node: how many nodes have to come before it at least, and its row. A unit has one row, as far as its
    nodes of one column find room there; what belongs to no unit is in the middle."""
    rows: dict[int, int] = {}
    for node in graph.nodes:
        if node.unit >= 0:
            rows.setdefault(node.unit, len(rows))
    depths: list[int] = []
    taken: set[tuple[int, int]] = set()
    found = []
    for node in graph.nodes:
        depth = 1 + max((depths[i] for i in node.after), default=-1)
        depths.append(depth)
        wanted = rows.get(node.unit, len(rows) // 2)
        place = next(
            (depth, row) for row in itertools.chain((wanted,), itertools.count()) if (depth, row) not in taken
        )
        taken.add(place)
        found.append(place)
    return found
