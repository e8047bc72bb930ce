"""One rank of test_accelerator.py, each with an accelerator of its own: what ranks_job.py does, there."""

import copy
import json
import os
import sys

import accelerator
import ranks_scene
import torch

import overspill
from overspill._testing import Options


def main(folder: str, stage: str, accumulation: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(int(os.environ["RANK"]))  # rank 0's weights count
    config = {
        "budget": {"host": "256MiB", "device": "1MiB", "nvme": [folder]},
        "optimizer": {"type": "AdamW", "lr": 1e-2},
        "gradient_clipping": 0.5,
        "gradient_accumulation_steps": int(accumulation),
        "zero_optimization": {"stage": int(stage)},
        "engine": Options(device="simulated", placement="half", chunk_elements=4096, poison=True, threads=1),
    }
    engine, *_ = overspill.initialize(ranks_scene.Net(torch.float32), copy.deepcopy(config))
    batches = torch.Generator().manual_seed(100)
    losses = []
    for _ in range(ranks_scene.STEPS):
        for _ in range(int(accumulation)):
            x, y = torch.randn(2, ranks_scene.ROWS, ranks_scene.WIDTH, generator=batches)
            rows = slice(engine.rank, None, engine.world_size)
            loss = engine(x[rows], y[rows].to(engine.device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    weights = [engine.weight(p, torch.float32).sum().item() for p in engine.module.parameters()]
    said = {"losses": losses, "weights": weights, "norm": engine.last_step.norm}
    engine.close()
    accelerator.core.verify_freed_memory()
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
