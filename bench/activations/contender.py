"""One way to train, in a process of its own: a contender of bench/activations/run.py.

bench/activations/contender.py '{"shape": …, "config": … or null}'

Without a configuration it is plain torch with torch's AdamW. Both learn from the same tokens, in fp32."""

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "step"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bindings"))

import torch

import gpt
import overspill
from peak import growth
from turns import serve

RATE = 1e-4


def ready():
    job = json.loads(sys.argv[1])
    shape = gpt.Shape(*job["shape"])
    model = gpt.make(shape, torch.float32)
    parameters = sum(p.numel() for p in model.parameters())
    if job["config"] is None:
        trained, engine = model, None
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    else:
        engine = trained = overspill.initialize(model, job["config"])[0]
    count, passes = 0, []

    def step() -> float:
        nonlocal count
        began = time.perf_counter()
        loss = trained(gpt.batch(shape, count))
        if engine is not None:
            engine.backward(loss)
            passes.append(time.perf_counter() - began)
            engine.step()
        else:
            loss.backward()
            passes.append(time.perf_counter() - began)
            optimizer.step()
            optimizer.zero_grad()
        count += 1
        return loss.item()

    def turn(steps: int) -> dict[str, Any]:
        """Seconds and losses of steps, those of forward and backward (`passes`), how far the process grew in them, and
        the most that it has had resident."""
        seconds, losses = [], []
        passes.clear()
        before = {} if engine is None else engine.stats()
        with growth() as grown:
            for _ in range(steps):
                began = time.perf_counter()
                losses.append(step())
                seconds.append(time.perf_counter() - began)
        found = {"steps": seconds, "passes": list(passes), "losses": losses}
        found |= {"grown_bytes": grown["bytes"], "peak_bytes": grown["peak"]}
        if engine is not None:
            after = engine.stats()
            found |= {
                key: (after[key] - before[key]) // steps for key in after if key.startswith("activations_")
            }
            found["again"] = engine.computed_again
            waits = engine.report()["wait_by_cause"]
            found["waited"] = waits["activations"]
            longest = max(waits, key=waits.get)
            found["bound"] = f"{longest}, {waits[longest]:.2f} s of the last step"
        return found

    return {"parameters": parameters}, {"turn": turn}


if __name__ == "__main__":
    serve(ready)
