"""Plain torch, forward and backward alone: the floor of bench/step/run.py.

bench/step/plain.py '{"shape": …}'
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bindings"))

import torch

import gpt
from turns import serve

UPDATED = 32 << 20  # parameters whose update is timed


def ready():
    """The model, and what can be asked for."""
    shape = gpt.Shape(*json.loads(sys.argv[1])["shape"])
    model = gpt.make(shape)
    parameters = sum(p.numel() for p in model.parameters())

    def turn(steps: int) -> dict[str, Any]:
        """Seconds of each forward and each backward; gradients are dropped."""
        forward, backward = [], []
        for number in range(steps):
            started = time.perf_counter()
            loss = model(gpt.batch(shape, number))
            between = time.perf_counter()
            loss.backward()
            backward.append(time.perf_counter() - between)
            forward.append(between - started)
            model.zero_grad()
        return {"forward": forward, "backward": backward}

    updated: list[Any] = []

    def update() -> dict[str, Any]:
        """Seconds of the update of all parameters, by what that of some takes in memory."""
        import overspill

        if not updated:
            weight = torch.nn.Parameter(torch.randn(UPDATED, dtype=torch.bfloat16))
            weight.grad = torch.randn(UPDATED, dtype=torch.bfloat16)
            updated.append(overspill.optim.AdamW([weight], lr=1e-4))
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            updated[0].step()
            seconds.append(time.perf_counter() - started)
        return {"update": sorted(seconds)[1] * parameters / UPDATED}

    return {"parameters": parameters}, {"turn": turn, "update": update}


if __name__ == "__main__":
    serve(ready)
