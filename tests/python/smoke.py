"""The first look at a device: a small model, two steps beside plain PyTorch, weights out and a checkpoint. Seconds.

OVERSPILL_DEVICE=cuda python -m pytest tests/python/smoke.py
"""

import copy
import os

import pytest
import torch
from torch import nn

import overspill

DEVICE = os.environ.get("OVERSPILL_DEVICE", "host")
WHERE = "cpu" if DEVICE == "host" else DEVICE


@pytest.fixture(autouse=True)
def device():
    if WHERE != "cpu" and not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no GPU")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))


def step(model, optimizer, i):
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(i)).to(WHERE)
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def start(model, tmp_path, name):
    config = {
        "budget": {"host": "256MiB", "nvme": [str(tmp_path)]},
        "engine": {"device": DEVICE, "chunk_elements": 4096, "threads": 2, "job": name},
    }
    return overspill.initialize(model, config, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))[:2]


def test_two_steps_are_as_in_plain_pytorch(tmp_path):
    plain, model = network().to(WHERE), network()
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    engine, optimizer = start(model, tmp_path, "one")
    assert engine.device.type == WHERE
    # A released parameter is on the device, though its weight came from the CPU.
    assert {p.device.type for p in model.parameters()} == {WHERE}
    for i in range(2):
        assert step(model, optimizer, i) == pytest.approx(step(plain, theirs, i), rel=1e-5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.cpu(), plain.state_dict()[name].cpu(), rtol=1e-4, atol=1e-6)
    engine.save_checkpoint(tmp_path / "saved")
    expected = copy.deepcopy(model)
    engine.close()
    engine, _ = start(network(), tmp_path, "two")
    engine.load_checkpoint(tmp_path / "saved")
    for name, value in engine.state_dict().items():
        assert torch.equal(value.cpu(), expected.state_dict()[name].cpu())
    engine.close()
