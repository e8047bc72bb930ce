"""An optimizer of a script's own, engines that train with it, and how tests compare what they hold."""

import contextlib
import sys

import pytest
import torch
from torch import nn

import overspill

FILE = "optimizer.safetensors"
COMMAND = [sys.executable, "-m", "overspill.cli"]


class Odd(torch.optim.Optimizer):
    """A script's own: states of every kind, wider than the weights, and a value beside torch's two."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr, "words": ("a", None, 2.5)})
        self.calls = 0

    def state_dict(self):
        return super().state_dict() | {"calls": self.calls}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.calls = state_dict["calls"]

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, self.state[p], group["lr"])

    def _update(self, p, state, lr):
        if not state:
            state |= {"old": [], "n": 0, "kind": "odd", "none": None, "least": float("inf"), "on": True}
            state["wide"] = torch.zeros(p.shape, dtype=torch.float64)
            state["count"] = torch.zeros(3, 0), torch.tensor(0)
            state["same"] = state["twin"] = torch.zeros(p.shape)
            state["by"] = {1: "one", (2, "x"): [torch.arange(6.0).view(2, 3).t()]}
        state["n"] += 1
        state["count"][1].add_(1)
        state["least"] = min(state["least"], p.grad.abs().max().item())
        state["wide"].mul_(0.9).add_(p.grad.double())
        state["same"].add_(1)
        state["old"] = [*state["old"][-1:], p.grad.float().clone()]
        step = (
            state["wide"]
            + sum(state["old"])
            + state["twin"] * state["least"]
            + state["count"][1]
            + self.calls
        )
        p.add_(step.to(p.dtype), alpha=-lr * 1e-2)


class Named(Odd):
    """Of another name."""


def adamw(params):
    return torch.optim.AdamW(params, weight_decay=0.1)


def net(dtype=torch.float32, width=32, frozen=True):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.Linear(width, 16)
    ).to(dtype)
    model[2].requires_grad_(not frozen)
    return model


def groups_of(model, kind):
    """With options of their own, in an order that is not the model's, frozen ones too. Muon takes matrices alone."""
    if kind is torch.optim.LBFGS:
        return [p for p in model.parameters() if p.requires_grad]
    if kind is torch.optim.Muon:
        for p in model.parameters():
            p.requires_grad_(p.requires_grad and p.ndim == 2)
        return [{"params": [model[3].weight], "lr": 0.02}, {"params": [model[0].weight], "lr": 0.01}]
    last = [model[3].bias, model[3].weight]
    return [{"params": last, "lr": 0.02}, {"params": [*model[:3].parameters()], "lr": 0.01}]


def made(start, kind, dtype=torch.float32, width=32, **settings):
    model = net(dtype, width)
    return start(model, kind(groups_of(model, kind)), **settings)


def train(engine, steps):
    """An engine's steps by its number of steps."""
    optimizer, model = engine.optimizer, engine.module
    first = model[0].weight
    for i in steps:
        x = torch.randn(4, first.shape[1], generator=torch.Generator().manual_seed(i)).to(first.dtype)

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        if isinstance(optimizer.user, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def weights_of(engine):
    return {name: value.clone() for name, value in engine.state_dict().items()}


def alike(a, b):
    """To the kind of each value, the dtype and the memory order of each tensor."""
    if isinstance(a, torch.Tensor):
        return a.dtype is b.dtype and a.stride() == b.stride() and torch.equal(a, b)
    if isinstance(a, dict):
        return type(b) is type(a) and [*a] == [*b] and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(b) is type(a) and len(a) == len(b) and all(map(alike, a, b))
    return type(a) is type(b) and a == b


@contextlib.contextmanager
def unchanged(engine):
    """The block changes nothing of what the engine trains."""
    optimizer = engine.optimizer
    before = weights_of(engine), engine.stats()["step"]
    states = None if optimizer.groups.foreign is None else torch.utils._pytree.tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, optimizer.state_dict()
    )  # fmt: skip
    yield
    assert alike(before, (weights_of(engine), engine.stats()["step"]))
    assert states is None or alike(states, optimizer.state_dict())


def refused(engine, folder, words):
    with unchanged(engine), pytest.raises(overspill.CheckpointError, match=words):
        engine.load_checkpoint(folder)


def other(start, kind=Odd, of=None, **options):
    """An engine that has stepped, so that it would be seen if a load changed anything."""
    engine = made(start, kind, **options) if of is None else of
    train(engine, range(5, 6))
    return engine
