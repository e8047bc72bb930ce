"""What papers on ZeRO say that models need, beside what our planner says of the same models and ranks. Ends with RESULT
{json}; nothing is measured, so any machine gives the same.

The figures of the papers are in the papers' own units: GB of 10^9 bytes in ZeRO's table 1, TB of 2^40 bytes in figure
2a of ZeRO-Infinity. Both follow from the formulas beside them, which a test recalculates.

    bench/plan/published.py
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bindings"))

from transformers import LlamaConfig

from overspill.estimate import Estimate, Load, Machine, Model, estimate
from overspill.estimate.models import made

GB, TIB = 1e9, 2**40
# ZeRO (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054), table 1: GB of a device, by billions of parameters
# and ranks, for stages 1, 2, 3. 4 N + 12 N / R, 2 N + 14 N / R, 16 N / R.
ZERO = {
    (7.5, 64): (31.4, 16.6, 1.88),
    (128, 64): (536, 284, 32),
    (128, 1024): (513, 257, 2),
    (1000, 64): (4187, 2218, 250),
    (1000, 1024): (4011, 2013, 15.6),
}
# ZeRO-Infinity (Rajbhandari et al. 2021, https://arxiv.org/abs/2104.07857), figure 2a: TB of model states, by layers
# and width. 20 bytes for each of 12 layers width^2 parameters.
INFINITY = {
    (80, 10 << 10): 1.83,
    (100, 20 << 10): 9.16,
    (128, 25 << 10): 18.31,
    (195, 64 << 10): 182.81,
    (315, 160 << 10): 1845.70,
}
RANKS = 512
PLENTY = Machine(1 << 50, 1e12, 1e11, network_bytes_per_s=1e9)
# A V100 of a DGX-2, by ZeRO-Infinity's figure 2b: 1.5 TB of memory and 100 GB/s of InfiniBand for 16 of them; 3 GB/s to
# the host and 1.6 GB/s of NVMe for each, all at once. 50 of its 125 TFLOP/s, which is what both papers reach.
DGX2 = Machine(
    host_bytes=1536 << 30,
    flops_per_s=50e12,
    memory_bytes_per_s=200e9,
    device_bytes=32 << 30,
    link_bytes_per_s=3e9,
    disk_bytes_per_s=16 * 1.6e9,
    network_bytes_per_s=100e9,
).shared_by(16)


def model(layers: int, width: int) -> Model:
    """12 layers width^2 parameters, and hardly any words."""
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 128,
        num_key_value_heads=width // 128,
        vocab_size=64,
    )
    return made(config, f"{layers} layers of width {width}")


def held(found: Estimate) -> int:
    """Bytes of weights, gradients and states of a rank, on all tiers."""
    assert found.plan is not None, found.why
    plan = found.plan.as_dict()
    kinds = ("weights", "states", "gradients")
    return sum(plan[f"{kind}_{tier}_bytes"] for kind in kinds for tier in ("host", "nvme"))


def zero() -> list[dict[str, Any]]:
    rows = []
    for (billions, ranks), published in ZERO.items():
        layers, width = {7.5: (37, 4096), 128: (106, 10_112), 1000: (128, 25_472)}[billions]
        shape = model(layers, width)
        scale = billions * 1e9 / shape.parameters
        for stage, theirs in zip((1, 2, 3), published, strict=True):
            config = {
                "zero_optimization": {"stage": stage},
                "budget": {"host": 1 << 50},
                "engine": {"placement": "host"},
            }
            ours = held(estimate(shape, PLENTY, Load(), config, ranks)) * scale / GB
            rows.append(
                {
                    "parameters": billions * 1e9,
                    "ranks": ranks,
                    "stage": stage,
                    "theirs_gb": theirs,
                    "ours_gb": ours,
                }
            )
    return rows


def infinity() -> list[dict[str, Any]]:
    rows = []
    for (layers, width), theirs in INFINITY.items():
        shape = model(layers, width)
        config = {"budget": {"host": 1 << 50}, "engine": {"placement": "host"}}
        ours = held(estimate(shape, PLENTY, Load(), config, RANKS)) * RANKS / TIB
        rows.append(
            {
                "parameters": shape.parameters,
                "layers": layers,
                "width": width,
                "theirs_tb": theirs,
                "ours_tb": ours,
            }
        )
    return rows


def speeds() -> list[dict[str, Any]]:
    """Of the two that the abstracts name: 15 PFLOP/s of 100 B on 400 GPUs, 25 of 512."""
    rows = []
    for name, shape, ranks, load, theirs in (
        ("ZeRO, 100 B", model(125, 8192), 400, Load(2, 1024), 15 / 400 * 1e3),
        ("ZeRO-Infinity, 1 T", model(128, 25 << 10), 512, Load(2, 1024), 25 / 512 * 1e3),
    ):
        found = estimate(shape, DGX2, load, {"engine": {"train_after_save": False}}, ranks)
        flops = 6.0 * shape.parameters * found.tokens
        row = {
            "name": name,
            "ranks": ranks,
            "tokens": found.tokens,
            "theirs_tflops": theirs,
            "fits": found.plan is not None,
        }
        if found.plan is not None:
            busy = dict(found.busy_s or {})
            row |= {
                "ours_tflops": flops / found.step_s / ranks / 1e12,
                "step_seconds": found.step_s,
                "busiest": max(busy, key=lambda lane: busy[lane]),
            }
        rows.append(row)
    return rows


def main() -> None:
    result = {"zero": zero(), "infinity": infinity(), "speeds": speeds()}
    for rows in result.values():
        for row in rows:
            print(
                "  "
                + ", ".join(
                    f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                    for key, value in row.items()
                )
            )
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
