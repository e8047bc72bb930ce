"""What `overspill top` draws: lines of text, at most as wide as the terminal, from the figures of run_watch.py."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.text import Text

from overspill.cli.display import SKIPPED, SPEED, TIERS, TIMES
from overspill.cli.output import harmless
from overspill.memory import human

LABEL = 24  # columns
VALUE = 24
MOST_BAR = 40
STYLES = {"training": "green", "starting": "green", "finishing": "green", "ended": "green"}
LEAST_SHARE = 0.005  # of a step: shorter waits have no row
_TIER_WORDS = {key.partition("_")[0]: word for key, word in TIERS.items()}


class Signs:
    """Characters of bars and curves."""

    def __init__(self, ascii_only: bool):
        self.full, self.empty = ("#", ".") if ascii_only else ("█", "░")
        self.levels = "_.-=*#" if ascii_only else "▁▂▃▄▅▆▇█"


def frame(figures: dict[str, Any], width: int, ascii_only: bool = False) -> Text:
    """width: in columns. ascii_only: the terminal has no other characters."""
    signs = Signs(ascii_only)
    bar = max(6, min(MOST_BAR, width - LABEL - VALUE - 2))
    lines = [
        *_head(figures, width),
        *_progress(figures, width, bar, signs),
        *_tiers(figures, bar, signs),
        *_times(figures, bar, signs),
        *_disks(figures),
        _checkpoints(figures),
    ]
    text = Text("\n").join(_cut(line, width) for line in lines)
    text.no_wrap, text.overflow = True, "crop"
    return text


def duration(seconds: float | None) -> str:
    """0.012 -> "12 ms", 0.48 -> "0.48 s", 133 -> "2 min 13 s", 11100 -> "3 h 5 min"."""
    if seconds is None or not math.isfinite(seconds):
        return "unknown"
    if 0 < seconds < 0.1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 10:
        return f"{max(seconds, 0):.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    first = next((at for at, (count, _) in enumerate(parts) if count), 3)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2] if count)


def whole(seconds: float) -> str:
    """Of what is not measured to parts of a second: 3.2 -> "3 s"."""
    return duration(seconds) if seconds >= 10 else f"{max(0.0, seconds):.0f} s"


def curve(values: Sequence[float], columns: int, levels: str) -> str:
    """A sign for each stretch of the values: the higher, the larger their mean. What is not finite is a gap."""
    columns = min(columns, len(values))
    if columns < 1:
        return ""
    edges = [len(values) * at // columns for at in range(columns + 1)]
    stretches = [values[a:b] for a, b in itertools.pairwise(edges)]
    means = [math.fsum(s) / len(s) if all(map(math.isfinite, s)) else math.nan for s in stretches]
    finite = [mean for mean in means if math.isfinite(mean)]
    if not finite:
        return " " * columns
    low, span = min(finite), max(finite) - min(finite)
    top = len(levels) - 1
    return "".join(
        levels[round((mean - low) / span * top) if span > 0 else 0] if math.isfinite(mean) else " "
        for mean in means
    )


def _cut(line: Text, width: int) -> Text:
    line.truncate(width, overflow="ellipsis")
    return line


def _head(figures: dict[str, Any], width: int) -> Iterator[Text]:
    state, said = figures["state"], ""
    if state in ("stopped", "killed"):
        said = f" at step {figures['step']}"
    if figures["stalled_seconds"] is not None:
        said = f", no step for {whole(figures['stalled_seconds'])}"
    elif state == "training" and figures["since_seconds"] is not None:
        said = f", the last step {whole(figures['since_seconds'])} ago"
    style = "red" if figures["stalled_seconds"] is not None else STYLES.get(state, "yellow")
    path, room = harmless(figures["run"]), max(12, width - len(state) - len(said) - 2)
    if len(path) > room:
        path = "…" + path[-(room - 1) :]
    yield Text.assemble((path, "bold"), "  ", (state + said, style))
    if state == "killed":
        yield Text("its process is gone, and did not say that it ends", "yellow")


def _progress(figures: dict[str, Any], width: int, bar: int, signs: Signs) -> Iterator[Text]:
    step, steps = figures["step"], figures["steps"]
    if figures["loss"] is None:
        yield Text("no step has ended yet")
        return
    share = step / steps if steps else None
    left = f", {whole(figures['left_seconds'])} left" if figures["left_seconds"] is not None else ""
    percent = "" if share is None else f"{share:.0%}{left}"
    yield _row(f"step {step}/{steps or '?'}", share, percent, bar, signs)
    speed = figures["tokens_per_s"]
    rate = "" if speed is None else f"{speed:.0f} {SPEED}, "
    words = [f"{rate}{duration(figures['seconds'])} per step"]
    words += [f"{name} {figures[name]:.3g}" for name in ("lr", "norm") if figures[name] is not None]
    yield Text("  ".join(words) + (f"  {SKIPPED}" if figures["skipped"] else ""))
    loss = f"loss {figures['loss']:.4f}"
    shape = curve(figures["losses"], bar, signs.levels)
    line = Text.assemble(f"{loss:<{LABEL}}", (shape, "cyan"))
    if figures["heldout"]:
        at = max(figures["heldout"])
        line.append(f"  held out {figures['heldout'][at]:.4f}")
    yield line


def _row(label: str, share: float | None, value: str, bar: int, signs: Signs, style: str = "cyan") -> Text:
    """A label, a bar of which `share` is full (none where it is not known), and a value."""
    if share is None or not math.isfinite(share):
        return Text(f"{label:<{LABEL}}{'':{bar}}  {value}")
    full = min(bar, max(0, round(share * bar)))
    return Text.assemble(
        f"{label:<{LABEL}}", (signs.full * full, style), (signs.empty * (bar - full), "dim"), f"  {value}"
    )


def _title(words: str) -> Iterator[Text]:
    yield Text("")
    yield Text(words, "bold")


def _tiers(figures: dict[str, Any], bar: int, signs: Signs) -> Iterator[Text]:
    if not figures["tiers"]:
        return
    ranks = figures["ranks"] or 1
    yield from _title("memory and disk" + (f", rank 0 of {ranks}" if ranks > 1 else ""))
    for name, tier in figures["tiers"].items():
        held, of = tier["held_bytes"], tier["of_bytes"]
        share = held / of if of else None
        yield _row(_TIER_WORDS[name], share, human(held) + (f" of {human(of)}" if of else ""), bar, signs)
    if figures["rss_bytes"] is not None:
        yield _row("process (RSS)", None, human(figures["rss_bytes"]), bar, signs)


def _times(figures: dict[str, Any], bar: int, signs: Signs) -> Iterator[Text]:
    spent, total = figures["spent"], figures["seconds"]
    if not total or any(spent[key] is None for key in TIMES):
        return
    yield from _title(f"the last step, {duration(total)}")

    def row(label: str, seconds: float, style: str) -> Text:
        return _row(label, seconds / total, f"{duration(seconds)}, {seconds / total:.0%}", bar, signs, style)

    compute, waited = "compute_seconds", "wait_seconds"
    yield row(TIMES[compute], spent[compute], "green")
    yield row(TIMES[waited], spent[waited], "red")
    causes = sorted((figures["wait_by_cause"] or {}).items(), key=lambda each: -each[1])
    for cause, seconds in causes:
        if seconds / total >= LEAST_SHARE:
            yield row(f"  for {harmless(cause).replace('_', ' ')}", seconds, "red")
    yield row("other", max(0.0, total - spent[compute] - spent[waited]), "yellow")
    yield Text("in the background, for as long as at least one ran:", "dim")
    for key in TIMES:
        if key not in (compute, waited):
            yield row(TIMES[key], spent[key], "cyan")


def _disks(figures: dict[str, Any]) -> Iterator[Text]:
    for disk in figures["disks"]:
        yield from _title(harmless(disk["path"]))
        if disk["read_bytes_per_s"] is not None:
            speeds = f"read {human(disk['read_bytes_per_s'])}/s, write {human(disk['written_bytes_per_s'])}/s"
            yield Text(f"{speeds} over the last step")
        yield Text(f"read {human(disk['read_bytes'])}, written {human(disk['written_bytes'])} by the run")
        for drive in disk["drives"]:
            yield Text(harmless(drive))


def _checkpoints(figures: dict[str, Any]) -> Text:
    found = figures["checkpoints"]
    if not found["count"]:
        return Text("\nno checkpoint yet")
    age = "" if found["age_seconds"] is None else f", {whole(found['age_seconds'])} old"
    return Text(f"\ncheckpoints: {found['count']}, the newest {harmless(found['newest'])}{age}")
