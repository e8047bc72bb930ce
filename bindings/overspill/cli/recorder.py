"""What a run leaves for other tools: two steps as they went, and its curves in TensorBoard or Weights & Biases."""

import contextlib
import hashlib
import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from overspill.cli.common import CliError, describe

NONE = "none"


class Record(NamedTuple):
    """The option that asks for it, and the file."""

    option: str
    path: str

    def __str__(self) -> str:
        return f"{self.option} {self.path}" if self.option == "--trace" else f"{self.option} ({self.path})"


class Recorder:
    """Entered around each step: from the third on, two of them are recorded, if `asked` says to what. Training does not
    depend on the record: `warn` is told where it is not written, or holds less than that, and the run goes on."""

    FIRST, STEPS = 3, 2

    def __init__(self, engine: Any, asked: Record | None, warn: Callable[[str], None]):
        self.engine, self.asked, self.warn, self.step = engine, asked, warn, 0
        self.recording = contextlib.ExitStack()
        self.has_timeline = False

    def __enter__(self) -> None:
        self.step += 1
        if self.asked is not None and self.step == self.FIRST:
            record = self.engine.trace if self.asked.option == "--trace" else self.engine.timeline
            try:
                self.recording.enter_context(record(self.asked.path))
            except Exception as error:  # its folder went since the start, for instance
                self.warn(f"overspill: {self.asked} was not written: {error}")
                self.asked = None

    def __exit__(self, error: Any, *_: Any) -> None:
        if error or self.step == self.FIRST + self.STEPS - 1:
            self._write()

    def finish(self, made: int) -> None:
        """After the last step. `made`: steps that were finished, which may be fewer than those to record."""
        self._write()
        self.has_timeline = (
            self.asked is not None and self.asked.option == "--timeline" and self.step >= self.FIRST
        )
        if self.asked is not None and made < self.FIRST + self.STEPS - 1:
            outcome = "the file holds less" if self.step >= self.FIRST else "nothing was written"
            self.warn(
                f"overspill: {self.asked} records the third and fourth step of a process, and this one "
                f"finished {made}: {outcome}; give more --steps"
            )

    def _write(self) -> None:
        try:
            self.recording.close()
        except Exception as error:  # whatever a full disk, or a library of pictures, raises
            self.warn(f"overspill: {self.asked} was not written: {error}")
            self.asked = None


def check_trace(path: str | None, and_timeline: bool = False) -> None:
    """Raises CliError for a place where no trace can be written: it is known before the first step. `and_timeline`:
    that is asked for, too."""
    if path is None:
        return
    if and_timeline:
        raise CliError("--trace and --timeline record the same two steps: give one of them")
    folder = Path(path).parent
    if Path(path).is_dir():
        raise CliError(f"--trace {path} is a folder; name a file")
    if not folder.is_dir():
        state = "is no folder" if folder.exists() else "does not exist"
        raise CliError(f"--trace {path}: {folder} {state}; name a file in a folder that is there")
    if not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise CliError(f"--trace {path} cannot be written; name a file in a folder that you may write to")


class Board:
    """What shows a run's curves, called with each step's record; `close` at the end. Training does not depend on it:
    at its first error `warn` is told, and nothing is written from then on."""

    def __init__(self, what: str, warn: Callable[[str], None]):
        self.what, self.warn = what, warn
        self._writer: Any = None
        self._attempt(self._open)

    def __call__(self, record: dict[str, Any]) -> None:
        if self._writer is not None:
            self._attempt(lambda: self._write(_numbers(record), record["step"]))

    def close(self) -> None:
        if self._writer is not None:
            self._attempt(self._close)

    def _open(self) -> None:
        """Sets `_writer`, unless there is nothing to write with."""
        raise NotImplementedError

    def _write(self, numbers: dict[str, float], step: int) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        self._writer = None

    def _attempt(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # whatever its thread met, or a broken installation raises
            self._writer = None
            self.warn(
                f"overspill: {self.what} are not written from here on ({describe(error).text}); log.jsonl has all of it"
            )


class TensorBoard(Board):
    """Its files, in the folder `tensorboard` of the run. A thread of TensorBoard's writes, and ends for good at its
    first error."""

    def __init__(self, folder: Path, warn: Callable[[str], None]):
        self.folder = folder / "tensorboard"
        super().__init__(f"TensorBoard's files in {self.folder}", warn)

    def _open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.folder))

    def _write(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()


class WeightsAndBiases(Board):
    """A run of the project "overspill" (WANDB_PROJECT names another), whose name is the folder's. One that goes on is
    the same run there."""

    def __init__(self, folder: Path, settings: dict[str, Any], warn: Callable[[str], None]):
        self.folder, self.settings = folder, settings
        super().__init__("Weights & Biases' records", warn)

    def _open(self) -> None:
        import wandb

        known = hashlib.sha256(str(self.folder).encode()).hexdigest()[:16]
        self._writer = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "overspill"),
            dir=str(self.folder),
            name=self.folder.name,
            id=os.environ.get("WANDB_RUN_ID", known),
            resume="allow",
            config=self.settings,
        )

    def _write(self, numbers: dict[str, float], step: int) -> None:
        self._writer.log(numbers, step=step)

    def _close(self) -> None:
        self._writer.finish()
        self._writer = None


BOARDS = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}


def check_boards(asked: Sequence[str] | None) -> None:
    """Raises CliError for one that is asked for and not installed."""
    for name in asked or ():
        if name != NONE and not _is_there(BOARDS[name]):
            raise CliError(f"--report-to {name}: it is not installed: pip install {name}")
    if asked and NONE in asked and len(asked) > 1:
        raise CliError(f"--report-to {' '.join(asked)}: none stands alone")


def boards(
    asked: Sequence[str] | None, folder: Path, settings: dict[str, Any], warn: Callable[[str], None]
) -> list[Board]:
    """Those that are asked for; where nothing is said, TensorBoard if it is installed."""
    if asked is None:
        asked = ["tensorboard"] if _is_there(BOARDS["tensorboard"]) else []
    made: dict[str, Callable[[], Board]] = {
        "tensorboard": lambda: TensorBoard(folder, warn),
        "wandb": lambda: WeightsAndBiases(folder, settings, warn),
    }
    return [made[name]() for name in dict.fromkeys(asked) if name != NONE]


def _is_there(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


_NO_CURVES = ("step", "steps", "ranks", "ended")


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    numbers = {name: value for name, value in record.items() if isinstance(value, (int, float))}
    return {name: float(value) for name, value in numbers.items() if name not in _NO_CURVES}
