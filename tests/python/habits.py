"""What scripts do with parameters, their gradients and states, each as a script that knows nothing of an engine.

A habit is a function of `make`, which gives a model and its optimizer, plain or under an engine. It returns what it
saw; the model's state_dict at the end is compared too. `refused`: what the error says where the engine does not let
it. `close`: the last bits may differ."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass
class Habit:
    name: str
    run: Callable[[Callable], Any]
    refused: str | None
    close: bool


HABITS: list[Habit] = []


def habit(run=None, *, refused=None, close=False):
    if run is None:
        return lambda run: habit(run, refused=refused, close=close)
    HABITS.append(Habit(run.__name__, run, refused, close))
    return run


def batch(i=0):
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(i))


def loss_of(model, i=0):
    return model(batch(i)).square().mean()


def train(model, optimizer, steps=2, loss=loss_of, after=lambda: None):
    """The usual loop; the losses."""
    losses = []
    for i in range(steps):
        optimizer.zero_grad()
        value = loss(model, i)
        value.backward()
        optimizer.step()
        after()
        losses.append(value.item())
    return losses


def closure_of(model, optimizer, losses=None):
    """What optimizers evaluate; the losses go to the list."""

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        if losses is not None:
            losses.append(loss.item())
        return loss

    return closure


def before_step(function, close=False):
    """A habit between backward and step, three times."""

    def run(make):
        model, optimizer = make()
        seen = []
        for i in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, i)
            loss.backward()
            seen += [function(model), loss.item()]
            optimizer.step()
        return seen

    run.__name__ = function.__name__
    return habit(run, close=close)


class Scaled(nn.Module):
    """Has weights that a script uses outside forward."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(12, 16)
        self.body = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, ids):
        return torch.tanh(self.body(self.emb(ids)))
