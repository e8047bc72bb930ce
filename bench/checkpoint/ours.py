"""An engine as a contender of bench/checkpoint/run.py.

bench/checkpoint/ours.py '{"shape": …, "config": …, "dtype": "bfloat16"}'
"""

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench/shared"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench/step"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bindings"))

import torch

import gpt
import overspill
from places import bytes_of, drop_pages
from turns import serve


class Trained:
    """What can be asked of the engine; step and save are timed."""

    def __init__(self, engine: Any, shape: gpt.Shape):
        self.engine, self.shape, self.count = engine, shape, 0

    def step(self) -> float:
        """Seconds of a step."""
        began = time.perf_counter()
        self.engine.backward(self.engine(gpt.batch(self.shape, self.count)))
        self.engine.step()
        self.count += 1
        return time.perf_counter() - began

    def under_way(self) -> bool:
        return self.engine.save_progress().under_way

    def turn(
        self, steps: int, folder: str = "", every: int = 0, keep_last: int | None = None
    ) -> dict[str, Any]:
        """Steps; every so many of them begin with a save that goes on behind them. A row a step; `saving`: it, or the
        one before it, was beside a save. One step goes before, so that each finds the update of another under way."""
        self.step()
        rows, waited, before = [], 0.0, False
        for number in range(steps):
            began = time.perf_counter()
            if every and number % every == 0:
                path = Path(folder) / f"step-{self.count}"
                self.engine.save_checkpoint(path, keep_last=keep_last, blocking=False)
            call = time.perf_counter() - began if every and number % every == 0 else 0.0
            beside = self.under_way() or call > 0
            rows.append({"seconds": call + self.step(), "call": call, "saving": beside or before})
            before = beside
        if every:
            began = time.perf_counter()
            self.engine.wait_for_save()
            waited = time.perf_counter() - began
        return {"steps": rows, "wait_seconds": waited}

    def copying(self, folder: str, steps: int) -> dict[str, Any]:
        """Steps while one save copies; those that began and ended while it did. At least one, at most `steps`."""
        self.step()
        self.engine.save_checkpoint(folder, blocking=False)
        began, seconds = time.perf_counter(), []
        while len(seconds) < steps:
            taken = self.step()
            if seconds and not self.under_way():
                break
            seconds.append(taken)
        done, elapsed = self.engine.save_progress().done_bytes, time.perf_counter() - began
        outlasted = self.under_way()
        self.engine.wait_for_save()
        bytes_ = self.engine.save_progress().bytes
        return {"steps": seconds, "copied": done, "elapsed": elapsed, "outlasted": outlasted, "bytes": bytes_}

    def save(self, folder: str, blocking: bool) -> dict[str, Any]:
        """Seconds until the call returned, and until all was durable. A step goes before: what a save finds has
        changed since the last one, as it has in training."""
        self.step()
        self.engine.synchronize()
        began = time.perf_counter()
        self.engine.save_checkpoint(folder, blocking=blocking)
        returned = time.perf_counter() - began
        self.engine.wait_for_save()
        return {
            "returned": returned,
            "complete": time.perf_counter() - began,
            "bytes": bytes_of(Path(folder)),
        }

    def load(self, folder: str) -> dict[str, Any]:
        """Seconds of load_checkpoint, with nothing of the checkpoint in the page cache."""
        self.engine.synchronize()
        drop_pages(Path(folder))
        began = time.perf_counter()
        self.engine.load_checkpoint(folder)
        self.engine.synchronize()
        return {"loaded": time.perf_counter() - began}

    def states(self) -> dict[str, Any]:
        """Bytes of what a checkpoint holds."""
        return {"bytes": self.engine.save_progress().bytes}


def ready():
    """Builds the model, straight into the engine where there is a disk."""
    job = json.loads(sys.argv[1])
    shape = gpt.Shape(*job["shape"])
    config = overspill.Config.read(job["config"])
    with overspill.Init(config) if job["config"]["budget"]["nvme"] else contextlib.nullcontext():
        model = gpt.make(shape, getattr(torch, job["dtype"]))
    parameters = sum(p.numel() for p in model.parameters())
    trained = Trained(overspill.initialize(model, config)[0], shape)
    calls = ("turn", "copying", "save", "load", "states")
    return {"parameters": parameters}, {name: getattr(trained, name) for name in calls}


if __name__ == "__main__":
    serve(ready)
