"""An engine is the nn.Module that it stands for."""

import copy
import inspect
import io

import pytest
import torch
from torch import nn

import overspill
from overspill import deepspeed

DEEPSPEED = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"}}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))


def batch(i=0):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(i))


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_a_part_of_another_model(start, placement):
    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.outer = inner, nn.Linear(4, 2)

        def forward(self, x):
            return self.outer(self.inner(x))

    model = net()
    plain = Outer(copy.deepcopy(model))
    engine = start(model, torch.optim.SGD(model.parameters(), lr=0.1), placement=placement)
    ours = Outer(engine)
    ours.outer.load_state_dict(plain.outer.state_dict())
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in ours.named_modules()] == [n for n, _ in plain.named_modules()]
    assert list(ours.state_dict()) == list(plain.state_dict()) and (
        repr(ours).replace("Engine (0 steps, rank 0 of 1, cpu) of ", "") == repr(plain)
    )
    for whole in (ours, plain):
        whole.eval()
        whole.train()
        outer = torch.optim.SGD(whole.outer.parameters(), lr=0.1)
        inner = engine.optimizer if whole is ours else torch.optim.SGD(whole.inner.parameters(), lr=0.1)
        for i in range(3):
            whole.zero_grad()
            whole(batch(i)).square().mean().backward()
            nn.utils.clip_grad_norm_(whole.parameters(), 0.1, norm_type=1)
            outer.step()
            inner.step()
    for name, value in ours.state_dict().items():
        assert torch.allclose(value, plain.state_dict()[name], rtol=0, atol=1e-7), name
    state = {name: torch.full_like(value, 0.5) for name, value in ours.state_dict().items()}
    assert not ours.load_state_dict(state).missing_keys
    assert (engine.weight(model[0].weight) == 0.5).all() and (ours.outer.bias == 0.5).all()
    with pytest.raises(
        RuntimeError, match=r"0\.weight belongs to an engine: it cannot become torch\.float64"
    ):
        ours.double()


def test_what_scripts_ask_of_a_module(start):
    model = net()
    engine = start(model)
    assert isinstance(engine, nn.Module) and isinstance(engine, overspill.Engine)
    assert engine[0] is model[0] and engine[-1] is model[2] and len(engine) == 3
    assert list(engine) == list(model) and list(engine[:2]) == list(model[:2])
    assert list(engine.children()) == list(model) and next(engine.modules()) is model
    assert engine.get_submodule("2") is model[2] and engine.get_parameter("0.bias") is model[0].bias
    assert engine._modules is model._modules and engine.training
    assert "weight" in dir(start(nn.Linear(4, 4))) and "global_steps" in dir(engine)
    seen = []
    assert engine.apply(lambda module: seen.append(module)) is engine and seen == list(model.modules())[
        1:
    ] + [model]
    assert engine.requires_grad_(True) is engine and engine.float() is engine and engine.cpu() is engine
    assert not engine.eval().training and not model[0].training
    calls = []
    handle = engine.register_forward_hook(lambda module, args, out: calls.append(module))
    engine(batch())
    handle.remove()
    engine(batch())
    assert calls == [model]


def test_what_a_script_sets_is_the_modules(start):
    model = net()
    engine = start(model)
    engine.note = "mine"
    assert model.note == engine.note == "mine"
    del engine.note
    with pytest.raises(AttributeError, match="neither the engine nor its Sequential has 'note'"):
        engine.note  # noqa: B018
    engine.register_buffer("scale", torch.ones(2))
    assert torch.equal(model.scale, torch.ones(2)) and "scale" in engine.state_dict()
    engine[1] = nn.ReLU()
    assert isinstance(model[1], nn.ReLU)
    engine.global_steps += 0
    assert "global_steps" not in vars(model)
    engine.extra = nn.Linear(4, 4)
    engine.backward(engine(batch()).sum())
    with pytest.raises(
        RuntimeError, match=r"extra\.weight, extra\.bias: trainable, but came into the model after"
    ):
        engine.step()


def test_copies_and_pickles_are_models(start):
    model = net()
    engine = start(model)
    expected = engine(batch())
    copied = copy.deepcopy({"ema": engine})["ema"]
    assert type(copied) is nn.Sequential and torch.equal(copied(batch()), expected)
    file = io.BytesIO()
    torch.save(engine, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    assert type(read) is nn.Sequential and torch.equal(read(batch()), expected)
    with pytest.raises(TypeError, match=r"two engines cannot hold the same weights: copy\.deepcopy"):
        copy.copy(engine)


def test_a_model_that_copies_itself_makes_no_second_engine(start):
    class Copied(nn.Linear):
        def __copy__(self):
            return Copied(self.in_features, self.out_features)

    engines = start(Copied(16, 4)), deepspeed.initialize(model=Copied(16, 4), config=DEEPSPEED)[0]
    for engine in engines:
        with pytest.raises(TypeError, match="two engines cannot hold the same weights"):
            copy.copy(engine)
        engine.close()


def test_an_engine_is_no_model_for_another(start, config):
    engine = start(net())
    with pytest.raises(ValueError, match=r"0\.weight belongs to another engine"):
        overspill.initialize(engine, config())


def test_what_a_script_puts_in_the_place_of_a_method_is_called(start):
    model = net()
    engine = start(model)
    called = []

    def wrap(name):
        old = getattr(engine, name)

        def new(*args, **kwargs):
            called.append(name)
            return old(*args, **kwargs)

        setattr(engine, name, new)

    names = ["forward", "state_dict", "train", "step", "backward", "parameters", "children", "zero_grad"]
    for name in names:
        wrap(name)
    engine.train()
    engine.backward(engine(batch()).sum())
    engine.step()
    assert len(list(engine.parameters())) == 4 and len(list(engine.children())) == 3
    engine.state_dict()
    engine.zero_grad()
    assert set(called) == set(names) and engine.global_steps == 1
    del engine.step
    engine.backward(engine(batch()).sum())
    called.clear()
    engine.step()
    assert "step" not in called and engine.global_steps == 2
    with pytest.raises(ValueError, match="a model cannot be a part of itself"):
        engine.me = engine


def test_modules_that_look_at_themselves(start):
    class Looking(nn.Linear):
        def __getattribute__(self, name):
            return super().__getattribute__(name)

        def __eq__(self, other):
            return False

        __hash__ = nn.Linear.__hash__

        def __repr__(self):
            return "looking"

    engine = start(Looking(4, 4))
    assert engine in [engine] and hash(engine) == hash(engine)
    assert repr(engine) == "Engine (0 steps, rank 0 of 1, cpu) of looking"
    assert inspect.signature(engine.requires_grad_).parameters.keys() == {"requires_grad"}


def test_the_configuration_says_whose_it_is(start):
    engine = start(net())
    with pytest.raises(
        overspill.ConfigError, match=r"use_cache = False: unknown key.*engine\.module\.config"
    ):
        engine.config.use_cache = False
