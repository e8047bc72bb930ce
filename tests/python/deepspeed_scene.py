"""A small model under DeepSpeed's calls."""

import torch
from torch import nn

from overspill import deepspeed

PARAMS = {"lr": 1e-2, "weight_decay": 0.0}


def made(seed=0, **more):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": PARAMS},
        "overspill": {"budget": {"host": "32MiB"}},
        **more,
    }
    return deepspeed.initialize(model=model, config=config)[0]


def step(engine, count=1):
    for number in range(count):
        x = torch.full((2, 8), number + 1.0, dtype=engine.module[0].weight.dtype)
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()


SCHEDULER = {
    "type": "WarmupLR",
    "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 8, "warmup_type": "linear"},
}


class Tied(nn.Module):
    """A weight and a whole module, with a buffer, by two names each."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = self.same = nn.BatchNorm1d(4)
        self.register_buffer("passing", torch.zeros(1), persistent=False)

    def forward(self, x):
        return self.head(self.same(self.embedding(x)))
