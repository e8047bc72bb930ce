"""What this machine does: a few steps of small linear layers, by themselves and in the engine, in memory and on
NVMe."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..memory import free_bytes
from .machine import UPDATE_BYTES, Machine

WIDTH, LAYERS, STEPS = 2048, 12, 7
_UNLIKE_OTHERS = 2  # first steps
_TOKENS = 512
ELEMENTS = LAYERS * WIDTH * WIDTH
_STATE_BYTES = 24  # of an element, read and written by an update on NVMe: 12 each way


def _model() -> nn.Module:
    with torch.random.fork_rng():
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to(torch.bfloat16)


def _median(values: list[float]) -> float:
    return statistics.median(values[_UNLIKE_OTHERS:])


def plain(tokens: int, steps: int = STEPS) -> tuple[float, float]:
    """Seconds of forward and of backward, without an engine."""
    model, x = _model(), torch.zeros(tokens, WIDTH, dtype=torch.bfloat16)
    forward, backward = [], []
    for _ in range(steps):
        model.zero_grad()
        begin = time.perf_counter()
        loss = model(x).float().sum()
        middle = time.perf_counter()
        loss.backward()
        forward.append(middle - begin)
        backward.append(time.perf_counter() - middle)
    return _median(forward), _median(backward)


def engine_times(config: dict[str, Any], steps: int = STEPS) -> dict[str, float]:
    """Seconds of each part of a step of one token: forward, backward with its gradients, step(), and the updates, for
    which the caller waits here, with the "update_cpu" seconds of all processors. "slots": of the ring."""
    from ..start import initialize

    engine, *_ = initialize(_model(), config)
    x = torch.zeros(1, WIDTH, dtype=torch.bfloat16)
    times: dict[str, list[float]] = {"forward": [], "backward": [], "step": [], "update": []}
    processors: list[float] = []
    try:
        for _ in range(steps):
            marks = [time.perf_counter()]
            loss = engine(x).float().sum()
            marks.append(time.perf_counter())
            engine.backward(loss)
            marks.append(time.perf_counter())
            engine.step()
            marks.append(time.perf_counter())
            before = time.process_time()
            engine.synchronize()
            processors.append(time.process_time() - before)
            marks.append(time.perf_counter())
            for part, begin, end in zip(times, marks, marks[1:], strict=False):
                times[part].append(end - begin)
        slots = engine.plan.as_dict()["ring_slots"]
    finally:
        engine.close()
    medians = {part: _median(each) for part, each in times.items()}
    return medians | {"update_cpu": _median(processors), "slots": float(slots)}


def disk_rates(
    inside: dict[str, float], away: dict[str, float], elements: float, cores: float
) -> tuple[float, float]:
    """Bytes a second of the disk, and the share of so many processors that it takes at that speed, of `engine_times` in
    memory and on NVMe. `elements`: of this rank's shard."""
    moved = _STATE_BYTES * elements
    # A ring of s slots reaches s / (s + 1) of what the disk could (engine/plan/predict.h).
    speed = moved / away["update"] * (away["slots"] + 1) / away["slots"]
    processor = max(0.0, away["update_cpu"] - inside["update_cpu"]) / moved
    return speed, min(1.0, processor * speed / cores)


def machine(folder: str | Path) -> Machine:
    """Of this machine: compute by all its cores, update, intake and hooks of the engine, and the disk of `folder`.
    Takes some seconds and 1.3 GB of the disk; nothing is left there. Raises OSError, StoreError."""
    forward, backward = plain(_TOKENS)
    flops = 6.0 * ELEMENTS * _TOKENS / (forward + backward)
    alone = plain(1)
    engine = {"device": "host", "train_after_save": False}
    inside = engine_times({"budget": {"host": "2GiB"}, "engine": engine | {"placement": "host"}})
    with tempfile.TemporaryDirectory(prefix="overspill-measure-", dir=folder) as disk:
        budget = {"host": "2GiB", "nvme": [disk]}
        away = engine_times({"budget": budget, "engine": engine | {"placement": "nvme"}})
    disk, processor = disk_rates(inside, away, ELEMENTS, len(os.sched_getaffinity(0)))
    return Machine(
        host_bytes=free_bytes(),
        flops_per_s=flops,
        memory_bytes_per_s=UPDATE_BYTES * ELEMENTS / inside["update"],
        disk_bytes_per_s=disk,
        disk_processor=processor,
        update_s=inside["update"] / ELEMENTS,
        intake_s=max(0.0, inside["backward"] - alone[1] + inside["step"]) / (2 * ELEMENTS),
        use_s=max(0.0, inside["forward"] - alone[0]) / LAYERS,
    )
