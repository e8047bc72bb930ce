"""Writes the tables of README.md (what fits, performance) and its chart, of `overspill plan` and docs/results.

tools/readme_tables.py [--check]        nothing is written, and a document that differs is an error
"""

import argparse
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from overspill import BudgetError
from overspill.cli.plan import plan

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "docs" / "results"
CHART = RESULTS / "step.svg"
GB, TB = 1e9, 1e12
# Of Llama's form: what they are called, hidden, intermediate, layers, heads, heads of keys and values, vocabulary.
SHAPES = {
    "1 B": (2048, 5632, 22, 32, 4, 32000),
    "3 B": (3072, 8192, 28, 24, 8, 32000),  # of `make large`
    "7 B": (4096, 11008, 32, 32, 32, 32000),
    "14 B": (5120, 13824, 48, 40, 8, 152064),
    "70 B": (8192, 28672, 80, 64, 8, 128256),
}


def model(shape: tuple[int, ...]) -> torch.nn.Module:
    """Shapes alone."""
    hidden, wide, layers, heads, pairs, words = shape
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=pairs,
        vocab_size=words,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).bfloat16()


def least(made: torch.nn.Module, config: dict[str, Any], key: str) -> tuple[int, Any]:
    """The smallest budget of this kind that a plan takes, to 1 %, and the plan."""
    low, high, found = 1 << 20, 1 << 41, None
    while high > low * 1.01:
        middle = int((low * high) ** 0.5)
        try:
            found = plan(made, {**config, "budget": {**config["budget"], key: middle}})
            high = middle
        except BudgetError:
            low = middle
    return high, found


def row(name: str) -> str:
    made = model(SHAPES[name])
    parameters = sum(p.numel() for p in made.parameters())
    disk = {"host": "64GiB", "nvme": ["/disk"]}
    away, on_disk = least(made, {"budget": disk, "engine": {"placement": "nvme"}}, "host")
    inside = [
        least(made, {"budget": {"host": 0}, "engine": {"placement": "host"}, "format": form}, "host")[0]
        for form in ("exact", "compact", "8bit")
    ]
    cells = [
        f"{name} ({parameters / GB:.1f} billion)",
        f"{away / GB:.1f} GB",
        f"{on_disk.nvme_reserve_bytes / GB:,.0f} GB",
        f"{on_disk.nvme_written_bytes_per_step * 1000 / TB:.0f} TB",
        *(f"{budget / GB:,.0f} GB" for budget in inside),
    ]
    return f"| {' | '.join(cells)} |"


def fits() -> str:
    head = (
        "| model | least RAM, with everything on NVMe | room on NVMe | written to it in 1,000 steps | RAM without NVMe "
        "| the same, `compact` | the same, `8bit` |"
    )
    log = (RESULTS / "large.log").read_text()
    large = json.loads(re.findall(r"^RESULT (.*)$", log, re.MULTILINE)[-1])
    written = statistics.median(step["written_bytes"] for step in large["steps"][1:])
    times = [step["total_seconds"] for step in large["steps"]]
    waited = max(step["wait_seconds"] for step in large["steps"])
    measured = (
        "We measured the second row once, with [`make large`](docs/results/large.log): "
        f"{large['parameters'] / GB:.1f} billion parameters, a budget of {large['host_budget_bytes'] / GB:.1f} GB and "
        "256 tokens a step on 2 cores, with `train_after_save` false. The process held "
        f"{large['peak_rss_bytes'] / GB:.1f} GB under a limit of 6.4 GB and wrote {written / GB:.0f} GB a step. "
        "The slowest of its three steps took "
        f"{max(times):.0f} s, {waited:.0f} s of it waiting. Figures for larger models are calculated only."
    )
    return "\n".join([head, "| --- |" + " --- |" * 6, *map(row, SHAPES), "", measured])


def performance() -> str:
    step = in_turn()
    train = json.loads((RESULTS / "train.json").read_text())
    adam = json.loads((RESULTS / "adam.json").read_text())
    size = f"{step['parameters'] / 1e6:.0f} M parameters"
    times = {name: 1 / step[f"{name}_step_vs_deepspeed"] for name in ("ram", "nvme")}
    guessed = 1 / step["nvme_speculative_vs_deepspeed"]
    rows = [
        (
            f"a step beside DeepSpeed ZeRO-3 on the same CPU, states on NVMe, {size}, 256 tokens",
            f"{times['nvme']:.1f} times as fast; {guessed:.1f} times with `speculate`, where nothing is clipped",
        ),
        ("the same, all in RAM", f"{times['ram']:.1f} times as fast"),
        (
            "`make train-compare`: SmolLM2-135M in a budget of 600 MiB, beside a plain PyTorch loop",
            f"a step takes {train['step_vs_plain']:.2f} times as long (median of the ratios, turn by turn), in "
            f"{train['peak_rss_bytes'] / train['plain_rss_bytes']:.0%} of the memory",
        ),
        (
            "AdamW's update alone, fp32, beside torch's fused one",
            f"{adam['fp32_vs_torch_fused']:.2f} times as fast",
        ),
    ]
    return "\n".join([f"| {machine(step)} | |", "| --- | --- |", *(f"| {a} | {b} |" for a, b in rows)])


def machine(size: dict[str, Any]) -> str:
    return f"2 CPU cores, one disk of {size['floors']['disk_alone_bytes_per_s'] / GB:.1f} GB/s"


def in_turn() -> dict[str, Any]:
    """The largest size of docs/results/step.json whose contenders took turns in one run: ratios of others may be the
    machine's."""
    sizes = json.loads((RESULTS / "step.json").read_text())["sizes"].values()
    return max((of for of in sizes if not of["deepspeed_alone"]), key=lambda of: of["parameters"])


def largest() -> dict[str, Any]:
    """The largest size of docs/results/step.json."""
    sizes = json.loads((RESULTS / "step.json").read_text())["sizes"].values()
    return max(sizes, key=lambda of: of["parameters"])


# ---- the chart

BARS = {  # contender of docs/results/step.json -> what it is called, and its colour
    "plain": ("PyTorch, forward and backward alone", "#9aa0a6"),
    "ours ram": ("Overspill, in RAM", "#1a73e8"),
    "ours speculative": ("Overspill, states on NVMe, speculative", "#1a73e8"),
    "ours nvme": ("Overspill, states on NVMe", "#1a73e8"),
    "ours all-nvme": ("Overspill, all on NVMe", "#1a73e8"),
    "deepspeed ram": ("DeepSpeed ZeRO-3, in RAM", "#e8710a"),
    "deepspeed nvme": ("DeepSpeed ZeRO-3, states on NVMe", "#e8710a"),
}
WIDTH, LEFT, PANEL, LINE = 900, 300, 280, 26


def chart() -> str:
    """Seconds a step and peak RSS, of the largest size that was measured."""
    size = largest()
    seconds, memory = size["step_seconds"], {k: v / GB for k, v in size["peak_rss_bytes"].items()}
    height = LINE * (len(BARS) + 2) + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-weight="bold">seconds a step</text>',
        f'<text x="{LEFT + PANEL + 20}" y="20" font-weight="bold">peak memory of the process, GB</text>',
    ]
    for number, (name, (label, colour)) in enumerate(BARS.items(), 1):
        y = LINE * number + 8
        lines.append(f'<text x="{LEFT - 10}" y="{y + 14}" text-anchor="end">{label}</text>')
        for place, values in enumerate((seconds, memory)):
            x = LEFT + place * (PANEL + 20)
            width = (PANEL - 50) * values[name] / max(values.values())
            lines.append(f'<rect x="{x}" y="{y}" width="{width:.1f}" height="18" fill="{colour}"/>')
            lines.append(f'<text x="{x + width + 6:.1f}" y="{y + 14}">{values[name]:.1f}</text>')
    lines.append(
        f'<text x="10" y="{height - 10}" font-size="11" fill="#555">{size["parameters"] / 1e6:.0f} M parameters, bf16, '
        f"B = {size['batch']}, T = {size['length']}, {machine(size)} (docs/results/step.json)</text>"
    )
    return "\n".join([*lines, "</svg>", ""])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    text = README.read_text()
    for name, make in (("fits", fits), ("performance", performance)):
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        head, rest = text.split(begin)
        text = f"{head}{begin}\n{make()}\n{end}{rest.split(end)[1]}"
    wanted = {README: text, CHART: chart()}
    wrong = [path for path, after in wanted.items() if not path.exists() or path.read_text() != after]
    if args.check:
        for path in wrong:
            print(
                f"{path.relative_to(ROOT)} is not what tools/readme_tables.py makes: run it", file=sys.stderr
            )
        return 1 if wrong else 0
    for path in wrong:
        path.write_text(wanted[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
