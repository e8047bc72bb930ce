"""What a step costs as the model grows: step time and memory at seven sizes, fitted slopes, a plot.

GPT models with random weights (bf16, B = 1, T = 256; bench/step/gpt.py), one process after the other:

    nvme       Overspill, optimizer states on NVMe, weights and gradients in memory: every size
    plain      torch, forward and backward alone, no optimizer: the floor of compute and memory: every size
    all-nvme   Overspill, everything on NVMe under a host budget of 1 GiB: 160, 690 and 1500

Two steps go before those measured: the first has no states to read. Blocks are checkpointed (computed anew in
backward) where activations have no room otherwise. Bytes are the kernel's (/proc/PID/io), peak RSS is the process's
from its start. A process that has no room in memory or on disk is a row that says so. A finished row is left in
results/sizes/ and not measured again: an interrupted run goes on where it was; --fresh starts anew. Ends with RESULT
{json}; the plot is results/sizes.svg. docs/step.md explains the keys.

    bench/sizes/run.py                                                      all of it
    bench/sizes/run.py --contenders all-nvme,plain --sizes 160,690,1500     one budget of 1 GiB for three models
"""

import argparse
import datetime
import json
import math
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "step"))

import gpt
from placements import GIB, available_bytes, count, needed_bytes, our_config
from plot import draw
from turns import Child, Failed, machine

ROOT = Path(__file__).resolve().parents[2]

CONTENDERS = ("nvme", "plain", "all-nvme")
SIZES = ("50", "160", "350", "690", "1000", "1500", "3000")
ONE_BUDGET = ("160", "690", "1500")  # of all-nvme, where no --sizes are given
DISK_BYTES = {
    "nvme": 12,
    "plain": 0,
    "all-nvme": 16,
}  # a parameter: states, what is spilled, what Init builds on
LARGE = 900_000_000  # parameters, from which on fewer steps are measured
WARM_STEPS = 2


class NoRoom(Exception):
    """The message says of what, and how much."""


def activation_bytes(shape: gpt.Shape) -> int:
    """About: 18 tensors as wide as the residual stream a block, and the logits in bf16 and three times in fp32."""
    tokens = shape.batch * shape.length
    return tokens * (shape.layers * 18 * shape.width * 2 + gpt.VOCAB * 14)


def fitted(contender: str, shape: gpt.Shape) -> gpt.Shape:
    """The shape, with checkpointing where it has no room without. Raises NoRoom where it has none with it."""
    name = contender if contender == "plain" else f"ours {contender}"
    needed, free = needed_bytes(name, count(shape)), available_bytes()
    if needed > free:
        raise NoRoom(f"about {needed / 1e9:.0f} GB of memory, {free / 1e9:.0f} are free")
    return shape._replace(checkpointing=needed + activation_bytes(shape) > free)


def check_disk(contender: str, parameters: int, folder: Path) -> None:
    """Raises NoRoom."""
    needed = DISK_BYTES[contender] * parameters + (GIB if DISK_BYTES[contender] else 0)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise NoRoom(f"about {needed / 1e9:.0f} GB of disk, {free / 1e9:.0f} are free at {folder}")


def measure(contender: str, shape: gpt.Shape, steps: int, folder: Path) -> dict[str, Any]:
    """Starts the process, takes its steps, ends it. Raises Failed."""
    parameters = count(shape)
    job: dict[str, Any] = {"shape": shape}
    if contender != "plain":
        job["config"] = our_config(contender, folder, parameters)
    program = "plain.py" if contender == "plain" else "ours.py"
    command = [sys.executable, str(ROOT / "bench/step" / program), json.dumps(job)]
    process = Child(command, dict(os.environ), folder / "log")
    try:
        process.ask(do="turn", steps=WARM_STEPS)
        turn = process.ask(do="turn", steps=steps)
        expected = None if contender == "plain" else process.ask(do="predict", budgets=[])
    finally:
        process.close()
    moved = {key: turn[key] / steps for key in ("read_bytes", "written_bytes")}
    row = {"peak_rss_bytes": turn["peak_rss_bytes"], "nvme_bytes": sum(moved.values()), **moved}
    if expected is None:
        row["step_seconds"] = [a + b for a, b in zip(turn["forward"], turn["backward"], strict=True)]
        return row | {"compute_seconds": statistics.median(row["step_seconds"])}
    report = {key: turn["report"][f"{key}_seconds"] for key in ("compute", "update", "disk", "wait")}
    row |= {"step_seconds": turn["steps"], **{f"{key}_seconds": value for key, value in report.items()}}
    row |= {key: turn["stats"][key] for key in ("host_peak_bytes", "host_budget_bytes")}
    return row | {"predicted_seconds": expected["step_seconds"]}


def kept(path: Path, job: dict[str, Any]) -> dict[str, Any] | None:
    """The row of an earlier run, if it is of the same job."""
    if path.exists() and (found := json.loads(path.read_text()))["job"] == job:
        return found
    return None


def row_of(contender: str, size: str, args: argparse.Namespace) -> dict[str, Any]:
    """Kept, measured, or why there is none."""
    shape = gpt.SHAPES[size]
    parameters = count(shape)
    steps = args.steps or (2 if parameters >= LARGE else 3)
    job = {"contender": contender, "size": size, "shape": list(shape), "steps": steps, "machine": machine()}
    path = args.rows / f"{contender}-{size}.json"
    row = kept(path, job)
    if row is None:
        row = {"job": job, "parameters": parameters, "date": datetime.date.today().isoformat()}
        began = time.perf_counter()
        try:
            check_disk(contender, parameters, args.folder)
            shape = fitted(contender, shape)
            with tempfile.TemporaryDirectory(prefix="bench-sizes-", dir=args.folder) as folder:
                row |= measure(contender, shape, steps, Path(folder))
        except (NoRoom, Failed) as error:
            row["failed"] = str(error)
        row |= {"checkpointing": shape.checkpointing, "seconds": round(time.perf_counter() - began, 1)}
        say(row)
        if "failed" not in row:
            path.with_suffix(".part").write_text(json.dumps(row) + "\n")
            path.with_suffix(".part").rename(path)
    else:
        say(row, f"of {row['date']}")
    return row


HEAD = ("s a step", "compute", "update", "disk", "wait", "NVMe GB", "peak RSS", "host", "predicted")


def say(row: dict[str, Any], note: str = "") -> None:
    """A line of the table."""
    name = f"{row['job']['contender']:9}{row['parameters'] / 1e6:7.0f} M"
    if "failed" in row:
        return print(f"  {name}  none: {row['failed']}", flush=True)
    keys = ("compute_seconds", "update_seconds", "disk_seconds", "wait_seconds")
    cells = [f"{statistics.median(row['step_seconds']):.2f}"]
    cells += [f"{row[key]:.2f}" if key in row else "" for key in keys]
    cells += [f"{row['nvme_bytes'] / 1e9:.2f}", f"{row['peak_rss_bytes'] / 1e9:.2f} GB"]
    cells.append(f"{row['host_peak_bytes'] / 1e9:.2f} GB" if "host_peak_bytes" in row else "")
    cells.append(f"{row['predicted_seconds']:.2f}" if "predicted_seconds" in row else "")
    note = ", ".join(filter(None, ("checkpointing" if row["checkpointing"] else "", note)))
    print(f"  {name}" + "".join(f"{cell:>11}" for cell in cells) + f"  {note}", flush=True)


def slopes(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Least squares: exponents of seconds (a line through the logarithms), bytes a parameter and those at none."""
    if len({row["parameters"] for row in rows}) < 2:
        return {}
    parameters = [row["parameters"] for row in rows]
    found: dict[str, float] = {}
    for key in ("step_seconds", "compute_seconds", "update_seconds", "disk_seconds"):
        values = [statistics.median(row[key]) if key == "step_seconds" else row.get(key, 0) for row in rows]
        if min(values) <= 0:
            continue
        line = statistics.linear_regression([math.log(n) for n in parameters], [math.log(v) for v in values])
        found[f"{key}_exponent"] = round(line.slope, 3)
    for key in ("peak_rss_bytes", "host_peak_bytes", "nvme_bytes"):
        if key not in rows[0] or not any(row[key] for row in rows):
            continue
        line = statistics.linear_regression(parameters, [row[key] for row in rows])
        found[f"{key}_per_param"] = round(line.slope, 3)
        found[f"{key}_intercept"] = round(line.intercept)
    return found


def above_plain(rows: dict[str, list[dict[str, Any]]], contender: str) -> dict[str, int]:
    """By size: peak RSS above that of plain's forward and backward in another process."""
    plain = {row["job"]["size"]: row["peak_rss_bytes"] for row in rows.get("plain", [])}
    return {
        row["job"]["size"]: row["peak_rss_bytes"] - plain[row["job"]["size"]]
        for row in rows.get(contender, [])
        if row["job"]["size"] in plain
    }


def result(rows: dict[str, list[dict[str, Any]]], failed: dict[str, str]) -> dict[str, Any]:
    """The keys of the RESULT."""
    found: dict[str, Any] = {"batch": gpt.Shape._field_defaults["batch"]}
    found["length"] = gpt.Shape._field_defaults["length"]
    found["slopes"] = {contender: slopes(own) for contender, own in rows.items()}
    if above := above_plain(rows, "nvme"):
        found["nvme_peak_above_plain_bytes"] = above
    if above := above_plain(rows, "all-nvme"):
        found["all_nvme_peak_bytes"] = above
        budgets = {row["job"]["size"]: row["host_budget_bytes"] for row in rows["all-nvme"]}
        found["all_nvme_budget_bytes"] = max(budgets.values())
        found["all_nvme_within_budget"] = all(above[size] <= budgets[size] for size in above)
        found["all_nvme_and_plains_weights_bytes"] = {
            row["job"]["size"]: above[row["job"]["size"]] + 4 * row["parameters"]
            for row in rows["all-nvme"]
            if row["job"]["size"] in above
        }
    return found | {"failed": failed, "rows": [row for own in rows.values() for row in own]}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ",".join(gpt.SHAPES)
    parser.add_argument("--sizes", help=f"of {known} (millions of parameters), for every contender")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help=f"of {','.join(CONTENDERS)}")
    parser.add_argument("--steps", type=int, help="measured; otherwise 3, from 1 B parameters on 2")
    parser.add_argument("--fresh", action="store_true", help="forget the rows that are there")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "results", help="on the file system to measure; cleaned up"
    )
    args = parser.parse_args()
    args.contenders, args.rows = args.contenders.split(","), ROOT / "results" / "sizes"
    args.sizes = args.sizes.split(",") if args.sizes else None
    for given, allowed in ((args.sizes or (), gpt.SHAPES), (args.contenders, CONTENDERS)):
        for name in given:
            if name not in allowed:
                parser.error(f"'{name}' is none of {','.join(allowed)}")
    return args


def main() -> int:
    args = options()
    if args.fresh:
        shutil.rmtree(args.rows, ignore_errors=True)
    for folder in (args.rows, args.folder):
        folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    print(f"machine: {machine()}; GPT, bf16, random weights, B = 1, T = 256")
    print(f"  {'':18}" + "".join(f"{name:>11}" for name in HEAD), flush=True)
    rows: dict[str, list[dict[str, Any]]] = {}
    failed: dict[str, str] = {}
    for contender in args.contenders:
        for size in args.sizes or (ONE_BUDGET if contender == "all-nvme" else SIZES):
            row = row_of(contender, size, args)
            if "failed" in row:
                failed[f"{contender} {size}"] = row["failed"]
            else:
                rows.setdefault(contender, []).append(row)
    draw(rows, ROOT / "results" / "sizes.svg")
    header = {"bench": "sizes", "date": datetime.date.today().isoformat(), "machine": machine()}
    header["seconds"] = round(time.perf_counter() - began)
    print(f"RESULT {json.dumps(header | result(rows, failed))}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("bench-sizes: stopped; the same command goes on with what is left", file=sys.stderr)
        sys.exit(130)
