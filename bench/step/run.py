"""What a training step takes, beside DeepSpeed ZeRO-3 in the same placement and beside its own floor.

GPT models with random weights (bf16, batch and length stated) are trained in turn, in one run:

    plain                  torch, forward and backward alone, no optimizer: the floor of compute and of memory; once
                           more while fio keeps the disk busy, which is the floor of the disk under compute too
    ours ram               everything in host memory
    ours nvme              optimizer states on NVMe, weights and gradients in memory, clipping on
    ours speculative       the same, updated while backward runs; nothing is clipped in fact
    ours all-nvme          everything on NVMe, a host budget of 1 GiB
    deepspeed ram, nvme    ZeRO-3, optimizer offloaded to CPU, to NVMe

Each is a process, stopped between its turns, so that a turn pays for as many updates as it has steps. A ratio is the
median of the rounds' own ratios. A contender that fails, is killed or has no room is a row that says so. Bytes are the
kernel's (/proc/PID/io). Ends with RESULT {json}; docs/step.md explains the keys.

    bench/step/run.py                                 160 M and 690 M, all placements
    bench/step/run.py --sizes 160 --rounds 3          3 minutes
    bench/step/run.py --sizes 160 --placements nvme --trace runs/step.json
"""

import argparse
import contextlib
import datetime
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import gpt
import peers
from budgets import plan_error
from huge_pages import huge_pages
from placements import (
    PLACEMENTS,
    THEIRS,
    available_bytes,
    count,
    deepspeed_config,
    needed_bytes,
    our_config,
)
from turns import Child, Failed, in_turn, machine

ROOT = Path(__file__).resolve().parents[2]

STATES_BYTES = 10  # a parameter, on NVMe
BLOCK = 8 << 20  # of fio
SMALL = ("tiny", "160")  # models whose steps are short enough for seven budgets
FIRST = (  # of the largest size, what RESULT begins with
    "nvme_step_vs_bound",
    "nvme_speculative_vs_floor",
    "floors_beaten",
    "ram_step_vs_deepspeed",
    "nvme_step_vs_deepspeed",
    "nvme_speculative_vs_deepspeed",
    "ram_bytes_per_param",
    "ram_bytes_per_param_and_plains_weights",
    "nvme_opt_ram_bytes_per_param",
    "nvme_opt_ram_bytes_per_param_and_plains_weights",
    "nvme_moved_bytes_per_param",
)


class Fio:
    """Reads and writes at once, as fast as the disk takes them, while the `with` lasts. Its file is as large as what
    the engine moves: this machine's disk is a tenth faster on 1 GiB of it than on 12."""

    def __init__(self, folder: Path, huge: bool, size: int):
        self.command = [
            "fio",
            "--name=load",
            f"--filename={folder / 'fio.bin'}",
            f"--size={size}",
            f"--bs={BLOCK}",
        ]
        self.command += ["--iodepth=32", "--ioengine=io_uring", "--direct=1", "--scramble_buffers=0"]
        self.command += ["--fixedbufs=1", "--registerfiles=1", "--output-format=json"]
        self.command += ["--iomem=mmaphuge"] if huge else []  # what make bench-io found best for both at once
        subprocess.run([*self.command, "--rw=write"], check=True, capture_output=True)
        self.process: Any = None
        self.bytes_per_s = 0.0

    def __enter__(self) -> "Fio":
        more = ["--rw=rw", "--overwrite=1", "--time_based", "--runtime=600"]
        self.process = subprocess.Popen(
            [*self.command, *more], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        time.sleep(0.5)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGINT)
        out = self.process.communicate()[0]
        job = json.loads(out[out.index("{") :])["jobs"][0]
        moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
        self.bytes_per_s = moved / (max(job["read"]["runtime"], job["write"]["runtime"]) * 1e-3)


class Size:
    """All contenders over one model."""

    def __init__(self, name: str, args: argparse.Namespace, folder: Path):
        self.name, self.args, self.folder = name, args, folder
        self.shape = gpt.SHAPES[name]
        self.parameters = count(self.shape)
        self.group = 0
        self.alive: dict[str, Child] = {}
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.said: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, str] = {}
        self.plain_peak_bytes = 0  # before the update's arrays are there

    def run(self) -> dict[str, Any]:
        """Rounds over every group of contenders that have room side by side."""
        shape = self.shape
        print(
            f"\n{self.name} M: {self.parameters / 1e6:.0f} M parameters (width {shape.width}, {shape.layers} layers), "
            f"B = {shape.batch}, T = {shape.length}",
            flush=True,
        )
        self.fio = Fio(self.folder, self.args.huge, STATES_BYTES * self.parameters // BLOCK * BLOCK)
        for number, group in enumerate(self.groups()):
            self.group = number
            try:
                for name in group:
                    self.start(name)
                self.rounds()
                if self.args.trace:
                    self.trace()
            finally:
                for contender in self.alive.values():
                    contender.close()
                self.alive = {}
        self.table()
        return self.result()

    def groups(self) -> list[list[str]]:
        """All at once where there is room; else a placement at a time, beside plain, and last, alone, those of
        DeepSpeed that have no room beside anybody."""
        wanted = [f"ours {p}" for p in self.args.placements]
        if self.args.deepspeed:
            theirs = {THEIRS[p] for p in self.args.placements if p in THEIRS}
            wanted += [f"deepspeed {p}" for p in sorted(theirs, reverse=True)]
        room = available_bytes() * 0.95
        if self.needed(["plain", *wanted]) <= room:
            return [["plain", *wanted]]
        together, alone = [], []
        for in_ram in (False, True):
            names = [name for name in wanted if name.endswith(" ram") == in_ram]
            if self.needed(["plain", *names]) > room:
                alone += [[name] for name in names if name.startswith("deepspeed")]
                names = [name for name in names if not name.startswith("deepspeed")]
            if names:
                together.append(["plain", *names])
        return together + alone

    def needed(self, names: list[str]) -> int:
        return sum(needed_bytes(name, self.parameters) for name in names)

    def start(self, name: str) -> None:
        """Starts a contender and lets it take its first steps, or notes why not."""
        if available_bytes() < self.needed([name]):
            self.failed[name] = (
                f"no room: about {self.needed([name]) / 1e9:.0f} GB, {available_bytes() / 1e9:.0f} are free"
            )
            print(f"  {name:18} {self.failed[name]}", flush=True)
            return
        began = time.perf_counter()
        log = self.folder / f"{name.replace(' ', '-')}.log"
        try:
            self.alive[name] = Child(*self.command(name), log, rests=True)
            self.said[name] = self.alive[name].hello
            warm = self.alive[name].ask(do="turn", steps=2)
            if name == "plain":
                self.plain_peak_bytes = warm["peak_rss_bytes"]
            print(
                f"  {name:18} ready after {time.perf_counter() - began:.0f} s, "
                f"{warm['peak_rss_bytes'] / 1e9:.2f} GB",
                flush=True,
            )
        except Failed as error:
            self.drop(name, str(error))

    def drop(self, name: str, why: str) -> None:
        print(f"  {name:18} FAILED: {why}", flush=True)
        self.failed[name] = why
        if name in self.alive:
            self.alive.pop(name).close()

    def command(self, name: str) -> tuple[list[str], dict[str, str]]:
        """Its command line and environment."""
        who, _, placement = name.partition(" ")
        job: dict[str, Any] = {"shape": self.shape}
        disk = self.folder / name.replace(" ", "-")
        disk.mkdir(exist_ok=True)
        if who == "deepspeed":
            job["config"] = deepspeed_config(placement, disk, self.shape.batch)
            program, env = peers.python(), peers.environment()
        else:
            program, env = sys.executable, dict(os.environ)
        if who == "ours":
            job["config"] = our_config(placement, disk, self.parameters)
        script = "zero3.py" if who == "deepspeed" else f"{who}.py"
        return [program, str(ROOT / "bench/step" / script), json.dumps(job)], env

    def rounds(self) -> None:
        """Turns, in an order that rotates."""
        if "plain" in self.alive:
            self.alive["plain"].ask(do="update")
        for number in range(self.args.rounds):
            for name in in_turn(list(self.alive), number):
                try:
                    turn = self.turn(name)
                except Failed as error:
                    self.drop(name, str(error))
                    continue
                self.rows.setdefault(name, []).append(turn | {"at": (self.group, number)})
            line = ", ".join(f"{name} {self.rows[name][-1]['step']:.2f}" for name in self.alive)
            print(f"  round {number + 1}/{self.args.rounds}, s a step: {line}", flush=True)

    def turn(self, name: str) -> dict[str, Any]:
        """One turn's figures; `step`: seconds of one step, the mean of the turn's."""
        contender, steps = self.alive[name], self.args.steps
        turn = contender.ask(do="turn", steps=steps)
        if name != "plain":
            return turn | {"step": statistics.mean(turn["steps"])}
        with self.fio:
            time.sleep(1.5)
        alone = self.fio.bytes_per_s
        with self.fio:
            busy = contender.ask(do="turn", steps=steps)
        floors = {
            "forward": statistics.mean(turn["forward"]),
            "backward": statistics.mean(turn["backward"]),
            "forward_busy": statistics.mean(busy["forward"]),
            "backward_busy": statistics.mean(busy["backward"]),
            "disk_alone_bytes_per_s": alone,
            "disk_busy_bytes_per_s": self.fio.bytes_per_s,
            "disk_bytes_per_s": max(alone, self.fio.bytes_per_s),  # compute may slow it, never speed it up
        } | contender.ask(do="update")
        step = floors["forward"] + floors["backward"]
        return floors | {"step": step, "peak_rss_bytes": self.plain_peak_bytes}

    def trace(self) -> None:
        """Three steps of ours, for ui.perfetto.dev."""
        for name, contender in self.alive.items():
            if name.startswith("ours"):
                path = self.args.trace.with_suffix(f".{self.name}-{name.split()[1]}.json")
                path.parent.mkdir(parents=True, exist_ok=True)
                contender.ask(do="trace", path=str(path))
                print(f"  trace {path}", flush=True)

    # ---- figures

    def median(self, name: str, key: str) -> float:
        return statistics.median(row[key] for row in self.rows[name])

    def ratio(self, ours: str, theirs: Any) -> float | None:
        """Median over rounds of ours / theirs: another contender's step, or what a function makes of plain's."""
        name = theirs if isinstance(theirs, str) else "plain"
        floor = (lambda row: row["step"]) if isinstance(theirs, str) else theirs
        if isinstance(theirs, str) and self.apart(ours, theirs):
            return round(self.median(ours, "step") / self.median(name, "step"), 3)
        floors = {row["at"]: row for row in self.rows.get(name, [])}
        pairs = [
            row["step"] / floor(floors[row["at"]]) for row in self.rows.get(ours, []) if row["at"] in floors
        ]
        return round(statistics.median(pairs), 3) if pairs else None

    def apart(self, one: str, two: str) -> bool:
        """Both were measured, one after the other."""
        groups = [{row["at"][0] for row in self.rows.get(name, [])} for name in (one, two)]
        return all(groups) and not groups[0] & groups[1]

    def moved(self, name: str) -> float:
        """Bytes a parameter and step."""
        rows = self.rows[name]
        total = sum(row["read_bytes"] + row["written_bytes"] for row in rows)
        return total / (sum(len(row["steps"]) for row in rows) * self.parameters)

    def bound(self, plain: dict[str, Any]) -> float:
        """T_backward + max(T_forward, (20 N - 2 R) / bandwidth): nothing is updated before the norm is known."""
        disk = self.disk_bytes("ours nvme", ahead=True) / plain["disk_bytes_per_s"]
        return plain["backward"] + max(plain["forward_busy"], disk)

    def floor(self, plain: dict[str, Any]) -> float:
        """max(compute + update, disk)."""
        disk = self.disk_bytes("ours speculative", ahead=False) / plain["disk_bytes_per_s"]
        return max(plain["forward_busy"] + plain["backward_busy"] + plain["update"], disk)

    def disk_bytes(self, name: str, ahead: bool) -> float:
        plan = self.said[name]["plan"]
        ring = plan["ring_slots"] * plan["ring_slot_bytes"]
        return (
            plan["nvme_read_bytes_per_step"]
            + plan["nvme_written_bytes_per_step"]
            - (2 * ring if ahead else 0)
        )

    def table(self) -> None:
        """The rows, for people."""
        columns = ("s a step", "compute", "update", "read", "write", "wait", "peak RSS", "NVMe B/param")
        print(f"\n  {'':18}" + "".join(f"{c:>13}" for c in columns))
        for name, rows in self.rows.items():
            cells = [f"{self.median(name, 'step'):.2f}"]
            if name == "plain":
                busy = self.median(name, "forward_busy") + self.median(name, "backward_busy")
                cells += [f"({busy:.2f} busy)", f"{self.median(name, 'update'):.2f}", "", "", ""]
            elif "report" in rows[0]:
                for key in ("compute", "update", "read", "write", "wait"):
                    value = statistics.median(row["report"][f"{key}_seconds"] for row in rows)
                    cells.append(f"{value:.2f}")
            else:
                serial = statistics.median(statistics.mean(row["updates"]) for row in rows)
                cells += ["", f"{serial:.2f} serial", "", "", ""]
            cells.append(f"{max(row['peak_rss_bytes'] for row in rows) / 1e9:.2f} GB")
            cells.append(f"{self.moved(name):.2f}" if name != "plain" else "")
            print(f"  {name:18}" + "".join(f"{cell:>13}" for cell in cells))
        for name, why in self.failed.items():
            print(f"  {name:18} {why}")

    def result(self) -> dict[str, Any]:
        """This size's keys."""
        peak = {name: max(row["peak_rss_bytes"] for row in rows) for name, rows in self.rows.items()}
        found: dict[str, Any] = {
            "parameters": self.parameters,
            "batch": self.shape.batch,
            "length": self.shape.length,
            "nvme_step_vs_bound": self.ratio("ours nvme", self.bound),
            "nvme_speculative_vs_floor": self.ratio("ours speculative", self.floor),
            "ram_step_vs_deepspeed": self.ratio("ours ram", "deepspeed ram"),
            "nvme_step_vs_deepspeed": self.ratio("ours nvme", "deepspeed nvme"),
            "nvme_speculative_vs_deepspeed": self.ratio("ours speculative", "deepspeed nvme"),
            "nvme_moved_bytes_per_param": {
                name.split()[1]: round(self.moved(name), 3) for name in self.rows if name.startswith("ours")
            },
            "step_seconds": {name: round(self.median(name, "step"), 3) for name in self.rows},
            "peak_rss_bytes": peak,
            "failed": self.failed,
            # Not in turn with ours: what it is compared by are medians of other minutes.
            "deepspeed_alone": sorted(
                {place for ours, place in THEIRS.items() if self.apart(f"ours {ours}", f"deepspeed {place}")}
            ),
        }
        if "plain" not in self.rows:
            return found
        floors = ("forward", "backward", "forward_busy", "backward_busy", "update")
        disks = ("disk_alone_bytes_per_s", "disk_busy_bytes_per_s", "disk_bytes_per_s")
        found["floors"] = {key: round(self.median("plain", key), 4) for key in (*floors, *disks)}
        found["floors_beaten"] = [
            key
            for key in ("nvme_step_vs_bound", "nvme_speculative_vs_floor")
            if found[key] is not None and found[key] < 1
        ]  # then the floor was measured wrong, or the machine drifted: the ratio says nothing
        found["peak_above_plain_bytes"] = {
            name.split()[1]: peak[name] - peak["plain"] for name in peak if name.startswith("ours")
        }
        for key, name in (("ram_bytes_per_param", "ours ram"), ("nvme_opt_ram_bytes_per_param", "ours nvme")):
            if name in peak:
                above = (peak[name] - peak["plain"]) / self.parameters
                found[key] = round(above, 2)
                found[f"{key}_and_plains_weights"] = round(above + 4, 2)  # its bf16 weights and gradients
        return found


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = list(gpt.SHAPES)
    parser.add_argument("--sizes", default="160,690", help=f"of {','.join(known)} (millions of parameters)")
    parser.add_argument("--placements", default=",".join(PLACEMENTS), help=f"of {','.join(PLACEMENTS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="of a turn; from 2 on a report lies in one turn")
    parser.add_argument("--no-deepspeed", dest="deepspeed", action="store_false", help="leave it out")
    parser.add_argument(
        "--no-budgets",
        dest="budgets",
        action="store_false",
        help="leave out the planner's seven budgets (160 M)",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "results",
        help="on the file system to measure; what is left is removed",
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="at the end, three steps for ui.perfetto.dev"
    )
    args = parser.parse_args()
    args.sizes, args.placements = args.sizes.split(","), args.placements.split(",")
    for given, allowed in ((args.sizes, known), (args.placements, PLACEMENTS)):
        for name in given:
            if name not in allowed:
                parser.error(f"'{name}' is none of {', '.join(allowed)}")
    return args


def main() -> int:
    args = options()
    if shutil.which("fio") is None:
        print("bench-step: fio is not there; tools/peers installs it", file=sys.stderr)
        return 1
    if args.deepspeed and not peers.deepspeed_is_there():
        print("bench-step: DeepSpeed is left out: tools/peers could not install it")
        args.deepspeed = False
    args.folder.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, Any] = {}
    began = time.perf_counter()
    with (
        tempfile.TemporaryDirectory(prefix="bench-step-", dir=args.folder) as name,
        huge_pages() as args.huge,
    ):
        for size in args.sizes:
            folder = Path(name) / size
            folder.mkdir()
            one = Size(size, args, folder)
            sizes[size] = one.run()
            if args.budgets and size in SMALL:
                sizes[size] |= plan_error(one.shape, one.parameters, folder)
            shutil.rmtree(folder)
    result = {"bench": "step", "date": datetime.date.today().isoformat(), "machine": machine()}
    result |= {"rounds": args.rounds, "seconds": round(time.perf_counter() - began)}
    largest = sizes[args.sizes[-1]]
    result |= {key: largest[key] for key in FIRST if key in largest}
    result["plan_error"] = next((of["plan_error"] for of in sizes.values() if "plan_error" in of), None)
    result["all_nvme_peak_bytes"] = {
        size: of["peak_above_plain_bytes"].get("all-nvme") for size, of in sizes.items() if "floors" in of
    }
    print(f"RESULT {json.dumps(result | {'sizes': sizes})}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(BrokenPipeError):
        try:
            sys.exit(main())
        except KeyboardInterrupt:
            print("bench-step: stopped; what it made is removed", file=sys.stderr)
            sys.exit(130)
