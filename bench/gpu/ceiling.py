"""What a 7 B step beside a GPU may reach, by arithmetic: where states lie is the planner's answer, the rest are rates.

    bench/gpu/ceiling.py [--link 25 55] [--memory 175] [--tflops 515] [--device-budget 40GiB] [--host-budget 100GiB]

The model (engine/plan/predict.h, with a link in place of a disk). One micro-batch a step; layers are recomputed, so
forward is a quarter of the compute C. Of N parameters, N' are updated by the CPU: 26 bytes each (states, masters and
weights read and written, the gradient read), at the memory's rate. They hide under forward alone, but for the share s
that is guessed under backward (speculation, which needs 12 bytes a parameter of host memory):

    backward = max(3/4 C, gradients down over the link, s U)      U = 26 N' / memory
    forward  = max(1/4 C, weights up over the link, (1 - s) U) + the last layer's share of it

The ceiling is C alone: plain PyTorch without an optimizer. Prints a table (docs/gpus.md) and RESULT {json}.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from llama import SHAPES, Llama, floating_point_operations
from overspill import _core
from overspill.config import Config
from overspill.groups import make_groups
from overspill.handover import core_units
from overspill.units import partition

SHAPE = SHAPES["7b"]
UPDATED_BYTES, GUESSED_BYTES = 26, 12  # a parameter
WHERE = {"states on the host": "host", "first units on the GPU": "auto"}


def planned(device_budget: str, host_budget: str, placement: str) -> tuple[int, int, float]:
    """Parameters of the model, those that the CPU updates, and the share of those that may be guessed."""
    with torch.device("meta"):
        model = Llama(SHAPE).to(torch.bfloat16)
    budget = {"host": host_budget, "device": device_budget}
    config = Config.read({"budget": budget, "engine": {"placement": placement, "device": "cuda"}})
    groups = [make_groups(config.optimizer, model.parameters())]
    units = core_units(model, config, partition(model), groups)
    plan = _core.plan(units, config.to_core(_core)).as_dict()
    every = sum(p.numel() for p in model.parameters())
    by_cpu = every - plan["units_device_bytes"] // 14
    room = plan["host_budget_bytes"] - plan["host_bytes"]
    return every, by_cpu, min(1.0, room / (GUESSED_BYTES * by_cpu))


def step(
    tokens: int, by_cpu: int, guessed: float, link: float, memory: float, flops: float
) -> tuple[float, str]:
    """Seconds, and what they go on."""
    compute = floating_point_operations(SHAPE, tokens) / flops
    update, moved = UPDATED_BYTES * by_cpu / memory, 2 * by_cpu / link
    backward = {"compute": 0.75 * compute, "link": moved, "update": guessed * update}
    forward = {"compute": 0.25 * compute, "link": moved, "update": (1 - guessed) * update}
    total = max(backward.values()) + max(forward.values()) + 0.25 * compute / SHAPE.layers
    by = dict.fromkeys(backward, 0.0)
    for phase in (backward, forward):
        first = max(phase, key=phase.__getitem__)
        by[first] += phase[first]
    return total, max(by, key=by.__getitem__) if compute < total * 0.8 else "compute"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--link", type=float, nargs="+", default=[25, 55], help="GB/s each way: PCIe 4, PCIe 5"
    )
    parser.add_argument("--memory", type=float, default=175, help="GB/s of the update's traffic")
    parser.add_argument("--tflops", type=float, default=515, help="of the model's products")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384, 32768, 65536])
    parser.add_argument("--device-budget", default="40GiB")
    parser.add_argument("--host-budget", default="100GiB")
    args = parser.parse_args()
    rows = []
    for name, placement in WHERE.items():
        every, by_cpu, share = planned(args.device_budget, args.host_budget, placement)
        for guessed in (0.0, share):
            what = f"{name}, {guessed:.0%} guessed" if guessed else name
            for link in args.link:
                for tokens in args.tokens:
                    seconds, bound = step(
                        tokens, by_cpu, guessed, link * 1e9, args.memory * 1e9, args.tflops * 1e12
                    )
                    ceiling = floating_point_operations(SHAPE, tokens) / args.tflops / 1e12
                    rows.append(
                        {
                            "where": what,
                            "updated_by_the_cpu": round(by_cpu / every, 3),
                            "link_gb_per_s": link,
                            "tokens": tokens,
                            "step_seconds": round(seconds, 2),
                            "bound": bound,
                            "of_the_ceiling": round(ceiling / seconds, 2),
                        }
                    )
    print("| states | link, GB/s | " + " | ".join(f"{tokens:,} tokens" for tokens in args.tokens) + " |")
    print("| --- | --- |" + " --- |" * len(args.tokens))
    width = len(args.tokens)
    for first in range(0, len(rows), width):
        row = rows[first : first + width]
        cells = [
            f"{each['of_the_ceiling']:.2f} ({each['step_seconds']:.2f} s, {each['bound']})" for each in row
        ]
        print(f"| {row[0]['where']} | {row[0]['link_gb_per_s']:g} | " + " | ".join(cells) + " |")
    print("RESULT " + json.dumps({"rows": rows, "memory_gb_per_s": args.memory, "tflops": args.tflops}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
