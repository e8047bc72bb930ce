"""What a run leaves for other tools: a trace of two steps, and TensorBoard's files."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from overspill.cli.common import CliError


class Recorder:
    """Entered around each step: from the third on, two of them are recorded to `path`, if there is one. Training does
    not depend on the trace: `warn` is told where it is not written, or holds less than that, and the run goes on."""

    FIRST, STEPS = 3, 2

    def __init__(self, engine: Any, path: str | None, warn: Callable[[str], None]):
        self.engine, self.path, self.warn, self.step = engine, path, warn, 0
        self.recording = contextlib.ExitStack()

    def __enter__(self) -> None:
        self.step += 1
        if self.path and self.step == self.FIRST:
            try:
                self.recording.enter_context(self.engine.trace(self.path))
            except OSError as error:  # its folder went since the start
                self.warn(f"overspill: --trace {self.path} was not written: {error}")
                self.path = None

    def __exit__(self, error: Any, *_: Any) -> None:
        if error or self.step == self.FIRST + self.STEPS - 1:
            self._write()

    def finish(self, made: int) -> None:
        """After the last step. `made`: steps that were finished, which may be fewer than those to record."""
        self._write()
        if self.path and made < self.FIRST + self.STEPS - 1:
            outcome = "the file holds less" if self.step >= self.FIRST else "nothing was written"
            self.warn(
                f"overspill: --trace {self.path} records the third and fourth step of a process, and this one "
                f"finished {made}: {outcome}; give more --steps"
            )

    def _write(self) -> None:
        try:
            self.recording.close()
        except (OSError, RuntimeError) as error:
            self.warn(f"overspill: --trace {self.path} was not written: {error}")


def check_trace(path: str | None) -> None:
    """Raises CliError for a place where no trace can be written: it is known before the first step."""
    if path is None:
        return
    folder = Path(path).parent
    if Path(path).is_dir():
        raise CliError(f"--trace {path} is a folder; name a file")
    if not folder.is_dir():
        state = "is no folder" if folder.exists() else "does not exist"
        raise CliError(f"--trace {path}: {folder} {state}; name a file in a folder that is there")
    if not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise CliError(f"--trace {path} cannot be written; name a file in a folder that you may write to")


def tensorboard(folder: Path):
    """A function that takes a step's record, or None where TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    writer = SummaryWriter(str(folder / "tensorboard"))

    def write(record: dict[str, Any]) -> None:
        for key, value in record.items():
            if key not in ("step", "nvme_paths"):
                writer.add_scalar(key, float(value), record["step"])
        writer.flush()

    return write
