"""The model that the checkpoints beside it are of, and its batches."""

import torch
from torch import nn


class Net(nn.Module):
    """With a buffer, a layer norm, a weight without bias and frozen weights."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.a = nn.Linear(6, 10)
        self.norm = nn.LayerNorm(10)
        self.register_buffer("scale", torch.tensor(1.5))
        self.b = nn.Linear(10, 11, bias=False)
        self.frozen = nn.Linear(11, 11).requires_grad_(False)

    def forward(self, x, y):
        hidden = self.norm(torch.tanh(self.a(self.embed(x) * self.scale)))
        return nn.functional.cross_entropy(self.frozen(self.b(hidden)), y)


def batch(number):
    random = torch.Generator().manual_seed(100 + number)
    return torch.randint(0, 11, (20,), generator=random), torch.randint(0, 11, (20,), generator=random)


def train(model, optimizer, steps):
    """In plain PyTorch; the losses."""
    losses = []
    for number in steps:
        loss = model(*batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
