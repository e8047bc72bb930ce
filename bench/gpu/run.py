"""A training step on a GPU beside plain PyTorch that has no optimizer: the ceiling. Both in turn, in one run.

    bench/gpu/run.py [--models 1b 7b] [--tokens 4096 16384 32768 65536] [--rounds 3] [--modes clipped clipped-24:32768]
        [--minutes 9]

Modes of the engine, all with fp32 masters and clipping; MODE:TOKENS,TOKENS is for other tokens than --tokens says:
    clipped       all states in host memory; gathered weights may take what they need of the GPU
    clipped-24    as on a card of 24 GB: 6 GiB for weights, and for first units that live there where the host budget
                  lacks room; 16 GiB for torch, micro-batches of 32,768 tokens
    largest-24    the same, and what has no room goes to --nvme: for models larger than host memory
    speculative   as clipped, but nothing is large enough to be clipped, and updates are made in backward as far as
                  the host budget holds states twice
    default       what the engine does when no device budget is given: half of the GPU is its own
    deepspeed     ZeRO-3 with everything in host memory, clipping; where --deepspeed-python has it

Ends with RESULT {json}, and prints it after every row already: for every row the median seconds of both, their ratio,
and what bounds a step: the link (weights up, gradients down), the update (measured: what is left of it when nothing
hides it), the compute. With
--trace, from the device's own events, how much of the copies lies under compute.
Exit status 3 where there is no GPU. `--device host --models tiny --tokens 64` tries it out without one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
from llama import SHAPES, floating_point_operations
from overlap import overlap
from plot import draw
from turns import Child, Failed, in_turn, machine

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Mode:
    options: tuple[str, ...] = ()
    micro_tokens: int = 1 << 20  # all of a step in one
    torch_bytes: int = 0  # that torch may take; 0: all
    who: str = "ours"
    disk: bool = False


MODES = {
    "clipped": Mode(("--placement", "host", "--device-budget", "all")),
    "clipped-24": Mode(("--device-budget", "6GiB"), 32768, 16 << 30),
    "largest-24": Mode(("--device-budget", "6GiB"), 32768, 16 << 30, disk=True),
    "speculative": Mode(("--placement", "host", "--device-budget", "all", "--speculate", "--clip", "1e9")),
    "default": Mode(),
    "deepspeed": Mode(who="deepspeed"),
}


@dataclass
class Row:
    model: str
    mode: str
    tokens: int
    plain: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)

    def told(self, parameters: int, link: dict[str, float]) -> dict[str, Any]:
        plain, ours = statistics.median(self.plain), statistics.median(self.ours)
        moved = {"up": 2 * parameters / link["up"], "down": 2 * parameters / link["down"]} if link else {}
        bounds = {"compute": plain, "update": statistics.median(self.update), **moved}
        flops = floating_point_operations(SHAPES[self.model], self.tokens)
        return {
            "model": self.model,
            "mode": self.mode,
            "tokens": self.tokens,
            "steps": len(self.ours),
            "plain_seconds": round(plain, 4),
            "seconds": round(ours, 4),
            "of_the_ceiling": round(plain / ours, 3),
            "tokens_per_second": round(self.tokens / ours),
            "plain_tflops": round(flops / plain / 1e12, 1),
            "bounds_seconds": {name: round(seconds, 4) for name, seconds in bounds.items()},
            "largest_bound": max(bounds, key=bounds.__getitem__),
        }


def link_bytes_per_second(device: torch.device, size: int = 1 << 30) -> dict[str, float]:
    """Of copies from and to pinned memory, the best of five."""
    if device.type != "cuda":
        return {}
    host, there = (
        torch.empty(size, dtype=torch.uint8, pin_memory=True),
        torch.empty(size, dtype=torch.uint8, device=device),
    )
    found = {}
    for way, to, source in (("up", there, host), ("down", host, there)):
        seconds = []
        for _ in range(5):
            torch.cuda.synchronize(device)
            started = time.perf_counter()
            to.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - started)
        found[way] = size / min(seconds)
    del host, there, to, source
    torch.cuda.empty_cache()
    return found


def has_deepspeed(python: str) -> bool:
    look = [python, "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('deepspeed') is None)"]
    return subprocess.run(look, capture_output=True).returncode == 0


class Run:
    def __init__(self, args: argparse.Namespace):
        self.args, self.log = args, Path(tempfile.mkdtemp(prefix="overspill-bench-gpu-"))
        self.rows: list[Row] = []
        self.failures: dict[str, str] = {}
        self.memory: dict[str, Any] = {}
        self.overlap: dict[str, Any] = {}
        self.parameters: dict[str, int] = {}
        self.left_out: dict[str, str] = {}
        self.until = time.monotonic() + args.minutes * 60 if args.minutes else math.inf
        self.device = torch.device("cpu" if args.device == "host" else args.device)
        self.link = link_bytes_per_second(self.device)

    def too_late(self, row: str) -> bool:
        """Whether the minutes are over: then nothing begins any more, and the row is told of."""
        if time.monotonic() < self.until:
            return False
        self.left_out[row] = f"the {self.args.minutes:g} minutes were over"
        return True

    def told(self) -> dict[str, Any]:
        return {
            "machine": machine(),
            "gpu": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "none",
            "torch": torch.__version__,
            "link_bytes_per_second": {way: round(speed) for way, speed in self.link.items()},
            "parameters": self.parameters,
            "rows": [row.told(self.parameters[row.model], self.link) for row in self.rows],
            "memory": self.memory,
            "overlap": self.overlap,
            "failures": self.failures,
            "left_out": self.left_out,
        }

    def start(self, who: str, model: str, name: str, options: list[str], alone: bool = True) -> Child:
        print(f"{model} {name}: starting", flush=True)
        python = self.args.deepspeed_python if who == "deepspeed" else sys.executable
        command = [python, str(HERE / "contender.py"), who, "--model", model, "--device", self.args.device]
        programs = os.pathsep.join((str(Path(python).parent), os.environ["PATH"]))  # ninja, of DeepSpeed's
        log = self.log / f"{model}-{name}.log"
        return Child([*command, *options], env={**os.environ, "PATH": programs}, log=log, alone=alone)

    def of_model(self, model: str) -> None:
        if self.too_late(model):
            return
        plain = self.start("plain", model, "plain", [], alone=False)  # the engine starts meanwhile
        try:
            for name, tokens in self.args.modes:
                for micro_batches, sizes in self._by_micro_batches(name, model, tokens).items():
                    if self.too_late(f"{model} {name} {sizes}"):
                        continue
                    try:
                        self._beside(plain, model, name, micro_batches, sizes)
                    except Failed as error:
                        self.failures[f"{model} {name}"] = str(error)
                        print(f"{model} {name}: {error}", flush=True)
                        log = self.log / f"{model}-{name}-{micro_batches}.log"
                        print("\n".join(log.read_text().splitlines()[-60:]), flush=True)
        finally:
            plain.close()

    @staticmethod
    def _by_micro_batches(name: str, model: str, given: list[int]) -> dict[int, list[int]]:
        """Sizes of a step by the micro-batches that it takes: an engine is made for one number of them."""
        sizes: dict[int, list[int]] = {}
        for tokens in given:
            most = max(MODES[name].micro_tokens, SHAPES[model].context)
            sizes.setdefault(-(-tokens // most), []).append(tokens)
        return sizes

    def _beside(self, plain: Child, model: str, name: str, micro_batches: int, sizes: list[int]) -> None:
        mode = MODES[name]
        options = [
            "--accumulation",
            str(micro_batches),
            "--host-budget",
            self.args.host_budget,
            *mode.options,
        ]
        if mode.disk:
            options += ["--nvme", self.args.nvme]
        options += ["--micro-tokens", str(mode.micro_tokens), "--torch-bytes", str(mode.torch_bytes)]
        ours = self.start(mode.who, model, f"{name}-{micro_batches}", options)
        print(ours.hello.get("plan", ""), flush=True)
        try:
            if model not in self.parameters:
                self.parameters[model] = plain.read()["parameters"]
            for tokens in sizes:
                if self.too_late(f"{model} {name} {tokens}"):
                    continue
                row = Row(model, name, tokens)
                try:
                    self._measure(row, plain, ours)
                finally:
                    if row.plain and row.update:
                        self.rows.append(row)
                        # Whatever comes, so much is there.
                        print("RESULT " + json.dumps(self.told()), flush=True)
            if self.args.trace and mode.who == "ours" and name == self.args.modes[0][0]:
                path = str(self.args.trace.resolve() / f"{model}-{name}-{sizes[-1]}.json")
                ours.ask(do="trace", tokens=sizes[-1], path=path)
                self.overlap[f"{model} {sizes[-1]}"] = overlap(Path(path))
            self.memory[f"{model} {name} {micro_batches}"] = ours.ask(do="memory")
        finally:
            ours.close()

    def _measure(self, row: Row, plain: Child, ours: Child) -> None:
        for child in (plain, ours):
            child.ask(do="step", tokens=row.tokens)  # warms up
        for turn in range(self.args.rounds):
            if turn > 0 and time.monotonic() >= self.until:
                break
            for who in in_turn(["plain", "ours"], turn):
                child = plain if who == "plain" else ours
                found = child.ask(do="step", tokens=row.tokens, steps=self.args.steps)
                # An update shows in the step after its own: the first one of a turn has none before it.
                seconds = found["step_seconds"][1:] or found["step_seconds"]
                (row.plain if who == "plain" else row.ours).extend(seconds)
                if who == "ours":
                    row.update.append(found["finish_seconds"])


def mode_of(text: str, tokens: list[int], parser: argparse.ArgumentParser) -> tuple[str, list[int]]:
    """The mode, and the sizes of a step in it."""
    name, colon, own = text.partition(":")
    if name not in MODES:
        parser.error(f"--modes: unknown mode {name!r} (known: {', '.join(MODES)})")
    try:
        return name, [int(each) for each in own.split(",")] if colon else tokens
    except ValueError:
        parser.error(f"--modes: {own!r} are no tokens of a step: give {name}:4096,32768")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["1b", "7b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 16384, 32768, 65536])
    parser.add_argument(
        "--modes", nargs="+", default=list(MODES), metavar="MODE[:TOKENS,...]",
        help=f"{', '.join(MODES)} (default: all)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=0, help="begin nothing afterwards; 0: no limit")
    parser.add_argument(
        "--steps", type=int, default=3, help="of a turn; its first is not counted (default 3)"
    )
    parser.add_argument(
        "--host-budget",
        default="100GiB",
        help="of 128 GiB: the model that is loaded and two contexts need the rest",
    )
    parser.add_argument(
        "--nvme", default=tempfile.gettempdir(), metavar="FOLDER",
        help="of the modes that use a disk (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--deepspeed-python", default=sys.executable, metavar="PROGRAM", help="a Python that has DeepSpeed"
    )
    parser.add_argument("--trace", type=Path, help="a folder for Perfetto traces, one a model")
    args = parser.parse_args()
    args.modes = [mode_of(text, args.tokens, parser) for text in args.modes]
    if args.device != "host" and not torch.cuda.is_available():
        print(f"bench/gpu: torch {torch.__version__} sees no GPU", file=sys.stderr)
        return 3
    run = Run(args)
    if any(name == "deepspeed" for name, _ in args.modes) and not has_deepspeed(args.deepspeed_python):
        args.modes = [mode for mode in args.modes if mode[0] != "deepspeed"]
        run.left_out["deepspeed"] = f"{args.deepspeed_python} has none (--deepspeed-python)"
        print(f"deepspeed is left out: {run.left_out['deepspeed']}", flush=True)
    for model in args.models:
        run.of_model(model)
    result = run.told()
    for row in result["rows"]:
        print(
            f"{row['model']:>5} {row['mode']:<12} {row['tokens']:>6} tokens: {row['seconds']:8.3f} s, ceiling "
            f"{row['plain_seconds']:8.3f} s: {row['of_the_ceiling']:.3f}; largest bound: {row['largest_bound']}"
        )
    if importlib.util.find_spec("matplotlib") is not None:  # which machines with a GPU may lack
        draw(result["rows"], result["gpu"], ROOT / "results/gpu-step.svg")
    print("RESULT " + json.dumps(result))
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
