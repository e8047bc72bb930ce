"""Progress of a run: a live bar on a terminal that rich can draw it on, a line a step elsewhere."""

import sys
from collections.abc import Callable
from typing import Any

from overspill.cli import output
from overspill.extras import MissingExtra, need
from overspill.memory import human

# What the figures of the log are called, here and in `overspill top`.
SPEED = "tokens/s"
TIERS = {"host_used_bytes": "host", "device_bytes": "device", "nvme_allocated_bytes": "nvme"}
TIMES = {
    "compute_seconds": "compute",
    "update_seconds": "update",
    "read_seconds": "read",
    "write_seconds": "write",
    "wait_seconds": "waited",
}
SKIPPED = "SKIPPED (not finite)"


def _figures(record: dict[str, Any]) -> str:
    tiers = [
        f"{word} {human(record[key])}" for key, word in TIERS.items() if key != "device_bytes" or record[key]
    ]
    times = [f"{word} {record[key]:.2f}" for key, word in TIMES.items()]
    skipped = [SKIPPED] if record["skipped"] else []
    speed = f"{record['tokens_per_s']:.0f} {SPEED}"
    return "  ".join([f"loss {record['loss']:.4f}", speed, *tiers, f"{'  '.join(times)} s", *skipped])


class Display:
    """Use as a context manager. `step` takes the record that the log gets too; `say` prints a line beside the bar."""

    def __init__(self, first: int, steps: int):
        self.first, self.steps = first, steps
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> "Display":
        if sys.stdout is not None and sys.stdout.isatty() and self._has_rich():
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = ("{task.completed}/{task.total}", BarColumn(20), TextColumn("{task.description}"))
            self._bar = Progress(*columns, TimeRemainingColumn())
            self._task = self._bar.add_task("", total=self.steps, completed=self.first)
            self._draw(self._bar.start)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._draw(self._bar.stop)

    @staticmethod
    def _has_rich() -> bool:
        try:
            need("rich")
        except MissingExtra as error:
            output.say(f"a line a step and no bar: {str(error).removeprefix('overspill: ')}")
            return False
        return True

    def step(self, record: dict[str, Any]) -> None:
        if self._bar is not None:
            at = {"completed": record["step"], "description": _figures(record)}
            self._draw(lambda: self._bar.update(self._task, **at))
        else:
            output.say(f"step {record['step']}/{self.steps}  {_figures(record)}")

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._draw(lambda: self._bar.console.print(text, highlight=False, markup=False))
        else:
            output.say(text)

    @staticmethod
    def _draw(act: Callable[[], None]) -> None:
        """A terminal that is gone ends no run either."""
        try:
            act()
        except (OSError, ValueError) as error:
            output.refused("stdout", error)
