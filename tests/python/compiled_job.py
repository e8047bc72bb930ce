"""One rank of test_compiled_blocks.py: trains blocks without engine.compile, then with it, at each stage. Prints, as
JSON, by stage both runs' losses and what was compiled."""

import json
import sys

import torch
import torch.distributed as dist
from ranks_scene import batches, config
from torch import nn

import overspill
from overspill.layers import compiled


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)) for _ in range(3)
        )

    def forward(self, x, y):
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.mse_loss(x, y)


def run(folder: str, stage: int, compile: bool) -> dict:
    torch.manual_seed(7)
    said = config(folder, zero_optimization={"stage": stage})
    said["engine"].compile = compile
    engine, *_ = overspill.initialize(Net(), said)
    losses = []
    for x, y in batches(torch.float32):
        loss = engine(*(rows.chunk(engine.world_size)[engine.rank] for rows in (x, y)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    found = {"losses": losses, "compiled": engine.compiled}
    engine.close()
    return found


if __name__ == "__main__":
    compiled.BACKEND = "aot_eager"
    dist.init_process_group("gloo")
    found = {stage: [run(sys.argv[1], stage, compile) for compile in (False, True)] for stage in (0, 2, 3)}
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()
