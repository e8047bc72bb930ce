"""A process of test_tiled_layers.py: trains a linear layer that is larger than the host budget, and prints, as JSON,
how far the process has grown beside what it had before the engine, the engine's own peak, and the losses, or the
error."""

import json
import sys

import torch
from torch import nn

import overspill
from overspill import memory

WIDTH, ROWS = 4096, 16384


def main(folder: str, tile: str | None, host: str) -> dict:
    torch.set_num_threads(1)
    settings = {
        "budget": {"host": host, "nvme": [folder], "tile": tile},
        "optimizer": {"type": "SGD", "lr": 1.0},
    }
    x, wanted = torch.randn(16, WIDTH), torch.randn(16, ROWS)
    before = memory.rss_bytes()
    memory.reset_peak_rss()
    try:
        with overspill.Init(settings):
            model = nn.Sequential(nn.Linear(WIDTH, ROWS))
        engine, *_ = overspill.initialize(model, settings)
    except overspill.BudgetError as error:
        return {"error": str(error)}
    memory.reset_peak_rss()
    losses = []
    for _ in range(3):
        loss = (engine(x) - wanted).square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    grown = memory.peak_rss_bytes() - before
    return {"error": None, "grown": grown, "losses": losses, "host_peak": engine.stats()["host_peak_bytes"]}


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))), flush=True)
