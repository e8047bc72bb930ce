"""Losses, weights, masters and buffers of every model are bit-equal to the plain loop, wherever states
live."""

import gc
import random

import pytest
import torch
from scene import is_released
from zoo import ZOO, build

import overspill
from overspill import leases
from plain import Plain

STEPS = 4


def seed(i):
    torch.manual_seed(1000 + i)
    random.seed(1000 + i)


def bits(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def assert_same(name, ours, plain):
    assert ours.shape == plain.shape and ours.dtype == plain.dtype, name
    ours, plain = ours.detach().cpu(), plain.detach().cpu()
    assert torch.equal(bits(ours), bits(plain)), f"{name}: {(ours.float() - plain.float()).abs().max()}"


def step_beside(engine, plain, i, batch, loss_of=lambda model, *inputs: model(*inputs)):
    """One step of both, with the same random numbers: loss and norm are the same."""
    seed(i)
    loss = loss_of(engine, *batch)
    engine.backward(loss)
    engine.step()
    seed(i)
    expected = loss_of(plain.model, *(t.to(engine.device) for t in batch))
    plain.backward(expected)
    assert_same(f"loss of step {i}", loss, expected)
    assert engine.last_step.norm == pytest.approx(plain.norm(), rel=1e-6)
    plain.step(engine.last_step.clip)


@pytest.mark.parametrize("placement", ["host", "half", "nvme"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ZOO)
def test_bit_equal_to_plain(name, dtype, placement, config):
    model, batch = build(name, dtype)
    plain = Plain(build(name, dtype)[0])
    engine, *_ = overspill.initialize(model, config(placement, clipping=0.5))
    assert is_released(*(p for p in model.parameters() if p.is_floating_point()))
    try:
        for i in range(STEPS):
            step_beside(engine, plain, i, batch(i))
        compare(engine, plain)
        assert_nothing_held(engine)
    finally:
        engine.close()


def compare(engine, plain):
    ours, theirs = engine.state_dict(), plain.model.state_dict()
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert_same(key, ours[key], value)
    names = dict(engine.module.named_parameters(remove_duplicate=False))
    for name, parameter in plain.model.named_parameters():
        states = [s for s in plain.states if s.parameter is parameter]
        if states:
            assert_same(f"master of {name}", engine.weight(names[name], torch.float32), states[0].master())


def assert_nothing_held(engine):
    """No lease outlives forward and backward: neither here nor through a view that autograd or the model
    keeps."""
    gc.collect()
    units = engine._residency.units
    assert not [u.name for u in units if u.flat is not None or u.pins or u.shown]
    assert leases.lingering() == 0
