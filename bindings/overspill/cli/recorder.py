"""What a run leaves for other tools: a trace of two steps, and TensorBoard's files."""

import contextlib
from pathlib import Path
from typing import Any


class Recorder:
    """Entered around each step: from the third on, two of them are recorded to `path`, if there is one."""

    FIRST, STEPS = 3, 2

    def __init__(self, engine: Any, path: str | None):
        self.engine, self.path, self.step = engine, path, 0
        self.recording = contextlib.ExitStack()

    def __enter__(self) -> None:
        self.step += 1
        if self.path and self.step == self.FIRST:
            self.recording.enter_context(self.engine.trace(self.path))

    def __exit__(self, error: Any, *_: Any) -> None:
        if error or self.step == self.FIRST + self.STEPS - 1:
            self.recording.close()


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
