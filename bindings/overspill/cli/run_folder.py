"""The folder of a training run: settings, log, checkpoints, plot. Nobody else's files are ever touched.

run.json                      settings, digest of the data, held-out loss, what the run went on from and saved
log.jsonl                     one line a step
log.jsonl.abandoned-1         the log of a run that began anew, since nothing of it was saved
checkpoints/step-000040/      what core.save wrote, and hf/: config and tokenizer files for merge (checkpoints.py)
plot.png
timeline.json                 two steps, where train was asked for them (overspill timeline)
lock                          held by the process that trains (run_lock.py)
"""

import json
import os
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from overspill import durable
from overspill.cli import run_record
from overspill.cli.checkpoints import Checkpoints
from overspill.cli.common import CliError
from overspill.cli.run_lock import RunLock
from overspill.saves import is_complete, rename_aside

PART = re.compile(
    r"(run\.json|log\.jsonl|plot\.png|timeline\.(json|html))\.part(-[0-9a-f]{8})?"
)  # a write that a kill cut short
ENGINES = re.compile(r"overspill-.+")  # what an engine makes in a folder for NVMe
NEEDED = (
    "loss",
    "seconds",
    "host_used_bytes",
    "nvme_allocated_bytes",
    "rss_bytes",
)  # of a line: what plot.png shows
WENT_ON_FROM = "went_on_from"  # in run.json, after a rewind
SAVED = "saved"  # in run.json: the step of the branch's last save, null before the first; earlier versions lack it


class RunFolder:
    """Paths and records below one folder."""

    def __init__(self, path: Path):
        self.path = Path(path).absolute()
        self.log_path = self.path / "log.jsonl"
        self.checkpoints = Checkpoints(self.path / "checkpoints")
        self.plot_path = self.path / "plot.png"
        self.timeline_path = self.path / "timeline.json"
        self._run_json = self.path / "run.json"
        self._lock: RunLock | None = None
        self._unwritten = ""  # lines of the log for which there was no room

    def command(self, ranks: int = 1) -> str:
        """What goes on with the run, which has so many ranks."""
        arguments = f"train --out {shlex.quote(str(self.path))} --resume"
        if ranks == 1:
            return f"overspill {arguments}"
        return f"torchrun --nproc_per_node={ranks} -m overspill.cli {arguments}"

    def stored(self) -> dict[str, Any] | None:
        """What run.json says; None where there is no run. Raises CliError when it is damaged."""
        if not self._run_json.is_file():
            return None
        try:
            record = json.loads(self._run_json.read_text(encoding="utf-8"))
            wrong = run_record.wrong(record)
        except (ValueError, RecursionError):
            wrong = "it is no JSON"
        if wrong:
            raise CliError(
                f"{self._run_json} is damaged: {wrong}; mend it, or start a new run in another --out"
            )
        return record

    def check(self, resume: bool) -> None:
        """Refuses a file, and a run that is there already or is not. Raises CliError."""
        if self.path.exists() and not self.path.is_dir():
            raise CliError(f"--out {self.path} is a file; name a folder")
        run = self._run_json.is_file()
        if run and not resume:
            raise CliError(self._taken())
        if resume and not run:
            raise CliError(
                f"--resume: {self.path} holds no run (no run.json); leave --resume out to start one"
            )

    def check_new(self, own: Iterable[str]) -> None:
        """Refuses the folder of a new run where it holds something else. Raises CliError.

        `own`: folders that the run is told to use; a start that was killed may have begun to fill them."""
        if not self.path.exists():
            return
        resolved = [Path(folder).resolve() for folder in own]
        others = sorted(p.name for p in self.path.iterdir() if not self._of_a_start(p, resolved))
        if others:
            raise CliError(
                f"--out {self.path} holds something else ({', '.join(others[:3])}); name a new folder"
            )

    def _taken(self) -> str:
        return f"--out {self.path} holds a run; add --resume to go on with it, or name a new folder"

    def _of_a_start(self, path: Path, own: list[Path]) -> bool:
        """What a start that was killed before its run.json leaves: the next one may take it over. `own` is resolved,
        so `path`, which may lead through a link or be one, is too."""
        here = self.path.resolve()
        target = Path(os.path.realpath(path))  # takes a link that leads to itself, too
        if target in own or any(here / path.name in folder.parents for folder in own):
            return True
        if here in own and ENGINES.fullmatch(path.name):
            return True
        if path == self.checkpoints.folder:
            return path.is_dir() and not any(path.iterdir())
        return path.name == RunLock.NAME or PART.fullmatch(path.name) is not None

    def lock(self) -> None:
        """Keeps other processes out until `unlock`. Raises CliError naming the process that is in."""
        if self._lock is None:
            durable.make_folders(self.path)
            self._lock = RunLock(self.path)

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def begin(self) -> None:
        """Makes and locks the folder of a new run. Raises CliError where another process was faster. What else is there
        since `check` is the run's own: it may keep the cache or the engine's files there."""
        self.lock()
        if self._run_json.is_file():
            raise CliError(self._taken())

    def write(self, values: dict[str, Any]) -> None:
        """Replaces run.json, whole or not at all."""
        durable.make_folders(self.checkpoints.folder)
        durable.write_text(self._run_json, json.dumps(values, indent=2) + "\n")

    def rewind(self, run: dict[str, Any], base: Path | None, step: int) -> list[Path]:
        """Makes `base`, of `step`, the newest of the branch that goes on, and writes `run`. Later checkpoints are set
        aside, and returned under their new names; the log's later steps are dropped: they are about to be done again.
        Raises CliError, before anything is changed, for a damaged log.

        Killed in the middle, the next `to_go_on_from` is still `base`.
        """
        checkpoints = self.checkpoints
        kept = [r for r in self.records() if r["step"] <= step]
        off = checkpoints.off_branch(base) if base else []
        cut_short = not run.get(WENT_ON_FROM, {"others_set_aside": True})["others_set_aside"]
        if off or cut_short or (base and not checkpoints.has(base)):
            self.write({**run, WENT_ON_FROM: {"checkpoint": str(base), "others_set_aside": False}})
            off = [checkpoints.set_aside(path, "abandoned") for path in off if is_complete(path)]
            run[WENT_ON_FROM] = {"checkpoint": str(base), "others_set_aside": True}
        run["heldout"] = {at: loss for at, loss in run["heldout"].items() if int(at) <= step}
        run[SAVED] = step if base and checkpoints.has(base) else None
        self.write(run)
        durable.write_text(self.log_path, "".join(json.dumps(r) + "\n" for r in kept))
        checkpoints.remove_leftovers()
        for path in self.path.iterdir():
            if PART.fullmatch(path.name):
                path.unlink()
        return off

    def begin_anew(self, run: dict[str, Any]) -> Path | None:
        """As `rewind`, to step 0, of a run that saved nothing. Its log is kept: returned under its new name, None where
        it has no step."""
        old = rename_aside(self.log_path, "abandoned") if self.records() else None
        self.rewind(run, None, 0)
        return old

    def to_go_on_from(self, stored: dict[str, Any]) -> Path | None:
        """The newest checkpoint of the branch that goes on; None where nothing was saved. Raises CliError where
        something was, and is not to be seen: to begin without it would do the run's steps again, over its log."""
        rewound = stored.get(WENT_ON_FROM)
        cut_short = rewound is not None and not rewound["others_set_aside"]
        if not cut_short and (own := self.checkpoints.latest()):
            return own
        base = Path(rewound["checkpoint"]) if rewound else None
        saved = None if cut_short else stored.get(SAVED)
        if base is not None and saved is None and is_complete(base):
            return base
        unknown = base is None and SAVED not in stored
        steps = len(self.records()) if unknown else 0
        if base is None and saved is None and not steps:
            return None
        others = [path for _, path in self.checkpoints.complete()] + self.checkpoints.aside()
        if base is not None and is_complete(base):
            others.append(base)
        listed = f" (there are {', '.join(map(str, others))})" if others else ""
        raise CliError(
            f"--resume: {self._unseen(base, saved, steps)}name what to go on from with --resume PATH{listed}, or "
            "start a new run in another --out"
        )

    def _unseen(self, base: Path | None, saved: int | None, steps: int) -> str:
        """What the run went on from, or saved, and is not there; the first way out."""
        if saved is None and base is not None:
            return f"the run went on from {base}, which is gone, and it has saved none since; "
        did = f"saved step {saved}"
        if saved is None:
            did = f"is of an earlier version, which did not note its saves, and made {steps} steps"
        folder = self.checkpoints.folder
        return f"the run {did}, and {folder} holds no checkpoint; mount the disk that {folder} is on, or "

    def log(self, record: dict[str, Any]) -> None:
        """Appends one line, at once on its way to the disk. Raises OSError when there is no room: what could not be
        written comes with the next line."""
        self._unwritten += json.dumps(record) + "\n"
        with self.log_path.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                text = self._unwritten.encode()
                while text:
                    text = text[file.write(text) :]
            except OSError:
                file.truncate(end)
                raise
        self._unwritten = ""

    def sync_log(self) -> None:
        """Makes the log durable: a checkpoint's steps are in it whenever the checkpoint is there."""
        if self.log_path.exists():
            with self.log_path.open("a") as file:
                os.fsync(file.fileno())
            durable.sync_folder(self.path)

    def records(self) -> list[dict[str, Any]]:
        """The log's lines; a last one that a crash cut short is left out. Raises CliError for another one that is
        damaged."""
        lines = self.log_path.read_bytes().split(b"\n") if self.log_path.exists() else []
        while lines and not lines[-1]:
            lines.pop()
        found = []
        for number, line in enumerate(lines, 1):
            record = parsed_line(line)
            if record is None and number == len(lines):
                break
            wrong = "it is no JSON" if record is None else wrong_line(record)
            if wrong:
                raise CliError(
                    f"{self.log_path}:{number} is damaged: {wrong}. Only the log and plot.png need it: delete that "
                    "line to go on without it, or mend it"
                )
            found.append(record)
        return found


def parsed_line(line: bytes) -> Any:
    """None for what is no JSON in UTF-8."""
    try:
        return json.loads(line.decode())
    except (ValueError, RecursionError):
        return None


def wrong_line(record: Any) -> str:
    """What makes a line of the log useless; empty where nothing does."""
    if not isinstance(record, dict):
        return f"an object is expected, not {type(record).__name__}"
    if type(record.get("step")) is not int or not 0 <= record["step"] < 2**63:
        return f"step = {record.get('step')!r:.40} is no number of a step"
    bad = [name for name in NEEDED if not is_number(record.get(name))]
    return f"{bad[0]} = {record.get(bad[0])!r:.40} is no number" if bad else ""


def is_number(value: Any) -> bool:
    """Whether a float can be it. A loss that is not finite is one."""
    return type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)
