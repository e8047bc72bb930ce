"""In fp32 the engine computes what torch.optim computes, up to the last bits: its multiply-adds are fused."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR

import overspill


def network():
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
def test_fifty_steps_beside_torch(kind, placement, config):
    torch.manual_seed(0)
    model = network()
    plain = copy.deepcopy(model)
    hyper = {"lr": 2e-3, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.02}
    optimizer = getattr(torch.optim, kind)(plain.parameters(), **hyper)
    settings = config(placement, optimizer={"type": kind, **hyper}, clipping=0.5)
    engine, *_ = overspill.initialize(model, settings)
    for i in range(50):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(i))
        y = x.square().sum(1, keepdim=True).sin()
        loss = (engine(x) - y).square().mean()
        engine.backward(loss)
        engine.step()
        expected = (plain(x) - y).square().mean()
        expected.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        assert engine.last_step.norm == pytest.approx(norm.item(), rel=1e-4)
    for key, value in engine.state_dict().items():
        assert (value - plain.state_dict()[key]).abs().max() <= 1e-6, key
    engine.close()


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "weight_decay": 0.01}),
    "momentum": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01}),
    "nesterov": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.8, "nesterov": True}),
    "maximize": (torch.optim.SGD, {"lr": 1e-4, "momentum": 0.5, "maximize": True}),
    "adagrad": (
        torch.optim.Adagrad,
        {"lr": 0.02, "lr_decay": 0.1, "weight_decay": 0.01, "initial_accumulator_value": 0.3},
    ),
    "adam": (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.01, "maximize": True}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-3, "betas": (0.7, 0.9)}),
}


@pytest.mark.parametrize("placement", ["host", "half"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_users_optimizer_and_its_scheduler_beside_torch(name, placement, config):
    """Two groups, one of them with options of its own, and a scheduler bound to the user's object."""
    kind, hyper = OPTIMIZERS[name]
    torch.manual_seed(0)
    model = network()
    plain = copy.deepcopy(model)

    def make(module):
        own = {"params": module[0].parameters(), "weight_decay": 0.03}
        optimizer = kind([own, {"params": module[2:].parameters()}], **hyper)
        return optimizer, MultiStepLR(optimizer, [5, 12], gamma=0.5)

    taken, rates = make(model)
    optimizer, scheduler = make(plain)
    engine, *_ = overspill.initialize(model, config(placement, clipping=1.0), taken, rates)
    if name == "adagrad":
        started = engine.optimizer_state(model[0].weight)["sum"]
        assert torch.equal(started, torch.full_like(started, 0.3))
        assert torch.equal(taken.state[model[0].weight]["sum"], started)
    for i in range(20):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(i))
        y = x.square().sum(1, keepdim=True).sin()
        engine.backward((engine(x) - y).square().mean())
        engine.step()
        (plain(x) - y).square().mean().backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert taken.param_groups[1]["lr"] == optimizer.param_groups[1]["lr"] == hyper["lr"] / 4
    for key, value in engine.state_dict().items():
        assert (value - plain.state_dict()[key]).abs().max() <= 1e-6, key
    states = engine.optimizer_state(model[2].weight)
    for key, theirs in optimizer.state[plain[2].weight].items():
        if key != "step" and theirs is not None:
            assert (states.pop(key) - theirs).abs().max() <= 1e-5, key
    assert not states
    engine.close()
