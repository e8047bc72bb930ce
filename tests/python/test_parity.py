"""In fp32 the engine computes what torch.optim computes, up to the last bits: its multiply-adds are fused."""

import copy

import pytest
import torch
from torch import nn

import overspill


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
def test_fifty_steps_beside_torch(kind, placement, config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
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
