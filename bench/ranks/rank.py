"""One rank of a contender of bench/ranks/beside_deepspeed.py.   rank.py ours|deepspeed SHAPE CONFIG"""

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "step"))

import torch.distributed as dist

import gpt
from turns import peak_rss_bytes, serve


def ours(config: dict) -> tuple[Any, int]:
    """An engine over the model, and its parameters."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bindings"))
    import overspill

    model = gpt.make(SHAPE)
    parameters = sum(p.numel() for p in model.parameters())
    return overspill.initialize(model, config)[0], parameters


def deepspeeds(config: dict) -> tuple[Any, int]:
    """DeepSpeed's, made shard by shard."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = gpt.make(SHAPE)
    parameters = sum(p.ds_numel for p in model.parameters())
    made = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    return made[0], parameters


def sent_bytes() -> int:
    """Over loopback so far, by everybody on this machine."""
    (line,) = [
        text for text in Path("/proc/net/dev").read_text().splitlines() if text.strip().startswith("lo:")
    ]
    return int(line.split()[9])


def ready():
    """Trains on data of its own."""
    make = {"ours": ours, "deepspeed": deepspeeds}[sys.argv[1]]
    before = peak_rss_bytes()
    engine, parameters = make(json.loads(sys.argv[3]))
    count = 0

    def turn(steps: int) -> dict[str, Any]:
        """Seconds of each step, the losses, what went over loopback meanwhile."""
        nonlocal count
        dist.barrier()
        seconds, losses, sent = [], [], sent_bytes()
        for _ in range(steps):
            started = time.perf_counter()
            loss = engine(gpt.batch(SHAPE, dist.get_world_size() * count + dist.get_rank()))
            engine.backward(loss)
            engine.step()
            seconds.append(time.perf_counter() - started)
            losses.append(loss.item())
            count += 1
        dist.barrier()
        return {"steps": seconds, "losses": losses, "sent_bytes": sent_bytes() - sent}

    return {"parameters": parameters, "rss_before": before}, {"turn": turn}


if __name__ == "__main__":
    SHAPE = gpt.Shape(*json.loads(sys.argv[2]))
    serve(ready)
