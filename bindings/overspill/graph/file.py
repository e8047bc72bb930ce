"""A graph as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import durable
from .nodes import KINDS, Graph, Node

VERSION = 1
_LONGEST_S = 1e9


def write(graph: Graph, path: Path) -> None:
    """Raises OSError."""
    data = {"version": VERSION, "units": graph.units, "nodes": [asdict(node) for node in graph.nodes]}
    with durable.new_file(path) as file:
        file.write(json.dumps(data, separators=(",", ":"), allow_nan=False).encode())


def read(path: Path) -> Graph:
    """Raises ValueError for a file that is no graph, OSError."""
    try:
        return _checked(json.loads(path.read_text(encoding="utf-8")))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"overspill: {path} is no graph that this version wrote ({error!r:.80}): give a file of "
            'engine.graph(step).write("FILE.json")'
        ) from None


def _checked(data: Any) -> Graph:
    if data["version"] != VERSION:
        raise ValueError(f"version {data['version']!r:.40}")
    units = data["units"]
    if not isinstance(units, list) or not all(isinstance(name, str) for name in units):
        raise ValueError("units are no names")
    if len(set(units)) < len(units):
        raise ValueError("two units have one name")
    nodes: list[Node] = []
    if not isinstance(data["nodes"], list):
        raise ValueError("nodes are no list")
    for each in data["nodes"]:
        if each["kind"] not in KINDS:
            raise ValueError(f"kind {each['kind']!r:.40}")
        seconds = each["seconds"]
        if seconds is not None and (type(seconds) not in (int, float) or not 0 <= seconds <= _LONGEST_S):
            raise ValueError("seconds are no number of a step's")
        after = tuple(_whole(i, 0, len(nodes)) for i in each["after"])  # earlier ones: so there is no cycle
        unit = _whole(each["unit"], -1, len(units))
        nodes.append(
            Node(each["kind"], unit, _whole(each["use"]), _whole(each["bytes"], 0, 2**62), seconds, after)
        )
    return Graph(tuple(units), tuple(nodes))


def _whole(value: Any, least: int = 0, below: int = 2**31) -> int:
    if type(value) is not int or not least <= value < below:
        raise ValueError(f"{value!r:.40} where a number from {least} to {below - 1} belongs")
    return value
