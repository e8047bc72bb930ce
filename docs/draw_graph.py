"""Draws docs/results/graph.svg: the graph of a step of two towers whose weights and states lie on NVMe.

docs/draw_graph.py
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

import overspill

WIDTH = 256
PICTURE = Path(__file__).resolve().parent / "results/graph.svg"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.text = nn.Sequential(Block(), Block())
        self.image = nn.Sequential(Block(), Block())

    def forward(self, x):
        return (self.text(x) * self.image(x)).mean()


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "budget": {"host": "64MiB", "nvme": [folder]},
            "engine": {"device": "host", "placement": "nvme"},
        }
        engine, *_ = overspill.initialize(Towers(), config)
        x = torch.randn(512, WIDTH)

        def step() -> None:
            engine.backward(engine(x))
            engine.step()

        for _ in range(3):
            step()
        engine.graph(step).write(PICTURE)
        engine.close()


if __name__ == "__main__":
    main()
