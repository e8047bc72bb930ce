"""A page that shows a timeline: one file, which asks no network for anything."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from .. import durable
from .spans import BOUNDS, Timeline


def write(timeline: Timeline, path: Path) -> None:
    """Raises OSError."""
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    with durable.new_file(path) as file:
        file.write(template.replace("__DATA__", _data(timeline), 1).encode())


def _data(timeline: Timeline) -> str:
    """What the page reads. A "<" is written so that no name can end the script element."""
    states: dict[str, int] = {}
    lanes = [
        {
            "key": lane.key,
            "name": lane.name,
            "rows": lane.rows,
            "spans": [
                [s.begin, s.end, s.row, s.unit, s.kind, s.bytes, states.setdefault(s.state, len(states))]
                for s in lane.spans
            ],
        }
        for lane in timeline.lanes
    ]
    found = {
        "duration": timeline.duration,
        "steps": timeline.steps,
        "totals": timeline.totals,
        "units": [
            {"name": u.name, "parameters": u.parameters, "weights_bytes": u.weights_bytes}
            for u in timeline.units
        ],
        "lanes": lanes,
        "states": list(states),
        "bounds": BOUNDS,
    }
    return json.dumps(found, separators=(",", ":")).replace("<", "\\u003c")
