"""What the parts of bench/checkpoint/run.py share: the model, the folder, contenders, and what was found."""

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpt
import peers
from placements import CLIP, GIB, count
from turns import Child, Failed, quartiles

HERE = Path(__file__).resolve().parent
KEPT = 2  # checkpoints whose room the engine reserves


class Bench:
    """`found` becomes the RESULT; `skipped` and `failed` say why something is not in it."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        self.args, self.folder = args, folder
        self.shape = gpt.SHAPES[args.size]
        self.parameters = count(self.shape)
        self.dtype = trained_dtype()
        self.found: dict[str, Any] = {"dtype": self.dtype}
        self.skipped: dict[str, str] = {}
        self.failed: dict[str, str] = {}

    def skip(self, what: str, why: str) -> None:
        self.skipped[what] = why
        print(f"  {what}: skipped: {why}", flush=True)

    def ratio(self, key: str, values: list[float]) -> None:
        """The median of the rounds' own ratios, and their quartiles."""
        lower, median, upper = quartiles(values)
        self.found[key] = round(median, 3)
        self.found[f"{key}_quartiles"] = [round(lower, 3), round(upper, 3)]
        print(f"  {key:38} {median:8.3f}   quartiles {lower:.3f} {upper:.3f}", flush=True)

    def figure(self, key: str, value: Any) -> None:
        self.found[key] = round(value, 4) if isinstance(value, float) else value
        text = (
            f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else value
        )
        print(f"  {key:38} {text:>8}", flush=True)

    @contextlib.contextmanager
    def engine(
        self,
        disks: list[Path],
        placement: str = "nvme",
        dtype: str | None = None,
        shape: gpt.Shape | None = None,
        **more: Any,
    ) -> Iterator[Child]:
        """A process that trains; it rests between its turns. `more`: keys of the configuration."""
        shape = shape or self.shape
        host = GIB if placement == "nvme" else 18 * count(shape) + GIB
        engine = {"placement": placement, "device": "host", "checkpoints_kept": KEPT}
        config = {
            "budget": {"host": host, "nvme": [str(disk) for disk in disks]},
            "optimizer": {"type": "AdamW", "lr": 1e-4},
            "gradient_clipping": CLIP,
        }
        engine |= more.pop("engine", {})
        job = {"shape": shape, "config": config | {"engine": engine} | more, "dtype": dtype or self.dtype}
        with self.contender([sys.executable, str(HERE / "ours.py"), json.dumps(job)]) as child:
            yield child

    @contextlib.contextmanager
    def contender(self, command: list[str]) -> Iterator[Child]:
        log = self.folder / f"{Path(command[1]).stem}-{len(os.listdir(self.folder))}.log"
        child = Child(command, dict(os.environ), log, rests=True)
        try:
            yield child
        except BaseException:  # Ctrl-C: what it has made goes with the folder
            child.process.kill()
            child.process.wait()
            raise
        child.close()

    def once(self, program: str, *arguments: str, theirs: bool = False) -> dict[str, Any]:
        """A program that does one thing and says so in its last line. Raises Failed."""
        python, env = (peers.python(), peers.environment()) if theirs else (sys.executable, dict(os.environ))
        ended = subprocess.run(
            [python, str(HERE / program), *arguments], env=env, capture_output=True, text=True
        )
        if ended.returncode:
            lines = (ended.stderr or ended.stdout).strip().splitlines()
            raise Failed(f"{program} ended with {ended.returncode}: {lines[-1][:300] if lines else ''}")
        return json.loads(ended.stdout.strip().splitlines()[-1])


def trained_dtype() -> str:
    """bf16; fp32 where the CPU has no instructions for it, since torch then takes thirty times as long for a step."""
    flags = Path("/proc/cpuinfo").read_text().split()
    return "bfloat16" if "avx512f" in flags or platform.machine() != "x86_64" else "float32"


def seconds_of(turn: dict[str, Any], saving: bool | None = None) -> list[float]:
    """Of the steps of a turn: of those beside a save, of the others, or of all."""
    return [row["seconds"] for row in turn["steps"] if saving in (None, row["saving"])]


def median(values: list[float]) -> float:
    return statistics.median(values)
