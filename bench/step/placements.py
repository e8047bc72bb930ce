"""What the contenders of make bench-step are given: configurations, and how much memory they need."""

from pathlib import Path
from typing import Any

import gpt

MIB, GIB = 1 << 20, 1 << 30
PLACEMENTS = ("ram", "nvme", "speculative", "all-nvme")
THEIRS = {"ram": "ram", "nvme": "nvme", "speculative": "nvme"}  # what DeepSpeed's placement is compared with
CLIP = 1e6  # on, and never reached: both sides compute the norm, and a guess is never wrong
NEEDED = {  # bytes of memory a parameter, to see whether a contender has room; DeepSpeed's were measured
    "plain": 5,
    "ours ram": 16,
    "ours nvme": 6,
    "ours speculative": 8,
    "ours all-nvme": 3,
    "deepspeed ram": 28,
    "deepspeed nvme": 30,
}


def our_config(placement: str, disk: Path, parameters: int) -> dict[str, Any]:
    """The budget that makes the planner choose the placement."""
    buffers = 56 * MIB + parameters // 2  # ring and scratch, beside weights and gradients
    host = {
        "ram": 15 * parameters + GIB,
        "nvme": 4 * parameters + buffers,
        "speculative": 6 * parameters + buffers,
        "all-nvme": GIB,
    }[placement]
    engine = {"placement": "nvme" if placement == "all-nvme" else "auto", "train_after_save": False}
    return {
        "budget": {"host": host, "nvme": [str(disk)]},
        "optimizer": {"type": "AdamW", "lr": 1e-4},
        "gradient_clipping": CLIP,
        "engine": engine | {"device": "host", "speculate": placement == "speculative"},
    }


def deepspeed_config(placement: str, disk: Path, batch: int) -> dict[str, Any]:
    """ZeRO-3, with buffers that a subgroup needs."""
    offload: dict[str, Any] = {"device": "cpu"}
    if placement == "nvme":
        offload = {"device": "nvme", "nvme_path": str(disk), "buffer_count": 12}
        offload |= {"pipeline_read": True, "pipeline_write": True}
    aio = {
        "block_size": MIB,
        "queue_depth": 32,
        "thread_count": 1,
        "single_submit": False,
        "overlap_events": True,
    }
    return {
        "train_micro_batch_size_per_gpu": batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "bf16": {"enabled": True},
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": 3, "sub_group_size": 100_000_000, "offload_optimizer": offload},
        "aio": aio,
        "wall_clock_breakdown": False,
    }


def count(shape: gpt.Shape) -> int:
    """Parameters of the model."""
    width = shape.width
    block = 12 * width * width + 13 * width
    return shape.layers * block + width * (2 * gpt.VOCAB + shape.length + 2)


def needed_bytes(name: str, parameters: int) -> int:
    """About what the contender takes of memory."""
    return NEEDED[name] * parameters + GIB // 2


def available_bytes() -> int:
    """Memory that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")
