"""Engines whose blocks backward computes again (`engine.recompute`), and models with blocks."""

import pytest
import torch
from torch import nn
from zoo import ZOO, build

import overspill

ARENA = 64 << 10


@pytest.fixture
def again(config):
    """Makes engines that compute blocks again; with `arena` they move what is left to the disk."""
    made = []

    def make(model, placement="half", arena=None, optimizer=None, recompute="blocks", **options):
        settings = config(placement, job=f"job{len(made)}", recompute=recompute, **options)
        settings["budget"]["activations"] = arena
        if optimizer is not None:
            del settings["optimizer"]
        engine, *_ = overspill.initialize(model, settings, optimizer)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


def blocks(engine):
    return [m.__dict__["forward"] for m in engine.module.modules() if "forward" in m.__dict__]


def calls_again(engine):
    return sum(block.calls_again for block in blocks(engine))


COMPUTES_AGAIN = ["llama", "gpt2", "mixtral", "t5"]
HAVE_BLOCKS = [*COMPUTES_AGAIN, *(name for name in ZOO if name.startswith(("llama_", "gpt2_", "resnet")))]


def built(name):
    """As the zoo makes it, and without a cache of keys and values, which would leave nothing to compute again."""
    model, batch = build(name, torch.bfloat16)
    for part in model.modules():
        if hasattr(getattr(part, "config", None), "use_cache"):
            part.config.use_cache = False
    return model, batch


class Part(nn.Module):
    """A block that does `work(self, x)` between two layers."""

    def __init__(self, work, width=32):
        super().__init__()
        self.first, self.second, self.work = nn.Linear(width, width), nn.Linear(width, width), work
        self.register_buffer("seen", torch.zeros(width))

    def forward(self, x, **options):
        return x + self.second(self.work(self, self.first(x), **options))


class Repeats(nn.Module):
    def __init__(self, work, count=3, width=32):
        super().__init__()
        torch.manual_seed(3)
        self.parts = nn.ModuleList(Part(work, width) for _ in range(count))

    def forward(self, x, **options):
        for part in self.parts:
            x = part(x, **options)
        return x.square().mean()


def plainly(part, x):
    return x.tanh()
