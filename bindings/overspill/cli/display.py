"""Progress of a run: a live bar on a terminal that rich can draw it on, a line a step elsewhere."""

import sys
from collections.abc import Callable
from typing import Any

from overspill.cli import output
from overspill.extras import MissingExtra, need
from overspill.memory import human


def _figures(record: dict[str, Any]) -> str:
    skipped = "  SKIPPED (not finite)" if record["skipped"] else ""
    return (
        f"loss {record['loss']:.4f}  {record['tokens_per_s']:.0f} tokens/s  host {human(record['host_used_bytes'])}  "
        f"nvme {human(record['nvme_allocated_bytes'])}  compute {record['compute_seconds']:.2f}  "
        f"update {record['update_seconds']:.2f}  read {record['read_seconds']:.2f}  "
        f"write {record['write_seconds']:.2f}  waited {record['wait_seconds']:.2f} s{skipped}"
    )


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
