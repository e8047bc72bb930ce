"""Overspill as a contender of bench/step/run.py.   bench/step/ours.py '{"shape": …, "config": …}'"""

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bindings"))

import gpt
import overspill
from turns import serve


def ready():
    """Builds the model straight into the engine."""
    job = json.loads(sys.argv[1])
    shape = gpt.Shape(*job["shape"])
    config = overspill.Config.read(job["config"])
    with overspill.Init(config):
        model = gpt.make(shape)
    parameters = sum(p.numel() for p in model.parameters())
    engine = overspill.initialize(model, config)[0]
    count = 0

    def step() -> None:
        nonlocal count
        loss = engine(gpt.batch(shape, count))
        engine.backward(loss)
        engine.step()
        count += 1

    def turn(steps: int) -> dict[str, Any]:
        """Steps, and the report of the last: with two or more, of one that lies wholly inside the turn."""
        seconds = []
        for _ in range(steps):
            started = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - started)
        last = engine.last_step
        return {
            "steps": seconds,
            "report": engine.report(),
            "stats": engine.stats(),
            "clip": last.clip,
        }

    def trace(path: str) -> dict[str, Any]:
        """Three steps into a file for Perfetto."""
        with engine.trace(path):
            return turn(3)

    def predict(budgets: list[int]) -> dict[str, Any]:
        """What the engine expects of a step, under these budgets too."""
        return engine.predict(budgets)

    said = {"parameters": parameters, "plan": engine._core.plan.as_dict(), "plan_text": engine.plan_text}
    return said, {"turn": turn, "trace": trace, "predict": predict}


if __name__ == "__main__":
    serve(ready)
