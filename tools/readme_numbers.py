"""Writes the numbers of docs/performance.md, ranks.md, gpu-results.md, inference.md, planning.md, graph.md.

    tools/readme_numbers.py [--check] [results/*.json]

Each RESULT file named is copied to docs/results/; the text between a document's markers is made from what lies there.
With --check nothing is written, and a document that differs is an error.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "docs" / "results"
PERFORMANCE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
EMPTY = "No run has been kept yet: `make train-compare`, then `make readme`."


def mib(count: float) -> str:
    return f"{count / 2**20:,.0f} MiB"


def train(r: dict[str, Any]) -> list[str]:
    """Rows of `make train-compare`."""
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
        "| `make train-compare` | |",
        "| --- | --- |",
        *(f"| {what} | {value.format(**r)} |" for what, value in rows),
    ]
    machine = [f"Machine: {r['machine']}.", ""] if "machine" in r else []
    return [*machine, *table]


def adam(r: dict[str, Any]) -> list[str]:
    """Rows of `make bench-adam`."""
    formats = {
        "fp32": "fp32",
        "exact": "exact: bf16, split master",
        "fp16": "fp16",
        "compact": "compact: bf16 states",
        "int8": "8bit: 8-bit states",
    }
    rows = []
    for key, name in formats.items():
        theirs = r.get(f"{key}_vs_deepspeed", r.get(f"{key}_vs_deepspeed_fp32"))
        cells = [r.get(f"{key}_vs_limit"), theirs, r.get(f"{key}_vs_torch_fused")]
        if cells[0] is not None:
            rows.append(f"| {name} | {' | '.join('' if cell is None else f'{cell:.3f}' for cell in cells)} |")
    head = (
        f"| `make bench-adam`, {r['machine'].split(',')[0]}, 64 Mi parameters, 2 threads: parameters a second over "
        "those of | a loop that only reads "
        f"and writes the same memory ({r['fp32_limit_gb_per_s']:.0f} GB/s) | DeepSpeed's CPU Adam, fp32 | torch's "
        "fused AdamW, fp32 |"
    )
    return [head, "| --- | --- | --- | --- |", *rows]


def io(r: dict[str, Any]) -> list[str]:
    """Rows of `make bench-io`."""
    head = "| `make bench-io` | read | write | read and write at once | the same, AdamW in between |"
    patterns = ("read", "write", "moved", "mixed")
    rows = []
    for name, what in (
        ("fio", "fio, io_uring, at its best"),
        ("deepspeed", "DeepSpeed's async I/O, at its best"),
    ):
        if f"moved_vs_{name}" in r:
            for suffix, of in (
                ("", f"speed over that of {what}"),
                ("_by_store", "the same, checked by the store, as weights and checkpoints are"),
            ):
                keys = [f"{p}{suffix}_vs_{name}" for p in patterns[: 3 if name == "fio" else 4]]
                rows.append((of, [f"{r[key]:.3f}" if key in r else "" for key in keys]))
    rows.append(("GB/s", [f"{r['gb_per_s'][p]['store'][1]:.2f}" for p in patterns if p in r["gb_per_s"]]))
    for suffix, of in (
        ("", "CPU seconds a GB, every byte compared with its checksum"),
        ("_by_store", "the same, compared by the store"),
        ("_deepspeed", "the same, DeepSpeed, nothing compared"),
    ):
        keys = [f"{prefix}cpu_s_per_gb{suffix}" for prefix in ("read_", "write_", "moved_", "")]
        if keys[2] in r:
            rows.append((of, [f"{r[key]:.3f}" if key in r else "" for key in keys]))
    lines = [f"| {what} | {' | '.join(cells + [''] * (4 - len(cells)))} |" for what, cells in rows]
    return [head, "| --- | --- | --- | --- | --- |", *lines]


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


def sizes(r: dict[str, Any]) -> list[str]:
    """Rows of `make bench-sizes`: one for each size, then the fitted slopes."""
    names = {"nvme": "optimizer on NVMe", "plain": "torch, no optimizer", "all-nvme": "all on NVMe, 1 GiB"}
    there = [name for name in names if any(row["job"]["contender"] == name for row in r["rows"])]
    rows = {(row["parameters"], row["job"]["contender"]): row for row in r["rows"]}

    def cells(values: dict[str, Any]) -> str:
        return " | ".join(values.get(name, "") for name in there)

    lines = [
        f"| `make bench-sizes`, B = {r['batch']}, T = {r['length']}: seconds a step; peak RSS | "
        + " | ".join(names[name] for name in there)
        + " |",
        "| --- |" + " --- |" * len(there),
    ]
    for parameters in sorted({size for size, _ in rows}):
        found = {name: rows[parameters, name] for name in there if (parameters, name) in rows}
        shown = {
            name: f"{statistics.median(row['step_seconds']):.2f}; {row['peak_rss_bytes'] / 1e9:.2f} GB"
            for name, row in found.items()
        }
        lines.append(f"| {parameters / 1e6:,.0f} M parameters | {cells(shown)} |")
    for what, key, digits in (
        ("step time grows as parameters to the power of", "step_seconds_exponent", 2),
        ("peak RSS, bytes a parameter", "peak_rss_bytes_per_param", 2),
        ("NVMe, bytes a parameter and step", "nvme_bytes_per_param", 2),
    ):
        shown = {name: f"{of[key]:.{digits}f}" for name, of in r["slopes"].items() if key in of}
        lines.append(f"| {what} | {cells(shown)} |")
    return lines


def ranks(r: dict[str, Any]) -> list[str]:
    """Stages by world; of the transports, which have the same bits, the largest figure."""
    cells: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in r["rows"]:
        if row["world"] > 1:
            cells.setdefault((row["world"], row["stage"]), []).append(row)
    transports = ", ".join(dict.fromkeys(row["transport"] for row in r["rows"]))
    head = "| ranks | stage | bytes a parameter (formula) | sent, of data parallel's | losses off by: fp32, bf16 |"
    lines = [
        f"ZeRO stages over ranks ({transports}: the same bits at every stage on each; losses beside one process)",
        "",
        head,
    ]
    lines.append("| --- | --- | --- | --- | --- |")
    for (world, stage), rows in cells.items():
        held, sent = (max(row[key] for row in rows) for key in ("bytes_per_param", "volume_vs_data_parallel"))
        off = ", ".join(f"{max(row['loss_diff'][p] for row in rows):.0e}" for p in ("fp32", "bf16"))
        lines.append(f"| {world} | {stage} | {held:.2f} ({rows[0]['formula']:.2f}) | {sent:.2f} | {off} |")
    return lines


def ranks_deepspeed(r: dict[str, Any]) -> list[str]:
    """Two ranks beside DeepSpeed's."""
    millions = r["parameters"] / 1e6
    head = f"| {r['world']} ranks over gloo, {millions:.0f} M parameters in memory, ZeRO-3 | Overspill | DeepSpeed |"
    asked = (
        ("seconds a step", "step_seconds", ".2f"),
        ("bytes a parameter that a rank's peak RSS grew by", "rank_bytes_per_param", ".1f"),
        ("bytes a parameter that a rank sent in a step", "sent_bytes_per_param", ".2f"),
    )
    rows = [
        f"| {what} | {r['ours'][key]:{form}} | {r['deepspeed'][key]:{form}} |" for what, key, form in asked
    ]
    ratio = f"| step over that of DeepSpeed, median of turns | {r['step_vs_deepspeed']:.3f} | |"
    return [head, "| --- | --- | --- |", *rows, ratio]


def gpu_step(r: dict[str, Any]) -> list[str]:
    head = (
        "| model | mode | tokens a step | seconds | ceiling, seconds | share of it | update alone, seconds |"
    )
    rows = [
        f"| {row['model'].upper()} | {row['mode']} | {row['tokens']:,} | {row['seconds']:.3f} "
        f"| {row['plain_seconds']:.3f} | {row['of_the_ceiling']:.3f} | {row['bounds_seconds']['update']:.3f} |"
        for row in sorted(r["rows"], key=lambda row: (row["model"], row["mode"], row["tokens"]))
    ]
    return [f"{r['gpu']}, {r['machine']}, torch {r['torch']}:", "", head, "| --- |" + " --- |" * 6, *rows]


CHECKPOINT = (  # what a row says, its key, and what was aimed at
    ("bytes copied by a save on the disk of the states", "bytes_copied_same_disk", "0"),
    ("the same, states on two disks", "bytes_copied_two_disks", "0"),
    ("longest step beside a save, over the median step without, less 1", "stall_vs_step", "0.1"),
    ("of that, the call: median, over the median step", "save_call_vs_step", ""),
    (
        "the longest step where the save is read back and an older one removed",
        "stall_with_keep_last_vs_step",
        "",
    ),
    ("the same without any save: what the machine does", "longest_without_saves_vs_step", ""),
    (
        "step beside a copy to another file system of the same disk, over one without",
        "step_while_copying_vs_step",
        "1.1",
    ),
    ("the same, a file system in memory", "step_while_copying_to_memory_vs_step", "1.1"),
    ("speed of load_checkpoint over fio's reading, into memory", "restore_vs_fio", "0.9"),
    ("the same, states on NVMe", "restore_nvme_vs_fio", ""),
    ("the same, out of slabs that a save has linked", "restore_linked_vs_fio", ""),
    ("speed of merge over fio's reading and writing at once", "merge_vs_fio", "0.9"),
    ("the same over fio's reading alone", "merge_vs_fio_reading", ""),
    ("speed of merge to fp32 over that of zero_to_fp32", "merge_vs_zero_to_fp32", ""),
    ("the same, theirs made durable as ours is", "merge_vs_zero_to_fp32_durable", ""),
    ("peak memory of merge over that of zero_to_fp32", "merge_peak_vs_zero_to_fp32", ""),
    ("speed of save_checkpoint over that of torch's dcp.save, states in memory", "save_vs_dcp", ""),
    ("the same until blocking=False returns", "return_vs_dcp", ""),
    ("speed of save_checkpoint over that of torch's dcp.save, states on NVMe", "save_nvme_vs_dcp", ""),
    ("the same until blocking=False returns", "return_nvme_vs_dcp", ""),
)


def checkpoint(r: dict[str, Any]) -> list[str]:
    """Of `make bench-checkpoint`. Quartiles of the rounds' ratios are in brackets."""
    size = f"{r['parameters'] / 1e6:.0f} M parameters"
    lines = [f"| `make bench-checkpoint`, {size} | measured | aim |", "| --- | --- | --- |"]
    for what, key, aim in CHECKPOINT:
        if key not in r:
            continue
        spread = r.get(f"{key}_quartiles")
        value = f"{r[key]:,}" if isinstance(r[key], int) else f"{r[key]:.3f}"
        value += f" ({spread[0]:.3f} to {spread[1]:.3f})" if spread else ""
        lines.append(f"| {what} | {value} | {aim} |")
    if "merge_peak_bytes" in r:
        most = f"{mib(r['merge_largest_tensor_bytes'] + 2**28)}"
        what = (
            f"peak memory of merge, {r['merge_parameters'] / 1e9:.1f} B parameters, above that of its start"
        )
        lines.append(f"| {what} | {mib(r['merge_peak_bytes'])} | {most} |")
    return lines


def limited(r: dict[str, Any]) -> list[str]:
    """Of the end of `make bench-activations`."""
    size = f"{r['parameters'] / 1e6:.0f} M parameters, {r['length']} tokens, {r['limit_bytes'] / 2**30:g} GiB"
    rows = (
        ("most resident bytes over the limit", "peak_rss_vs_budget", "at most 1"),
        ("a step over plain torch's with all memory", "step_vs_plain_unlimited", ""),
        ("a step over plain torch's with all blocks checkpointed", "step_vs_plain_checkpointed", "at most 1"),
        ("all activations on NVMe over all blocks computed again", "nvme_activations_vs_recompute", ""),
        ("predicted forward and backward, off by", "plan_error", "at most 0.2"),
    )
    lines = [f"| `make bench-activations`, {size} | measured | aim |", "| --- | --- | --- |"]
    return lines + [f"| {what} | {r[key]:.2f} | {aim} |" for what, key, aim in rows]


def plan(r: dict[str, Any]) -> list[str]:
    """Of `make bench-plan`."""
    lines = ["| `make bench-plan` | estimated | measured | off by |", "| --- | --- | --- | --- |"]
    for row in r["rows"]:
        seconds = (f"{row[key]:.3f} s" for key in ("estimated_seconds", "measured_seconds"))
        lines.append(f"| {row['case']} | {' | '.join(seconds)} | {row['error']:+.0%} |")
    return [
        *lines,
        "",
        f"Steps are off by {r['step_error_median']:.1%} in the median and {r['step_error_max']:.1%} at most; bytes, "
        f"held and moved, by {r['bytes_error_max']:.1%} at most. Measured on: {r['machine']}.",
    ]


def graph(r: dict[str, Any]) -> list[str]:
    """Of `make bench-graph`."""
    what = f"two towers of {r['blocks']} blocks, width {r['width']}, {r['world']} ranks"
    lines = [
        f"| `make bench-graph`: {what} | together | one by one | ratio of a step, median |",
        "| --- | --- | --- | --- |",
    ]
    for key, order in (
        ("same", "both ranks run the towers in one order"),
        ("swapped", "rank 1 in the other"),
    ):
        row = r[key]
        times = [
            f"{1e3 * row[f'{name}_step_seconds']:.0f} ms, {row[f'{name}_calls']:.0f} calls"
            for name in ("together", "alone")
        ]
        lines.append(f"| {order} | {' | '.join(times)} | {row['ratio']:.2f} |")
    return [*lines, "", f"Losses are equal to the last bit. Measured on: {r['machine']}."]


def published(r: dict[str, Any]) -> list[str]:
    """Of papers, beside the planner (bench/plan/published.py)."""
    lines = [
        "| GB a rank, ZeRO's table 1 | ranks | stage | ZeRO | Overspill |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in r["zero"]:
        lines.append(
            f"| {row['parameters'] / 1e9:,g} B | {row['ranks']:,} | {row['stage']} | {row['theirs_gb']:,g} | "
            f"{row['ours_gb']:,.4g} |"
        )
    lines += ["", "| TB (2^40 bytes) of all ranks, ZeRO-Infinity's figure 2a | ZeRO-Infinity | Overspill |"]
    lines += ["| --- | --- | --- |"]
    for row in r["infinity"]:
        shape = f"{row['parameters'] / 1e12:.2f} T: {row['layers']} layers of width {row['width']:,}"
        lines.append(f"| {shape} | {row['theirs_tb']:,g} | {row['ours_tb']:,.4g} |")
    lines += ["", "| TFLOP/s of a V100, by the abstracts | ranks | published | simulated | busiest |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    for row in r["speeds"]:
        lines.append(
            f"| {row['name']} | {row['ranks']} | {row['theirs_tflops']:.1f} | {row['ours_tflops']:.1f} | "
            f"{row['busiest']} |"
        )
    return lines


def plain(r: dict[str, Any]) -> list[str]:
    """Any other result: its numbers as they are."""
    rows = [f"| {key} | {value} |" for key, value in r.items() if isinstance(value, (int, float))]
    return ["| | |", "| --- | --- |", *rows]


def gguf(r: dict[str, Any]) -> list[str]:
    """Of `make bench-gguf`: KL divergences in nats."""
    kinds = ("f32", "bf16", "q8_0")

    def kl(name: str) -> list[str]:
        return [f"{r[name.format(kind)]:.1e}" for kind in kinds]

    rows = [
        ("SmolLM2-135M, llama.cpp as it comes (keys and values in fp16): mean", kl("smollm2_{}_usual_kl")),
        ("the same, of the furthest token", kl("smollm2_{}_usual_kl_largest")),
        (
            "the same, tokens whose likeliest successor is that of transformers",
            [f"{100 * r[f'smollm2_{kind}_usual_same_first']:.1f} %" for kind in kinds],
        ),
        ("SmolLM2-135M, attention in fp32: mean", kl("smollm2_{}_exact_kl")),
    ]
    families = [key.removesuffix("_f32_kl") for key in r if key.endswith("_f32_kl")]
    rows += [
        (f"random weights, {name.replace('_tied', ', tied')}: mean", kl(name + "_{}_kl")) for name in families
    ]
    table = ["| `make bench-gguf`: KL in nats | f32 | bf16 | q8_0 |", "| --- | --- | --- | --- |"]
    table += [f"| {name} | {' | '.join(values)} |" for name, values in rows]
    return [
        *table,
        "",
        f"llama-cpp-python {r['llama_cpp_python']}; {r['tokens_same']:,} tokens of the standard library's modules were "
        f"the same as those of transformers. Measured on: {r['machine']}.",
    ]


SECTIONS = {
    "train": train,
    "adam": adam,
    "adam-cascade-lake": adam,
    "io": io,
    "step": step,
    "sizes": sizes,
    "checkpoint": checkpoint,
    "limited": limited,
    "ranks": ranks,
    "ranks-deepspeed": ranks_deepspeed,
    "gpu-step": gpu_step,
    "gguf": gguf,
    "plan": plan,
    "published": published,
    "graph": graph,
}  # in this order
RANKS = ROOT / "docs" / "ranks.md"
GPU = ROOT / "docs" / "gpu-results.md"
INFERENCE = ROOT / "docs" / "inference.md"
PLANNING = ROOT / "docs" / "planning.md"
GRAPH = ROOT / "docs" / "graph.md"
ELSEWHERE = {  # whose numbers are elsewhere
    "ranks": RANKS,
    "ranks-deepspeed": RANKS,
    "gpu-step": GPU,
    "gguf": INFERENCE,
    "plan": PLANNING,
    "published": PLANNING,
    "graph": GRAPH,
}


def section(document: Path) -> str:
    """What stands between the markers of a document."""
    found = {p.stem: p for p in sorted(KEPT.glob("*.json")) if ELSEWHERE.get(p.stem, PERFORMANCE) == document}
    order = [name for name in SECTIONS if name in found] + [name for name in found if name not in SECTIONS]
    blocks = []
    for name in order:
        lines = SECTIONS.get(name, plain)(json.loads(found[name].read_text()))
        link = os.path.relpath(found[name], document.parent)
        blocks.append("\n".join([*lines, "", f"From [{link}]({link})."]))
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
        for one in (path, path.with_suffix(".svg")):  # its plot, if there is one
            if one.exists():
                shutil.copyfile(one, KEPT / one.name)
    return max(
        [update(document, args.check) for document in (PERFORMANCE, RANKS, GPU, INFERENCE, PLANNING, GRAPH)]
    )


def update(document: Path, check: bool) -> int:
    """1 where `check`, and the document differs from what it would be."""
    before = document.read_text()
    head, rest = before.split(BEGIN)
    after = f"{head}{BEGIN}\n{section(document)}\n{END}{rest.split(END)[1]}"
    if not check:
        document.write_text(after)
    elif after != before:
        name = document.relative_to(ROOT)
        print(f"{name}: the numbers differ from docs/results; run tools/readme_numbers.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
