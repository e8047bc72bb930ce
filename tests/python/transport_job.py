"""One rank of test_transport.py: the conformance suite over a torch.distributed group, and calls to be killed in."""

import json
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from overspill import ranks
from overspill.ranks import Group

sys.path[:0] = [str(p) for p in Path(__file__).parents[2].glob("build/*/tests/bindings")]
import _ranks_conformance  # noqa: E402

LATE = "rank_1_is_late"
BODIES = [name for name in dir(_ranks_conformance) if not name.startswith("_") and name != "repeat"]


def conformance() -> None:
    """What each body said, as JSON by its name: "" where all was right."""
    said = {}
    for name in BODIES:
        if dist.get_world_size() == 1 and name in ("another_call", "an_odd_pair", "rank_1_aborts", LATE):
            continue
        group = Group(timeout_seconds=2.0 if name == LATE else 300.0)
        dist.barrier()  # how late a rank is does not depend on when it was started
        said[name] = getattr(_ranks_conformance, name)(group)
    print(json.dumps(said))


def repeat(call: str, timeout_seconds: float, mebibytes: int = 1) -> None:
    """One kind of call for ever; the last words are those of its error."""
    group = ranks.join(timeout_seconds=timeout_seconds)
    print(f"rank {group.rank} calls", flush=True)
    said = _ranks_conformance.repeat(group, call, mebibytes << 20)
    print(f"rank {group.rank} says: {said}", file=sys.stderr, flush=True)
    sys.exit(4)


def hear_late() -> None:
    group = Group()
    dist.barrier()
    if group.rank == 1:
        os._exit(1)
    time.sleep(group.rank)  # rank 2 is busy for longer
    print(group.fate.declare(f"rank {1 if group.rank == 0 else 0} is gone", lost=1))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    if sys.argv[1] == "conformance":
        conformance()
        dist.barrier()
    elif sys.argv[1] == "hear_late":
        hear_late()
    else:
        repeat(sys.argv[2], float(sys.argv[3]), *map(int, sys.argv[4:]))
