"""One rank of a team of bench/plan/run.py, which is asked for one thing after the other.   rank.py THREADS RANKS"""

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "step"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bindings"))

import torch
import torch.distributed as dist

import gpt
import overspill
from overspill.estimate import measured
from turns import serve

COUNTED = 3  # steps whose bytes are counted
WARM = 2  # steps that are unlike others: nothing is traced in the first, and the disk has no states to read


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def plain(shape: list[int], micros: int) -> dict[str, Any]:
    """Seconds of forward and backward of each micro-batch but the first, without an engine, all ranks at it."""
    made = gpt.Shape(*shape)
    model = gpt.make(made)
    forward, backward = [], []
    _meet()
    for number in range(micros):
        model.zero_grad()
        begin = time.perf_counter()
        loss = model(gpt.batch(made, number))
        middle = time.perf_counter()
        loss.backward()
        forward.append(middle - begin)
        backward.append(time.perf_counter() - middle)
    return {"forward": forward[1:], "backward": backward[1:]}


def rates(placement: str, disk: str) -> dict[str, Any]:
    """Of the linear layers of overspill.estimate.measured, one token a step, all ranks at it."""
    _meet()
    forward, backward = measured.plain(1)
    _meet()
    budget = {"host": "2GiB", "nvme": [disk]} if placement == "nvme" else {"host": "2GiB"}
    engine = {"device": "host", "train_after_save": False, "placement": placement}
    times = measured.engine_times({"budget": budget, "engine": engine, "gradient_clipping": 1e6})
    return times | {"plain_forward": forward, "plain_backward": backward}


def train(shape: list[int], config: dict[str, Any], steps: int) -> dict[str, Any]:
    """Seconds of each step; then bytes of a step. These are what more steps between two moments of rest move more than
    one: after a rest forward reads weights that it otherwise gets from an update."""
    made = gpt.Shape(*shape)
    engine, *_ = overspill.initialize(gpt.make(made), config)
    micros, numbers = config.get("gradient_accumulation_steps", 1), itertools.count()

    def step() -> float:
        begin = time.perf_counter()
        for _ in range(micros):
            engine.backward(engine(gpt.batch(made, next(numbers))))
            engine.step()
        return time.perf_counter() - begin

    def moved() -> tuple[int, int]:
        engine.synchronize()
        _meet()  # no rank reads for another
        stats = engine.stats()
        return stats["nvme_read_bytes"], stats["nvme_written_bytes"]

    try:
        _meet()
        seconds = [step() for _ in range(WARM + steps)][WARM:]
        marks = [moved()]
        for count in (1, 1 + COUNTED):
            for _ in range(count):
                step()
            marks.append(moved())
        read, written = (three - 2 * two + one for one, two, three in zip(*marks, strict=True))
        stats = engine.stats()
    finally:
        engine.close()
    return {
        "steps": seconds,
        "read": read / COUNTED,
        "written": written / COUNTED,
        "host": stats["host_used_bytes"],
        "nvme": stats["nvme_allocated_bytes"],
    }


def ready():
    """Known to the others of its team."""
    torch.set_num_threads(int(sys.argv[1]))
    if len(sys.argv) > 2 and json.loads(sys.argv[2]) > 1:
        dist.init_process_group("gloo")
    return {}, {"plain": plain, "rates": rates, "train": train}


if __name__ == "__main__":
    serve(ready)
