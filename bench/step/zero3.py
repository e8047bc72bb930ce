"""DeepSpeed ZeRO-3 as a contender of bench/step/run.py, in its own environment (tools/peers).

bench/step/zero3.py '{"shape": …, "config": {DeepSpeed's}}'
"""

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import gpt
from turns import serve


def ready():
    """An engine over the model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
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
