"""One rank of bench-ranks over gloo.   torchrun --nproc_per_node=N bench/ranks/gloo.py"""

import sys
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bindings"), str(ROOT / "build" / "release" / "bench")]
import _bench_ranks  # noqa: E402

from overspill.ranks import Group  # noqa: E402

TIMEOUT_SECONDS = 120.0

dist.init_process_group("gloo")
for stage in range(4):
    row = _bench_ranks.measure_row(stage, lambda: Group(timeout_seconds=TIMEOUT_SECONDS))
    if dist.get_rank() == 0:
        print(row, flush=True)
dist.barrier()
