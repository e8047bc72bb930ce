"""Weights in float64, alone and among others: the engine holds them, torch's own code trains them. What scripts do with
them is compared in test_habits.py."""

import copy

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:overspill. the engine has no update of float64")


class Mixed(nn.Module):
    """The one half in float32."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16).double()

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)).double())


def double():
    return Mixed().double()


def loss_of(model, i):
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(i)).to(next(model.parameters()).dtype)
    return model(x).square().mean()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def expected(model, optimizer, clipping, accumulation, spoilt):
    """As plain PyTorch trains it. `spoilt`: the step in which a gradient has a NaN, so that it is left out."""
    for i in range(4):
        optimizer.zero_grad()
        for j in range(accumulation):
            (loss_of(model, i * accumulation + j) / accumulation).backward()
        if clipping:
            nn.utils.clip_grad_norm_(model.parameters(), clipping)
        if i != spoilt:
            optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("clipping", [0.0, 0.02, 10.0])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("make", [Mixed, double])
@pytest.mark.parametrize("kind", [adamw, sgd, None])
@pytest.mark.parametrize(
    ("bad", "where"), [(torch.nan, "second"), (torch.inf, "second"), (torch.inf, "first")]
)
def test_the_loop_of_an_engine_is_torchs(start, kind, make, accumulation, clipping, placement, bad, where):
    model = make()
    plain = copy.deepcopy(model)
    engine = start(
        model,
        None if kind is None else kind(model),
        placement=placement,
        clipping=clipping,
        accumulation=accumulation,
    )
    for i in range(4):
        for j in range(accumulation):
            engine.backward(loss_of(model, i * accumulation + j))
            if i == 2:
                getattr(model, where).bias.grad[0] = bad
            engine.step()
        assert engine.last_step.skipped == (i == 2)
        assert model.second.weight.grad is None
    assert (engine.stats()["skipped_steps"], engine.global_steps) == (1, 4)
    assert engine.last_step.step == 3
    theirs = expected(plain, (kind or adamw)(plain), clipping, accumulation, 2)
    for name, value in model.state_dict().items():
        assert value.dtype is theirs[name].dtype
        if clipping == 0.02:  # the norm's last bit
            assert torch.allclose(value, theirs[name], rtol=0, atol=1e-7), name
        else:
            assert torch.equal(value, theirs[name]), name


def test_a_gradient_that_is_not_finite_is_told_by_name(start):
    model = Mixed()
    engine = start(model)
    engine.backward(loss_of(model, 0))
    model.second.weight.grad[3, 1] = torch.inf
    with pytest.warns(UserWarning, match=r"the gradient of second\.weight has an inf or a NaN"):
        engine.step()
    assert engine.last_step.not_finite == "second.weight"


def test_propagate_steps_with_it(start):
    model = double()
    engine = start(model, sgd(model), on_nonfinite="propagate")
    engine.backward(loss_of(model, 0))
    model.second.bias.grad[0] = torch.nan
    engine.step()
    assert model.second.bias.isnan().tolist() == [True] + [False] * 15
    assert engine.stats()["skipped_steps"] == 0


def test_a_clip_of_the_script_spans_both_halves(start):
    model = Mixed()
    plain = copy.deepcopy(model)
    optimizer = start(model, sgd(model)).optimizer
    for each, stepped in ((model, optimizer), (plain, sgd(plain))):
        for i in range(3):
            stepped.zero_grad()
            loss_of(each, i).backward()
            nn.utils.clip_grad_norm_(each.parameters(), 0.01)
            stepped.step()
    for name, value in model.state_dict().items():
        assert torch.allclose(value, plain.state_dict()[name], rtol=0, atol=1e-7), name


def test_what_the_engine_tells_of_it(start):
    model = double()
    engine = start(model)
    weight = model.second.weight
    assert engine.grad(weight) is None
    engine.backward(loss_of(model, 0))
    assert torch.equal(engine.grad(weight), weight.grad.float())
    engine.step()
    assert set(engine.optimizer_state(weight)) == {"step", "exp_avg", "exp_avg_sq"}
    assert engine.optimizer_state(weight)["exp_avg"].dtype is torch.float64
    assert torch.equal(engine.weight(weight), weight)


def test_clearing_one_half_leaves_the_other(start):
    model = Mixed()
    engine = start(model)
    loss_of(model, 0).backward()
    model.first.zero_grad()
    assert model.first.weight.grad is None and model.second.weight.grad.any()
    loss_of(model, 0).backward()
    model.second.zero_grad()
    assert model.second.weight.grad is None and model.first.weight.grad.any()
    engine.zero_grad()


@pytest.mark.parametrize("make", [Mixed, double])
@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_a_clip_of_the_script_takes_the_place_of_the_configured_one(start, make, clip):
    model = make()
    plain = copy.deepcopy(model)
    optimizer = start(model, sgd(model), clipping=1e-3).optimizer
    for each, stepped in ((model, optimizer), (plain, sgd(plain))):
        (100 * loss_of(each, 0)).backward()
        clip(each.second.parameters(), 10.0)
        stepped.step()
    for name, value in model.state_dict().items():
        assert torch.allclose(value, plain.state_dict()[name], rtol=1e-5), name


def test_a_norm_that_overflows_leaves_the_step_out(start):
    model = double()
    engine = start(model)
    loss_of(model, 0).backward()
    for p in model.parameters():
        p.grad.fill_(1e154)
    before = model.second.weight.detach().clone()
    with pytest.warns(UserWarning, match="has an inf or a NaN"):
        engine.step()
    assert engine.last_step.skipped and torch.equal(model.second.weight, before)


def test_clearing_reaches_it(start):
    model = double()
    engine = start(model)
    bias = model.second.bias
    for clear in (engine.zero_grad, engine.optimizer.zero_grad, model.zero_grad):
        loss_of(model, 0).backward()
        clear(set_to_none=False)
        assert bias.grad is not None and not bias.grad.any()
        clear()
        assert bias.grad is None


def test_what_cannot_train_it_is_refused(start):
    with pytest.raises(ValueError, match=r"torch\.optim.* has no Lion: configure AdamW"):
        start(double(), section={"type": "Lion"})
