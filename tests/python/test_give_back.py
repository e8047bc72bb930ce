"""engine.give_back(): the engine ends, and its model is as plain PyTorch has one."""

import contextlib
import copy

import pytest
import torch
from disks import lies_in_a_file
from interrupts import OVERSPILL, Interrupter
from torch import nn

import overspill
from overspill import giving, patches, residency


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.body = nn.Embedding(12, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 12, bias=False)
        self.head.weight = self.emb.weight
        self.still = nn.Linear(16, 16).requires_grad_(False)
        self.register_buffer("scale", torch.ones(16))
        self.wide = nn.Parameter(torch.ones(16, dtype=torch.float64))

    def forward(self, ids):
        x = self.still(torch.tanh(self.body(self.emb(ids)))) * self.scale * self.wide
        return self.head(x.to(self.head.weight.dtype)).float()


def train(model, optimizer, steps=range(2)):
    for i in steps:
        ids = torch.randint(0, 12, (5,), generator=torch.Generator().manual_seed(i))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids), ids).backward()
        optimizer.step()


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def hooks_of(model):
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks")
    return [hook for m in model.modules() for kind in kinds for hook in getattr(m, kind).values()]


@pytest.mark.filterwarnings("ignore:overspill. the engine has no update of float64")
@pytest.mark.parametrize("placement", ["host", "half", "nvme"])
@pytest.mark.parametrize(
    "make", [Tied, lambda: Tied().float(), lambda: Tied().bfloat16()], ids=["mixed", "fp32", "bf16"]
)
def test_training_goes_on_in_plain_torch_and_under_a_new_engine(config, placement, make):
    model = make()
    plain = copy.deepcopy(model)
    mine = []
    handle = model.body.register_forward_hook(lambda *_: mine.append(1))
    theirs = sgd(plain)
    engine, optimizer, *_ = overspill.initialize(model, config(placement), sgd(model))
    train(model, optimizer)
    copied = copy.deepcopy(model)
    assert engine.give_back() is model and engine.give_back() is model
    handle.remove()
    assert mine and not hooks_of(model) and not residency.registry
    assert "data" not in vars(nn.Parameter) and torch.autograd._engine_run_backward is patches._run_backward
    assert all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())
    assert model.head.weight is model.emb.weight and model.scale is not None
    state = copied.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    with pytest.raises((RuntimeError, ValueError), match="ended by give_back"):
        optimizer.step()
    train(model, sgd(model), range(2, 4))
    engine, optimizer, *_ = overspill.initialize(model, config(placement, job="again"), sgd(model))
    train(model, optimizer, range(4, 6))
    engine.give_back()
    train(plain, theirs, range(6))
    for name, value in model.state_dict().items():
        # bf16 weights have an fp32 master while an engine holds them
        near = 0.02 if value.dtype is torch.bfloat16 else 0
        assert torch.allclose(value, plain.state_dict()[name], rtol=near, atol=near), name


def test_large_weights_lie_in_files(config):
    model = nn.Linear(512, 512)
    engine, *_ = overspill.initialize(model, config("nvme"))
    expected = engine.weight(model.weight)
    engine.give_back()
    assert lies_in_a_file(model.weight) and not lies_in_a_file(model.bias)
    assert torch.equal(model.weight, expected)
    model(torch.ones(1, 512)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not torch.equal(model.weight, expected)


def test_where_it_is_refused(config, monkeypatch):
    model = nn.Linear(16, 4)
    engine, optimizer, *_ = overspill.initialize(model, config())
    with engine.gathered(model.weight), pytest.raises(RuntimeError, match=r"engine\.give_back.*gathered"):
        engine.give_back()
    with monkeypatch.context() as patch:
        patch.setattr(giving, "available_bytes", lambda: 100)
        with pytest.raises(
            MemoryError, match="needs 272 B of memory beside the engine's, and 100 B are available"
        ):
            engine.give_back()
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    engine.close()
    with pytest.raises(RuntimeError, match=r"closed.*give_back\(\) in place of close\(\) leaves the weights"):
        engine.give_back()


def test_interrupts_at_every_moment(config):
    for at in range(0, 100000, 7):
        model = Tied().float()
        engine, optimizer, *_ = overspill.initialize(model, config("half"), sgd(model))
        train(model, optimizer)
        expected = copy.deepcopy(model).state_dict()
        struck = Interrupter(at, (OVERSPILL,))
        with contextlib.suppress(KeyboardInterrupt), struck.armed():
            engine.give_back()
        engine.give_back()
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items()), (
            struck.place
        )
        assert not hooks_of(model) and not residency.registry and "data" not in vars(nn.Parameter), (
            struck.place
        )
        train(model, sgd(model))
        if struck.place is None:
            break
    assert at > 100


def test_a_part_that_has_left_the_model_is_plain_too(config):
    model = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 2))
    engine, optimizer, *_ = overspill.initialize(model, config())
    head = model.pop(1)
    engine.give_back()
    assert not hooks_of(head) and head(torch.ones(1, 4)).isfinite().all()
    for call in (
        optimizer.zero_grad,
        engine.zero_grad,
        lambda: engine.backward(model(torch.ones(1, 16)).sum()),
    ):
        with pytest.raises(RuntimeError, match="overspill: the engine of this model was ended by give_back"):
            call()
