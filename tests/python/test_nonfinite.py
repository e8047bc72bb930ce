"""What a step does whose gradients have an inf or a NaN: on_nonfinite."""

import copy
import warnings

import pytest
import torch
from torch import nn

import overspill


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).to(dtype)


def backward(model, factor=1.0, i=0):
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(i)).to(model[0].weight.dtype)
    (model(x).square().mean() * factor).backward()


def weights(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


def same(a, b):
    return all(torch.equal(v, b[k]) for k, v in a.items())


@pytest.mark.parametrize("by", ["engine", "optimizer"])
def test_raise_names_the_parameter_and_changes_nothing(start, by):
    model = net()
    engine = start(model, on_nonfinite="raise")
    step = engine.step if by == "engine" else engine.optimizer.step
    before = weights(model)
    backward(model, float("nan"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(overspill.NonFiniteError, match=r"the gradient of \d\.\w+ has an inf or a NaN"):
            step()
    assert same(weights(model), before) and engine.stats()["skipped_steps"] == 1
    assert model[0].weight.grad is None
    backward(model)
    step()
    assert not engine.last_step.skipped and not same(weights(model), before)


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("factor", [float("inf"), float("nan")])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RAdam])
@pytest.mark.filterwarnings("ignore:overspill. the engine has no update")
def test_propagate_is_what_torch_does(start, placement, clips, factor, kind):
    model = net()
    plain = copy.deepcopy(model)
    optimizer = kind(model.parameters(), lr=1e-2)
    engine = start(model, optimizer, placement=placement, on_nonfinite="propagate")
    theirs = kind(plain.parameters(), lr=1e-2)
    model[2].bias.register_hook(lambda gradient: gradient * factor)
    plain[2].bias.register_hook(lambda gradient: gradient * factor)
    for i in range(2):
        for each, its in ((model, engine.optimizer), (plain, theirs)):
            its.zero_grad()
            backward(each, i=i)
            if clips:
                norm = nn.utils.clip_grad_norm_(each.parameters(), 0.1)
                assert not torch.isfinite(norm)
            its.step()
    assert engine.stats()["skipped_steps"] == 0 and engine.last_step.step == 2
    for name, value in weights(model).items():
        assert torch.allclose(value, plain.state_dict()[name], atol=1e-6, equal_nan=True), name
    assert not torch.isfinite(model[2].bias).all()


@pytest.mark.parametrize("format", ["exact", "compact", "8bit"])
def test_a_nan_that_is_propagated_stays_one_in_every_format(start, format):
    """Of any bits: rounding adds to them, and once in 65,536 that would overflow into a zero."""
    model = net(torch.bfloat16)
    engine = start(model, format=format, on_nonfinite="propagate")
    bits = torch.tensor([0x7FFF, 0x7FC0, 0x7F81, -1, -64], dtype=torch.int16)
    for _ in range(2):
        backward(model)
        gradient = model[0].weight.grad
        gradient.view(torch.int16)[0, : len(bits)] = bits
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        assert torch.isnan(model[0].weight[0, : len(bits)]).all()


def test_skip_goes_on(start):
    model = net()
    engine = start(model)
    before = weights(model)
    backward(model, float("inf"))
    with pytest.warns(UserWarning, match="a step is skipped"):
        engine.step()
    assert engine.last_step.skipped and same(weights(model), before)


def test_what_it_may_be(config):
    with pytest.raises(overspill.ConfigError, match="on_nonfinite"):
        overspill.initialize(net(), config() | {"on_nonfinite": "ignore"})
