"""The plot of bench/gpu/run.py: how near a step is to plain PyTorch without an optimizer.

bench/gpu/plot.py OUT.svg RESULT.json [RESULT.json ...]    what runs kept, in one picture; the last run of a row counts
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

COLORS = {
    "clipped": "#3566a8",
    "clipped-24": "#b5472f",
    "default": "#5c9e6b",
    "speculative": "#8a5fb0",
    "deepspeed": "#888",
}


def draw(rows: list[dict[str, Any]], gpu: str, path: Path) -> None:
    """A panel a model: the share of the ceiling over the tokens of a step, a line a mode."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    models = sorted({row["model"] for row in rows})
    if not models:
        return
    figure, panels = pyplot.subplots(
        1, len(models), figsize=(5 * len(models), 3.6), sharey=True, layout="constrained", squeeze=False
    )
    for panel, model in zip(panels[0], models):
        here = [row for row in rows if row["model"] == model]
        for mode in dict.fromkeys(row["mode"] for row in here):
            points = sorted((row["tokens"], row["of_the_ceiling"]) for row in here if row["mode"] == mode)
            panel.plot(*zip(*points), marker="o", color=COLORS.get(mode), label=mode)
        sizes = sorted({row["tokens"] for row in here})
        panel.axhline(1.0, color="#555", linewidth=0.8, linestyle="--")
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
        panel.set_ylim(0, 1.08)
        panel.set_title(f"{model.upper()}, {gpu}", fontsize=10)
        panel.set_xlabel("tokens a step")
        panel.legend(fontsize=8, loc="lower right")
    panels[0][0].set_ylabel("of plain PyTorch without an optimizer")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def rows_of(document: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Of a RESULT, or of the rows that gpu-check keeps."""
    results = [document] if "gpu" in document else [
        row["result"] for row in document["rows"] if "of_the_ceiling" in json.dumps(row.get("result"))
    ]  # fmt: skip
    return [row for result in results for row in result["rows"]], results[0]["gpu"] if results else ""


def main() -> None:
    out, *files = map(Path, sys.argv[1:])
    found, gpu = {}, ""
    for file in files:
        rows, gpu = rows_of(json.loads(file.read_text()))
        found |= {(row["model"], row["mode"], row["tokens"]): row for row in rows}
    draw(list(found.values()), gpu, out)


if __name__ == "__main__":
    main()
