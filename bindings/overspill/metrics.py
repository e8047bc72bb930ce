"""An engine's figures as metrics of Prometheus: names, labels and words. The figures are those of `stats()`,
`report()` and the last step; docs/monitoring.md lists the metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from . import _core
from .exposition import Family, Sample, counter, each, gauge, text

# Metric -> what stats() calls it, and what it is.
_COUNTED = {
    "steps_total": ("step", "Updates of the run, skipped ones included"),
    "skipped_steps_total": ("skipped_steps", "Updates that were skipped: a gradient had an inf or a NaN"),
    "updates_total": ("updates", "Chunks that the CPU has updated"),
    "gathers_total": ("gathers", "Units whose weights were brought beside their home"),
    "trace_departures_total": ("trace_departures", "Passes that left the order of units that was recorded"),
    "activation_written_bytes_total": ("activations_written_bytes", "Activations written to NVMe"),
    "activation_read_bytes_total": ("activations_read_bytes", "Activations read back from NVMe"),
}
_GUESSES = {"taken": "guesses_taken", "dropped": "guesses_dropped"}

# The caller's time. These add up to that of all steps.
_SPENT = {
    "forward": "forward_seconds",
    "backward": "backward_seconds",
    "outside": "outside_seconds",
    "engine": "call_seconds",
    "waiting": "wait_seconds",
}
_WORK = {"update": "update_seconds", "read": "read_seconds", "write": "write_seconds"}
_HIDDEN = {"update": "update_hidden_seconds", "disk": "disk_hidden_seconds"}

# Metric of each NVMe folder -> its kind, what stats()["paths"] calls it, and what it is.
_OF_PATH = {
    "nvme_read_bytes_total": ("counter", "read_bytes", "Bytes read from the folder"),
    "nvme_written_bytes_total": ("counter", "written_bytes", "Bytes written to the folder"),
    "nvme_busy_seconds_total": ("counter", "busy_seconds", "A transfer of the folder was under way"),
    "nvme_stalls_total": ("counter", "stalls", "Times that the disk did not answer for long"),
    "nvme_stalled_seconds": (
        "gauge",
        "stalled_seconds",
        "For how long the disk has not answered; 0: it does",
    ),
    "nvme_read_bytes_per_second": (
        "gauge",
        "read_bytes_per_s",
        "Measured speed of reads; 0: not measured yet",
    ),
    "nvme_write_bytes_per_second": (
        "gauge",
        "write_bytes_per_s",
        "Measured speed of writes; 0: not measured yet",
    ),
    "nvme_reserved_bytes": ("gauge", "reserved_bytes", "Room that the engine's files take in the folder"),
}


def common(engine: Any) -> dict[str, str]:
    """Labels of all metrics of an engine: its rank, where there are several."""
    return {"rank": str(engine.rank)} if engine.world_size > 1 else {}


def of_engine(engine: Any) -> str:
    """What `Engine.metrics` returns."""
    stats = engine.stats()
    families = [
        *_counts(engine, stats),
        *_times(engine),
        *_tiers(engine, stats),
        *_folders(stats["paths"]),
        *_last_step(engine),
    ]
    return text(families, common(engine))


def _counts(engine: Any, stats: dict[str, Any]) -> Iterator[Family]:
    for name, (key, words) in _COUNTED.items():
        yield counter(name, words, stats[key])
    yield counter("micro_batches_total", "Micro-batches of this rank that have ended", engine.micro_steps)
    size = engine.config.train_micro_batch_size_per_gpu
    if size is not None:
        yield counter("samples_total", "Samples in the micro-batches of this rank", engine.micro_steps * size)
    guesses = {outcome: stats[key] for outcome, key in _GUESSES.items()}
    yield each("guesses_total", "counter", "Chunks updated in backward (speculation)", "outcome", guesses)


def _times(engine: Any) -> Iterator[Family]:
    sums, last = engine._core.report_sum().as_dict(), engine.report()
    if last is not None:
        yield gauge("step_seconds", "Duration of the last step", last["total_seconds"])
    spent = {of: sums[key] for of, key in _SPENT.items()}
    yield each("time_seconds_total", "counter", "The caller's time, in all steps", "spent", spent)
    words = "The caller waited, by what for"
    yield each("wait_seconds_total", "counter", words, "cause", sums["wait_by_cause"])
    words = "The caller waited while a disk was busy and no update ran"
    yield counter("disk_wait_seconds_total", words, sums["wait_for_disk_seconds"])
    work = {of: sums[key] for of, key in _WORK.items()}
    yield each("work_seconds_total", "counter", "At least one was under way", "work", work)
    hidden = {of: sums[key] for of, key in _HIDDEN.items()}
    yield each("hidden_seconds_total", "counter", "Of it, while nobody waited", "work", hidden)


def _tiers(engine: Any, stats: dict[str, Any]) -> Iterator[Family]:
    held = {"host": stats["host_used_bytes"], "nvme": stats["nvme_allocated_bytes"]}
    budgets = {"host": stats["host_budget_bytes"]}
    if engine.device.type != "cpu":
        held["device"] = stats["device_bytes"]
        if engine.config.budget.device is not None:
            budgets["device"] = engine.config.budget.device
    yield each("held_bytes", "gauge", "What the engine holds in each tier", "tier", held)
    yield each("budget_bytes", "gauge", "What it may hold there", "tier", budgets)
    words = "The most that it has held in host memory"
    yield gauge("host_peak_bytes", words, stats["host_peak_bytes"])
    resident = engine.memory["resident_bytes"]
    yield gauge("process_resident_bytes", "Resident memory of the process", resident)


def _folders(paths: list[dict[str, Any]]) -> Iterator[Family]:
    for name, (kind, key, words) in _OF_PATH.items():
        yield each(name, kind, words, "path", {path["path"]: path[key] for path in paths})
    closed = {path["path"]: path["closed"] != "" for path in paths}
    yield each("nvme_closed", "gauge", "1: the folder takes no new data (full, or failed)", "path", closed)
    retries = [Sample(n, {"path": p["path"], "of": of}) for p in paths for of, n in p["retries"].items()]
    yield Family("nvme_retries_total", "counter", "Transfers that were tried again", tuple(retries))
    used, written = [], []
    for path in paths:
        for drive in _core.drives(path["path"]):
            labels = {"path": path["path"], "drive": drive["name"]}
            if drive["percentage_used"] is not None:
                used.append(Sample(drive["percentage_used"] / 100, labels))
                written.append(Sample(drive["written_bytes"], labels))
    yield Family("drive_used_ratio", "gauge", "Of its endurance, as the drive says", tuple(used))
    words = "Bytes written over the drive's life, by whomever"
    yield Family("drive_written_bytes_total", "counter", words, tuple(written))


def _last_step(engine: Any) -> Iterator[Family]:
    last = engine.last_step
    if last is not None:
        words = "Of all gradients, before clipping, in the last step"
        yield gauge("gradient_norm", words, last.norm)
        yield gauge("clip_factor", "What they were multiplied by", last.clip)
    yield gauge("loss_scale", "What backward multiplies the loss by", engine.current_loss_scale)
    rates = {str(number): float(group["lr"]) for number, group in enumerate(engine.optimizer.param_groups)}
    yield each("learning_rate", "gauge", "Of each group of parameters", "group", rates)
