"""One way to train one of the models, in a process of its own: a contender of bench/compile/run.py.

bench/compile/contender.py '{"model": "llama", "quick": false, "way": "engine_compiled", "config": …}'"""

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bindings"))

import torch

import overspill
from models import models
from turns import serve


def ready():
    job = json.loads(sys.argv[1])
    torch.manual_seed(0)
    chosen = models(job["quick"])[job["model"]]
    model = chosen.make()
    parameters = sum(p.numel() for p in model.parameters())
    if job["config"] is None:
        trained, engine = model, None
        if job["way"] == "plain_compiled":
            trained = torch.compile(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    else:
        engine = trained = overspill.initialize(model, job["config"])[0]
    torch.manual_seed(1)  # dropout
    count = 0

    def step() -> float:
        nonlocal count
        loss = trained(**chosen.batch(count)).loss
        if engine is not None:
            engine.backward(loss)
            engine.step()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        count += 1
        return loss.item()

    def turn(steps: int) -> dict[str, Any]:
        seconds, losses = [], []
        for _ in range(steps):
            began = time.perf_counter()
            losses.append(step())
            seconds.append(time.perf_counter() - began)
        return {
            "steps": seconds,
            "losses": losses,
            "compiled": None if engine is None else engine.compiled,
        }

    return {"parameters": parameters}, {"turn": turn}


if __name__ == "__main__":
    serve(ready)
