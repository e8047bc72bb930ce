"""A process of test_watch.py: trains within budget.process. Prints, as JSON, its peak, the limit, the error, and the
loss of a smaller batch afterwards."""

import json
import sys
from typing import ClassVar

import torch
from torch import nn

import overspill
from overspill import memory

WIDTH, ROWS = 1024, 8192  # an activation takes 32 MiB


class Hoard(torch.autograd.Function):
    """Its backward makes so many MiB, and keeps them."""

    kept: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(ctx, x, size):
        ctx.size = size
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Hoard.kept.append(torch.ones(ctx.size << 18))
        return gradient, None


def main(
    folder: str,
    left: int,
    recompute: str = "none",
    activations: str | None = None,
    head: int = 0,
    logits: str | None = None,
    hoard: int = 0,
) -> dict:
    """`head`: rows of a linear layer at the end, frozen as all others, whose loss is cross entropy. `hoard`: MiB that
    backward makes and keeps behind each layer."""
    torch.set_num_threads(1)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(12)]
    blocks = (
        nn.Sequential(*(part for layer in layers[i : i + 3] for part in (layer, nn.Tanh())))
        for i in (0, 3, 6, 9)
    )
    model = nn.Sequential(*blocks)
    if head:
        model = nn.Sequential(model[0], model[1], nn.Linear(WIDTH, head))
    for p in model.parameters():
        p.requires_grad_(p.dim() == 1)  # biases alone: nothing else grows
    x = torch.randn(64 if hoard else ROWS, WIDTH)
    if hoard:
        for layer in layers:
            layer.register_forward_hook(lambda layer, given, y: Hoard.apply(y, hoard))
    limit = memory.own_bytes() + (left << 20) + (96 << 20)
    settings = {
        "budget": {
            "process": limit,
            "host": "96MiB",
            "nvme": [folder],
            "activations": activations,
            "logits": logits,
        },
        "optimizer": {"type": "SGD", "lr": 1e-3},
        "engine": {"recompute": recompute},
    }

    def loss_of(y):
        if head:
            return nn.functional.cross_entropy(y, torch.zeros(len(y), dtype=torch.int64))
        return y[:64].square().mean()

    engine, *_ = overspill.initialize(model, settings)
    memory.reset_peak_rss()
    found = {"limit": limit, "error": None, "after": None}
    try:
        for _ in range(2):
            engine.backward(loss_of(engine(x)))
            engine.step()
            Hoard.kept.clear()
    except overspill.BudgetError as error:
        found["error"] = str(error)
    found["peak"] = memory.peak_rss_bytes() - (memory.rss_bytes() - memory.own_bytes())
    Hoard.kept.clear()
    hoard = 0
    engine.zero_grad()
    loss = loss_of(engine(x[:64]))
    engine.backward(loss)
    engine.step()
    found["after"] = loss.item()
    return found


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))), flush=True)
