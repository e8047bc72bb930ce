"""A timeline as a picture for a paper, SVG or PNG, drawn by matplotlib."""

from __future__ import annotations

import colorsys
from pathlib import Path
from typing import Any

from .. import durable
from ..extras import need
from .spans import BOUNDS, Lane, Span, Timeline

KINDS = (".svg", ".png")
_BOUND = dict(zip(BOUNDS, ("#2da44e", "#8250df", "#bf8700", "#6e7781"), strict=True))
_WAIT = "#8c959f"


def check() -> None:
    """Raises MissingExtra where there is no matplotlib."""
    need("matplotlib")


def write(timeline: Timeline, path: Path) -> None:
    """Raises MissingExtra, OSError."""
    need("matplotlib")  # not pyplot, whose choice of a backend is the script's
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = [lane for lane in timeline.lanes if lane.spans]
    heights = [max(0.5, min(3.0, 0.22 * lane.rows)) for lane in lanes]
    figure = Figure(figsize=(10, 1.2 + sum(heights) + 0.3 * len(lanes)), layout="constrained")
    axes = figure.subplots(len(lanes), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})
    for axis, lane in zip(axes[:, 0], lanes, strict=True):
        _draw(axis, lane, timeline)
    axes[-1, 0].set_xlabel("seconds")
    axes[-1, 0].set_xlim(0, timeline.duration * 1e-9)
    figure.legend(
        handles=[
            Patch(color=_BOUND[key], label=f"{BOUNDS[key]}: {seconds:.3f} s")
            for key, seconds in timeline.totals.items()
        ],
        loc="outside upper center",
        ncols=4,
        frameon=False,
        fontsize=8,
    )
    with durable.new_file(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=150)


def _draw(axis: Any, lane: Lane, timeline: Timeline) -> None:
    for row in range(lane.rows):
        spans = [span for span in lane.spans if span.row == row]
        axis.broken_barh(
            [(span.begin * 1e-9, (span.end - span.begin) * 1e-9) for span in spans],
            (lane.rows - 1 - row, 0.9),
            facecolors=[_color(lane, span, len(timeline.units)) for span in spans],
        )
    for at in timeline.steps:
        axis.axvline(at * 1e-9, color="black", linewidth=0.6)
    axis.set_yticks([])
    axis.set_ylim(-0.1, lane.rows)
    axis.set_title(lane.name, fontsize=8, loc="left", pad=2)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _color(lane: Lane, span: Span, units: int) -> Any:
    if lane.key == "bound":
        return _BOUND[span.kind]
    if span.kind == "wait" or span.unit < 0:
        return _WAIT
    return colorsys.hls_to_rgb(span.unit * 300 / 360 / max(1, units - 1), 0.45, 0.6)
