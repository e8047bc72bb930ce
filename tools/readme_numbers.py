"""Writes the README's numbers from RESULT files.   tools/readme_numbers.py [--check] [results/*.json]

Each file named is copied to docs/results/; the text between the markers in README.md is made from what lies there.
With --check nothing is written, and a README that differs is an error.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "docs" / "results"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
EMPTY = "No run has been kept yet: `make train`, then `make readme`."


def mib(count: float) -> str:
    return f"{count / 2**20:,.0f} MiB"


def train(r: dict[str, Any]) -> list[str]:
    """Rows of `make train`."""
    promise = r["host_budget_bytes"] + r["plain_fwd_bwd_rss_bytes"]
    rows = [
        (
            f"held-out loss before, after {r['steps']} steps",
            "{heldout_loss_before:.4f}, {heldout_loss_after:.4f}",
        ),
        ("the same, by a plain PyTorch loop over the same batches", "{heldout_loss_plain:.4f}"),
        (
            "time of a step over that of the plain loop (median of turns)",
            "{step_vs_plain:.3f} ({step_seconds:.2f} s, {plain_step_seconds:.2f} s)",
        ),
        (
            "host memory charged at most, of a budget of",
            f"{mib(r['peak_host_bytes'])}, {mib(r['host_budget_bytes'])}",
        ),
        (
            "peak RSS; promised: budget + plain forward and backward alone",
            f"{mib(r['peak_rss_bytes'])}; {mib(promise)}",
        ),
        ("peak RSS of the plain loop", mib(r["plain_rss_bytes"])),
        ("NVMe allocated at most", mib(r["nvme_bytes"])),
        (
            "NVMe read, written in the whole run, both evaluations included",
            f"{mib(r['nvme_read_bytes'])}, {mib(r['nvme_written_bytes'])}",
        ),
        ("tokens a second", "{tokens_per_s:.0f}"),
        ("the whole command, after installation", "{seconds:.0f} s"),
    ]
    table = [
        "| `make train` | |",
        "| --- | --- |",
        *(f"| {what} | {value.format(**r)} |" for what, value in rows),
    ]
    machine = [f"Machine: {r['machine']}.", ""] if "machine" in r else []
    return [*machine, *table]


def adam(r: dict[str, Any]) -> list[str]:
    """Rows of `make bench-adam`."""
    names = {"exact_vs_limit": "bf16, split master", "fp32_vs_limit": "fp32"}
    rows = [f"| {name} | {r[key]:.3f} |" for key, name in names.items() if key in r]
    head = f"| `make bench-adam` ({r['isa']}): speed over that of a loop that only reads and writes the same memory | |"
    return [head, "| --- | --- |", *rows]


def io(r: dict[str, Any]) -> list[str]:
    """Rows of `make bench-io`."""
    head = "| `make bench-io` | read | write | read and write at once |"
    patterns = ("read", "write", "mixed")
    rows = []
    for name, what in (
        ("fio", "fio, io_uring, at its best"),
        ("deepspeed", "DeepSpeed's async I/O, at its best"),
    ):
        if f"mixed_vs_{name}" in r:
            rows.append((f"speed over that of {what}", [f"{r[f'{p}_vs_{name}']:.3f}" for p in patterns]))
    rows.append(("GB/s", [f"{r['gb_per_s'][p]['store'][1]:.2f}" for p in patterns]))
    for suffix, of in (("", "CPU seconds a GB"), ("_deepspeed", "the same, DeepSpeed")):
        keys = ("read_cpu_s_per_gb", "write_cpu_s_per_gb", "cpu_s_per_gb")
        if f"cpu_s_per_gb{suffix}" in r:
            rows.append((of, [f"{r[key + suffix]:.3f}" for key in keys]))
    return [head, "| --- | --- | --- | --- |", *(f"| {what} | {' | '.join(cells)} |" for what, cells in rows)]


def step(r: dict[str, Any]) -> list[str]:
    """Rows of `make bench-step`: a column for each size."""
    sizes = r["sizes"]
    head = f"| `make bench-step` | {' | '.join(f'{name} M parameters' for name in sizes)} |"
    asked = (
        ("step over its bound, optimizer on NVMe, clipping on", "nvme_step_vs_bound"),
        ("step over max(compute + update, disk), speculative", "nvme_speculative_vs_floor"),
        ("step over that of DeepSpeed ZeRO-3: all in RAM", "ram_step_vs_deepspeed"),
        ("the same: optimizer on NVMe", "nvme_step_vs_deepspeed"),
        ("the same: optimizer on NVMe, speculative", "nvme_speculative_vs_deepspeed"),
        ("RAM above plain forward and backward, bytes a parameter: all in RAM", "ram_bytes_per_param"),
        ("the same: optimizer on NVMe", "nvme_opt_ram_bytes_per_param"),
    )

    def cell(of: dict[str, Any], key: str) -> str:
        if of.get(key) is None:
            return "not measured"
        return f"{of[key]:.3f}" + (" (floor not held)" if key in of.get("floors_beaten", ()) else "")

    rows = [f"| {what} | {' | '.join(cell(of, key) for of in sizes.values())} |" for what, key in asked]
    return [head, "| --- |" + " --- |" * len(sizes), *rows]


def plain(r: dict[str, Any]) -> list[str]:
    """Any other result: its numbers as they are."""
    rows = [f"| {key} | {value} |" for key, value in r.items() if isinstance(value, (int, float))]
    return ["| | |", "| --- | --- |", *rows]


SECTIONS = {"train": train, "adam": adam, "io": io, "step": step}  # in this order


def section() -> str:
    """What stands between the markers."""
    found = {path.stem: path for path in sorted(KEPT.glob("*.json"))}
    order = [name for name in SECTIONS if name in found] + [name for name in found if name not in SECTIONS]
    blocks = []
    for name in order:
        lines = SECTIONS.get(name, plain)(json.loads(found[name].read_text()))
        blocks.append("\n".join([*lines, "", f"From [docs/results/{name}.json](docs/results/{name}.json)."]))
    return "\n\n".join(blocks) or EMPTY


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="*", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    for path in args.results if not args.check else ():
        json.loads(path.read_text())
        KEPT.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, KEPT / path.name)
    readme = ROOT / "README.md"
    before = readme.read_text()
    head, rest = before.split(BEGIN)
    after = f"{head}{BEGIN}\n{section()}\n{END}{rest.split(END)[1]}"
    if args.check:
        if after != before:
            print(
                "README.md: the numbers differ from docs/results; run tools/readme_numbers.py",
                file=sys.stderr,
            )
        return int(after != before)
    readme.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
