"""The plot of bench/sizes/run.py."""

import statistics
from pathlib import Path
from typing import Any

COLORS = {"nvme": "#1f3a66", "plain": "#9aa0a6", "all-nvme": "#b5472f"}
NAMES = {
    "nvme": "Overspill, optimizer on NVMe",
    "plain": "torch, forward and backward alone",
    "all-nvme": "Overspill, all on NVMe, host budget 1 GiB",
}


def draw(rows: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Seconds a step over parameters, both logarithmic, beside a line of slope 1; peak RSS over parameters."""
    if not any(rows.values()):
        return
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    figure, (time, memory) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for contender, own in rows.items():
        own = sorted(own, key=lambda row: row["parameters"])
        x = [row["parameters"] / 1e6 for row in own]
        style = {"color": COLORS[contender], "label": NAMES[contender], "marker": "o", "markersize": 4}
        time.plot(x, [statistics.median(row["step_seconds"]) for row in own], **style)
        memory.plot(x, [row["peak_rss_bytes"] / 1e9 for row in own], **style)
    first = min((row for own in rows.values() for row in own), key=lambda row: row["parameters"])
    ends = (first["parameters"], max(row["parameters"] for own in rows.values() for row in own))
    start = statistics.median(first["step_seconds"])
    time.plot(
        [n / 1e6 for n in ends],
        [start * n / ends[0] for n in ends],
        color="#cccccc",
        linestyle=":",
        label="proportional to parameters",
    )
    time.set(xscale="log", yscale="log", xlabel="million parameters", ylabel="seconds a step")
    memory.set(xlabel="million parameters", ylabel="peak RSS, GB", xlim=(0, None), ylim=(0, None))
    for panel in (time, memory):
        panel.grid(True, which="both", color="#eeeeee")
        panel.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
