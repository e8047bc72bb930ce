"""Tokens a second over host memory, a line for each number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..extras import need
from .step import Estimate

GIB = 1 << 30


def draw(rows: Mapping[int, Sequence[tuple[int, Estimate]]], ranks: int, path: str | Path) -> None:
    """Writes a PNG or an SVG, by the name's ending. `ranks`: whose line is thick. Raises MissingExtra, OSError."""
    need("matplotlib")  # not pyplot, whose choice of a backend is the script's
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for number, found in rows.items():
        fits = [(host / GIB, step.tokens_per_s) for host, step in found if step.plan is not None]
        if fits:
            axes.plot(
                *zip(*fits),
                "o-",
                lw=2.5 if number == ranks else 1.2,
                label=f"{number} rank{'s' * (number > 1)}",
            )
    not_there = [host / GIB for host, step in next(iter(rows.values())) if step.plan is None]
    for host in not_there:
        axes.axvline(host, color="gray", ls=":", lw=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks([host / GIB for host, _ in next(iter(rows.values()))])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.4g}")
    axes.set_yscale("log")
    axes.set_xlabel(
        "host memory of a rank, GiB" + ("; dotted: the fewest ranks do not fit" if not_there else "")
    )
    axes.set_ylabel("tokens a second, of all ranks (simulated)")
    if axes.lines:
        axes.legend()
    figure.savefig(path, dpi=110)
