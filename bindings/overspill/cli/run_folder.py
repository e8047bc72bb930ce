"""The folder of a training run: settings, log, checkpoints, plot. Nobody else's files are ever touched.

run.json                      settings, digest of the data, held-out loss before training
log.jsonl                     one line a step
checkpoints/step-000040/      what core.save wrote, and hf/: config and tokenizer files for merge
plot.png
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from overspill.cli.common import CliError, copy_small_files

STEP = re.compile(r"step-(\d{6,})")


class RunFolder:
    """Paths and records below one folder."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self.log_path = self.path / "log.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.plot_path = self.path / "plot.png"
        self._run_json = self.path / "run.json"

    def stored(self) -> dict[str, Any] | None:
        """What run.json says; None where there is no run. Raises CliError when it is damaged."""
        if not self._run_json.is_file():
            return None
        try:
            return dict(json.loads(self._run_json.read_text()))
        except ValueError:
            raise CliError(f"{self._run_json} is damaged; start a new run in another --out") from None

    def check(self, resume: bool) -> None:
        """Refuses a folder that holds something else, and a run that is there already or is not. Raises CliError."""
        if self.path.exists() and not self.path.is_dir():
            raise CliError(f"--out {self.path} is a file; name a folder")
        run = self._run_json.is_file()
        others = sorted(p.name for p in self.path.iterdir()) if self.path.exists() else []
        if others and not run:
            raise CliError(
                f"--out {self.path} holds something else ({', '.join(others[:3])}); name a new folder"
            )
        if run and not resume:
            raise CliError(
                f"--out {self.path} holds a run; add --resume to go on with it, or name a new folder"
            )
        if resume and not run:
            raise CliError(
                f"--resume: {self.path} holds no run (no run.json); leave --resume out to start one"
            )

    def write(self, values: dict[str, Any]) -> None:
        """Replaces run.json, whole or not at all; makes the folder."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        _replace(self._run_json, json.dumps(values, indent=2) + "\n")

    def checkpoint_path(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    def saved(self) -> list[tuple[int, Path]]:
        """Checkpoints by step, oldest first, complete or not."""
        found = []
        for path in self.checkpoints.iterdir() if self.checkpoints.is_dir() else ():
            if match := STEP.fullmatch(path.name):
                found.append((int(match[1]), path))
        return sorted(found)

    def latest(self) -> Path | None:
        """The newest complete checkpoint: one with a manifest, which is written last.

        It is never passed over for damage in it: that is for the load to report.
        """
        complete = [path for _, path in self.saved() if (path / "manifest.json").exists()]
        return complete[-1] if complete else None

    def remove_leftovers(self) -> None:
        """Removes what a kill in the middle of a save left behind."""
        for path in [*self.checkpoints.glob("step-*.partial"), *(path for _, path in self.saved())]:
            if not (path / "manifest.json").exists() or path.suffix:
                shutil.rmtree(path)

    def finish_checkpoint(self, path: Path, model: Path, keep: int) -> None:
        """Adds what merge needs, and removes all but the newest `keep` checkpoints."""
        part = path / "hf.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        copy_small_files(model, part)
        shutil.rmtree(path / "hf", ignore_errors=True)
        part.rename(path / "hf")
        for _, old in self.saved()[:-keep]:
            shutil.rmtree(old)

    def log(self, record: dict[str, Any]) -> None:
        """Appends one line, at once on its way to the disk."""
        with self.log_path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """The log's lines; one cut short by a kill is left out."""
        found = []
        for line in self.log_path.read_text().splitlines() if self.log_path.exists() else ():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found

    def rewind(self, step: int) -> None:
        """Drops the log's steps after `step`: they are about to be done again."""
        kept = [r for r in self.records() if r["step"] <= step]
        _replace(self.log_path, "".join(json.dumps(r) + "\n" for r in kept))


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    with part.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
