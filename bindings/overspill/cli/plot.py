"""A picture of a run: loss, and the bytes in each tier, over time."""

from pathlib import Path
from typing import Any

from overspill import durable
from overspill.extras import need

GIB = 1 << 30


def plot(records: list[dict[str, Any]], heldout: dict[int, float], budget_bytes: int, path: Path) -> None:
    """Writes a PNG, in place of what has the name `path`. `records` are the log's lines, `heldout` the held-out loss by
    step."""
    if not records:
        return
    need("matplotlib").use("Agg")
    from matplotlib import pyplot

    elapsed, seconds = [], 0.0
    for record in records:
        seconds += record["seconds"]
        elapsed.append(seconds)
    by_step = dict(zip((r["step"] for r in records), elapsed))

    figure, (top, bottom) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 7), layout="constrained")
    top.plot(elapsed, [r["loss"] for r in records], color="tab:blue", label="training")
    if heldout:
        points = [(by_step.get(step, 0.0), loss) for step, loss in sorted(heldout.items())]
        top.plot(*zip(*points), "o--", color="tab:orange", label="held out")
    top.set_ylabel("loss")
    top.legend()
    for key, label in (
        ("host_used_bytes", "host"),
        ("nvme_allocated_bytes", "NVMe"),
        ("rss_bytes", "process (RSS)"),
    ):
        bottom.plot(elapsed, [r[key] / GIB for r in records], label=label)
    bottom.axhline(budget_bytes / GIB, color="gray", linestyle=":", label="host budget")
    bottom.set_ylim(bottom=0)
    bottom.set_ylabel("GiB")
    bottom.set_xlabel("seconds of training")
    bottom.legend()
    try:
        with durable.new_file(path) as file:
            figure.savefig(file, format="png", dpi=110)
    finally:
        pyplot.close(figure)
