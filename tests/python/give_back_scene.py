"""What tests of engine.give_back() train, and how they compare it."""

import torch
from torch import nn


def train(model, optimizer, steps=range(2)):
    for i in steps:
        ids = torch.randint(0, 12, (5,), generator=torch.Generator().manual_seed(i))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids), ids).backward()
        optimizer.step()


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def sgd(model, **options):
    return torch.optim.SGD(trainable(model), lr=0.1, **options)


def plain_settings(config, placement, job):
    return {k: v for k, v in config(placement, job=job).items() if k != "optimizer"}


def assert_same(model, other, near=0.0):
    for name, value in model.state_dict().items():
        assert torch.allclose(value, other.state_dict()[name], rtol=near, atol=near), name


def sgd_pair(model):
    body = [*model[0].parameters(), *model[2].parameters()]
    return [
        torch.optim.SGD(body, lr=0.1, momentum=0.9),
        torch.optim.SGD(model[4].parameters(), lr=0.05, momentum=0.5),
    ]
