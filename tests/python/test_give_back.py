"""engine.give_back(): the engine ends, and its model is as plain PyTorch has one."""

import contextlib
import copy
import gc
import weakref
from collections import defaultdict

import pytest
import torch
from disks import lies_in_a_file
from give_back_scene import assert_same, plain_settings, sgd, sgd_pair, train
from interrupts import OVERSPILL, Interrupter
from test_several import network
from test_several import train as run
from torch import nn

import overspill
from overspill import giving, patches, segments


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
    assert mine and not hooks_of(model) and not segments.registry
    assert "data" not in vars(nn.Parameter) and torch.autograd._engine_run_backward is patches._run_backward
    assert all(
        type(p) is nn.Parameter and (p.grad is not None) == p.requires_grad for p in model.parameters()
    )
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
        model = Tied().bfloat16()
        user = sgd(model, momentum=0.9)
        engine, optimizer, *_ = overspill.initialize(model, config("half"), user)
        train(model, optimizer)
        expected = copy.deepcopy(model).state_dict()
        moments = {p: optimizer.state[p]["momentum_buffer"].clone() for p in optimizer.state}
        struck = Interrupter(at, (OVERSPILL,))
        with contextlib.suppress(KeyboardInterrupt), struck.armed():
            engine.give_back()
        engine.give_back()
        assert type(user.state) is defaultdict and user.state.keys() == moments.keys(), struck.place
        for p, m in moments.items():
            assert torch.equal(user.state[p]["momentum_buffer"], m.to(p.dtype)), struck.place
        train(model, user)
        model.load_state_dict(expected)
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items()), (
            struck.place
        )
        assert not hooks_of(model) and not segments.registry and "data" not in vars(nn.Parameter), (
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


def test_a_full_disk_leaves_the_engine_as_it_is(config, monkeypatch):
    model, plain = network(), network()
    user, theirs = sgd(model, momentum=0.9), sgd(plain, momentum=0.9)
    engine, optimizer, *_ = overspill.initialize(model, plain_settings(config, "nvme", "0"), user)
    run(model, [optimizer], range(2))
    with monkeypatch.context() as patch:
        patch.setattr(giving.reading, "copy", lambda s: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(OSError, match="No space left"):
            engine.give_back()
    run(model, [user], range(2, 4))
    engine.give_back()
    run(model, [user], range(4, 6))
    run(plain, [theirs], range(6))
    assert_same(model, plain)


def test_an_interrupt_where_the_states_have_left(config, monkeypatch):
    model = network(torch.bfloat16)
    user = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = overspill.initialize(model, plain_settings(config, "host", "0"), user)
    run(model, [user], range(2))
    expected = engine.optimizer_state(model[0].weight)["exp_avg"]

    def interrupted(*given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(giving.script_optimizer, "let_go", interrupted)
        engine.give_back()
    engine.give_back()
    assert torch.equal(user.state[model[0].weight]["exp_avg"], expected.bfloat16())
    run(model, [user], range(2, 3))


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left"), KeyboardInterrupt()], ids=["full", "interrupt"]
)
@pytest.mark.parametrize("several", [False, True])
def test_what_was_taken_out_in_vain_is_not_given_later(config, monkeypatch, error, several):
    model, plain = network(), network()
    make = sgd_pair if several else lambda each: [sgd(each, momentum=0.9)]
    users, theirs = make(model), make(plain)
    engine, *_ = overspill.initialize(model, plain_settings(config, "host", "0"), users)
    run(model, users, range(2))

    def fails(*given):
        raise error

    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(giving, "_give_weights", fails)
        engine.give_back()
    run(model, users, range(2, 4))
    engine.give_back()
    run(model, users, range(4, 6))
    run(plain, theirs, range(6))
    assert_same(model, plain)


def test_once_it_gives_only_another_call_goes_on(config, monkeypatch):
    model = network()
    user = sgd(model, momentum=0.9)
    engine, *_ = overspill.initialize(model, plain_settings(config, "host", "0"), user)
    run(model, [user], range(2))
    expected = copy.deepcopy(model)
    given, calls = giving.set_grad, []

    def interrupted(*what):
        calls.append(what)
        if len(calls) == 2:
            raise KeyboardInterrupt
        given(*what)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(giving, "set_grad", interrupted)
        engine.give_back()
    for call in (lambda: model(torch.ones(1, 16)), user.step):
        with pytest.raises(RuntimeError, match=r"give_back\(\) was broken off: call it again"):
            call()
    engine.give_back()
    assert_same(model, expected)
    run(model, [user], range(2, 3))


def test_gradients_are_given_too(config):
    model, plain = network(), network()
    user, theirs = sgd(model, momentum=0.9), sgd(plain, momentum=0.9)
    engine, *_ = overspill.initialize(model, plain_settings(config, "nvme", "0"), user)
    for each in (model, plain):
        each(torch.ones(2, 16)).square().mean().backward()
    model[0].weight.grad.mul_(0.5)
    plain[0].weight.grad.mul_(0.5)
    engine.give_back()
    for p, q in zip(model.parameters(), plain.parameters()):
        assert torch.equal(p.grad, q.grad)
    user.step()
    theirs.step()
    assert_same(model, plain)


def test_the_engines_own_optimizer_is_not_given_again(config):
    model = network()
    user = sgd(model)
    engine, optimizer, *_ = overspill.initialize(model, plain_settings(config, "host", "0"), user)
    engine.give_back()
    with pytest.raises(
        RuntimeError, match="engine of this optimizer has ended: add the group to the optimizer"
    ):
        optimizer.add_param_group({"params": []})
    with pytest.raises(TypeError, match=r"the one that overspill\.initialize returned.*give the optimizer"):
        overspill.initialize(model, plain_settings(config, "host", "1"), optimizer)


def test_an_engine_that_is_not_made_leaves_the_optimizers_as_they_were(config, monkeypatch):
    model = network()
    users = sgd_pair(model)
    run(model, users, range(2))
    before = [{p: dict(state) for p, state in user.state.items()} for user in users]
    weights = copy.deepcopy(model.state_dict())
    users[1].state[model[4].weight]["momentum_buffer"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"parameter 0 of the SGD is \(3,\)"):
        overspill.initialize(model, plain_settings(config, "host", "0"), users)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    users[1].state[model[4].weight] = before[1][model[4].weight]

    def fails(*given):
        raise RuntimeError("no")

    monkeypatch.setattr(overspill.optimizer.OverspillOptimizer, "take_over_states", fails)
    with pytest.raises(RuntimeError, match="no"):
        overspill.initialize(model, plain_settings(config, "host", "0"), users)
    for user, states in zip(users, before):
        assert user.state.keys() == states.keys() and "state_dict" not in vars(user)
        assert all(user.state[p]["momentum_buffer"] is states[p]["momentum_buffer"] for p in states)


def test_memory_is_free_once_the_model_is_gone(config):
    """Without the garbage collector, as in plain PyTorch."""
    model = network()
    user = sgd(model, momentum=0.9)
    engine, optimizer, *_ = overspill.initialize(model, plain_settings(config, "host", "0"), user)
    run(model, [optimizer], range(2))
    engine.give_back()
    memory = weakref.ref(model[0].weight)
    gc.collect()
    gc.disable()
    try:
        del engine, optimizer, model, user
        assert memory() is None
    finally:
        gc.enable()


def test_it_fails_before_anything_is_given_or_not_at_all(config, monkeypatch):
    model, plain = network(), network()
    user, theirs = sgd(model, momentum=0.9), sgd(plain, momentum=0.9)
    engine, *_ = overspill.initialize(model, plain_settings(config, "host", "0"), user)
    run(model, [user], range(2))
    copied, calls = giving.reading.copy, []

    def fails(s):
        calls.append(s)
        if len(calls) == 2:
            raise OSError(28, "No space left")
        return copied(s)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(giving.reading, "copy", fails)
        engine.give_back()
    run(model, [user], range(2, 4))
    engine.give_back()
    run(plain, [theirs], range(4))
    assert_same(model, plain)
