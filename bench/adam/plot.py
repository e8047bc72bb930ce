"""The plot of bench/adam/run.py."""

from pathlib import Path
from typing import Any


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars: parameters a second of each contender, a panel for each size that does not fit the cache; a line over a
    bar is the limit of a loop that only reads and writes the same streams."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    sizes = sorted({row["parameters"] for row in rows if row["parameters"] > 16 << 20}) or [
        row["parameters"] for row in rows[:1]
    ]
    if not sizes:
        return
    figure, panels = pyplot.subplots(
        1, len(sizes), figsize=(6 * len(sizes), 3.8), sharey=True, layout="constrained", squeeze=False
    )
    for panel, size in zip(panels[0], sizes):
        here = [row for row in rows if row["parameters"] == size]
        names = [
            name
            for name in ("torch", "deepspeed", "fp32", "exact", "fp16", "compact", "8bit")
            if any(row["contender"] == name for row in here)
        ]
        threads = sorted({row["threads"] for row in here})
        width = 0.8 / len(threads)
        for row in here:
            k = threads.index(row["threads"])
            x = names.index(row["contender"]) - 0.4 + (k + 0.5) * width
            color = ("#9db8d9", "#3566a8", "#1f3a66")[k % 3]
            known = panel.get_legend_handles_labels()[1]
            label = f"{row['threads']} thread{'s' * (row['threads'] > 1)}"
            panel.bar(
                x, row["params_per_s"] * 1e-9, width, color=color, label=None if label in known else label
            )
            if "limit_params_per_s" in row:
                y = row["limit_params_per_s"] * 1e-9
                panel.plot([x - width / 2, x + width / 2], [y, y], color="#b5472f", linewidth=2)
        panel.plot([], [], color="#b5472f", linewidth=2, label="limit: reads and writes only")
        panel.set_xticks(range(len(names)), names)
        panel.set_title(f"AdamW, {size >> 20} Mi parameters", fontsize=10)
    panels[0][0].set_ylabel("G parameters a second")
    panels[0][0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
