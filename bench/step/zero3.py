"""DeepSpeed ZeRO-3 as a contender of bench/step/run.py, in its own environment (tools/peers).

bench/step/zero3.py '{"shape": …, "config": {DeepSpeed's}}'
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import gpt
from one_rank import be_one_rank
from turns import serve


def ready():
    """An engine over the model."""
    be_one_rank("cpu")
    import deepspeed

    job = json.loads(sys.argv[1])
    shape = gpt.Shape(*job["shape"])
    deepspeed.init_distributed(dist_backend="gloo")
    with deepspeed.zero.Init(config_dict_or_path=job["config"]):
        model = gpt.make(shape)
    parameters = sum(p.ds_numel for p in model.parameters())
    engine = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=job["config"]
    )[0]
    count = 0

    def turn(steps: int) -> dict[str, Any]:
        """Seconds of each step, and of the optimizer's part."""
        nonlocal count
        seconds, updates = [], []
        for _ in range(steps):
            started = time.perf_counter()
            engine.backward(engine(gpt.batch(shape, count)))
            between = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - started)
            updates.append(time.perf_counter() - between)
            count += 1
        return {"steps": seconds, "updates": updates}

    return {"parameters": parameters}, {"turn": turn}


if __name__ == "__main__":
    serve(ready)
