"""engine.give_back(): the engine ends, and its model is as plain PyTorch has one."""

import contextlib
import copy
import gc
import pickle
import weakref
from collections import defaultdict

import pytest
import torch
from disks import lies_in_a_file
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


def train(model, optimizer, steps=range(2)):
    for i in steps:
        ids = torch.randint(0, 12, (5,), generator=torch.Generator().manual_seed(i))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids), ids).backward()
        optimizer.step()


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def sgd(model, **options):
    return torch.optim.SGD(trainable(model), lr=0.1, **options)


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


# ---- the optimizer's states


def plain_settings(config, placement, job):
    return {k: v for k, v in config(placement, job=job).items() if k != "optimizer"}


def assert_same(model, other, near=0.0):
    for name, value in model.state_dict().items():
        assert torch.allclose(value, other.state_dict()[name], rtol=near, atol=near), name


KINDS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 0.0),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}, 1e-6),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}, 1e-6),
    "radam": (torch.optim.RAdam, {"lr": 1e-3}, 0.0),  # makes its own steps
}


@pytest.mark.filterwarnings("ignore:overspill. the engine has no update of torch.optim.RAdam")
@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_unfrozen_one_after_the_other(config, placement, kind):
    """As plain PyTorch does it, whose optimizer gets a group for each."""
    make, options, near = KINDS[kind]
    if kind == "adagrad" and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):
        pytest.skip(f"PyTorch {torch.__version__} itself raises KeyError: its Adagrad makes its states once")

    def unfreeze(model, optimizer, place):
        model[place].requires_grad_(True)
        optimizer.add_param_group({"params": model[place].parameters(), "lr": options["lr"] / 2})

    model, plain = network(), network()
    for each in (model, plain):
        each[:4].requires_grad_(False)
    user, theirs = (make(each[4].parameters(), **options) for each in (model, plain))
    engine, optimizer, *_ = overspill.initialize(model, plain_settings(config, placement, "0"), user)
    run(model, [optimizer], range(2))
    run(plain, [theirs], range(2))
    for stage, place in enumerate((2, 0), 1):
        engine.give_back()
        unfreeze(model, user, place)
        unfreeze(plain, theirs, place)
        engine, optimizer, *_ = overspill.initialize(
            model, plain_settings(config, placement, str(stage)), user
        )
        run(model, [optimizer], range(2 * stage, 2 * stage + 2))
        run(plain, [theirs], range(2 * stage, 2 * stage + 2))
    engine.give_back()
    assert_same(model, plain, near)
    run(model, [user], range(6, 8))  # in plain PyTorch
    run(plain, [theirs], range(6, 8))
    assert_same(model, plain, near)


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("make", [torch.optim.AdamW, overspill.optim.AdamW, torch.optim.SGD])
def test_another_engine_goes_on_to_the_bit_with_bf16_weights(config, placement, make):
    model, other = network(torch.bfloat16), network(torch.bfloat16)
    user, theirs = (make(each.parameters(), lr=1e-2) for each in (model, other))
    engine, optimizer, *_ = overspill.initialize(model, plain_settings(config, placement, "0"), user)
    run(model, [optimizer], range(3))
    engine.give_back()
    engine, optimizer, *_ = overspill.initialize(model, plain_settings(config, placement, "1"), user)
    run(model, [optimizer], range(3, 6))
    one, optimizer, *_ = overspill.initialize(other, plain_settings(config, placement, "2"), theirs)
    run(other, [optimizer], range(6))
    masters = [[e.weight(p, torch.float32) for p in e.module.parameters()] for e in (engine, one)]
    assert all(torch.equal(a, b) for a, b in zip(*masters, strict=True))
    engine.give_back()
    one.give_back()
    assert_same(model, other)


@pytest.mark.parametrize("how", ["itself", "a copy", "a pickle", "a state dict"])
def test_plain_steps_with_bf16_weights(config, how):
    """Torch keeps states in bf16 there, and no master."""
    model = network(torch.bfloat16)
    user = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, optimizer, *_ = overspill.initialize(model, plain_settings(config, "host", "0"), user)
    run(model, [optimizer], range(3))
    exact = engine.optimizer_state(model[0].weight)["exp_avg"]
    engine.give_back()
    if how == "a copy":
        model, user = copy.deepcopy((model, user))
    elif how == "a pickle":
        model, user = pickle.loads(pickle.dumps((model, user)))
    elif how == "a state dict":
        saved = model.state_dict(), user.state_dict()
        model = network(torch.bfloat16)
        user = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model.load_state_dict(saved[0])
        user.load_state_dict(saved[1])
    assert torch.equal(user.state[model[0].weight]["exp_avg"], exact.bfloat16())
    run(model, [user], range(3, 4))
    entry = user.state[model[0].weight]
    assert entry.keys() == {"step", "exp_avg", "exp_avg_sq"} and entry["step"] == 4
    assert entry["exp_avg"].dtype is torch.bfloat16
    engine, optimizer, *_ = overspill.initialize(model, plain_settings(config, "host", "1"), user)
    state = engine.optimizer_state(model[0].weight)
    assert torch.equal(state["exp_avg"], entry["exp_avg"].float()), (
        "what plain steps made of them, not what was before"
    )
    run(model, [optimizer], range(4, 6))
    engine.give_back()


@pytest.mark.parametrize("fused", [False, True])
def test_what_the_script_changes_counts(config, fused):
    """Weights and states, between an engine and the next, in bf16."""
    model = network(torch.bfloat16)
    user = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    engine, optimizer, *_ = overspill.initialize(model, plain_settings(config, "host", "0"), user)
    run(model, [optimizer], range(3))
    exact = engine.optimizer_state(model[2].weight)["exp_avg"]
    engine.give_back()
    with torch.no_grad():
        model[0].weight.mul_(0.5)
        user.state[model[4].weight]["exp_avg"].zero_()
    expected = model[0].weight.detach().clone()
    engine, optimizer, *_ = overspill.initialize(model, plain_settings(config, "host", "1"), user)
    assert torch.equal(engine.weight(model[0].weight, torch.float32), expected.float())
    assert not engine.optimizer_state(model[4].weight)["exp_avg"].any()
    assert torch.equal(engine.optimizer_state(model[2].weight)["exp_avg"], exact), "untouched ones are exact"
    engine.give_back()
    run(model, [user], range(3, 4))  # fused steps count no versions
    moment = user.state[model[2].weight]["exp_avg"].float()
    engine, optimizer, *_ = overspill.initialize(model, plain_settings(config, "host", "2"), user)
    assert torch.equal(engine.optimizer_state(model[2].weight)["exp_avg"], moment)
    engine.give_back()


@pytest.mark.parametrize("format", ["compact", "8bit"])
def test_the_count_of_updates_goes_on_where_torch_has_none(config, format):
    """Rounding at random depends on it."""
    models = network(torch.bfloat16), network(torch.bfloat16)
    settings = {**plain_settings(config, "host", "0"), "format": format}
    users = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in models]
    engines = [overspill.initialize(m, settings, u)[0] for m, u in zip(models, users)]
    for i in range(4):
        if i == 2:
            engines[0].give_back()
            engines[0] = overspill.initialize(models[0], settings, users[0])[0]
        for model, user in zip(models, users):
            run(model, [user], range(i, i + 1))
    for engine in engines:
        engine.give_back()
    assert_same(*models)


def test_plain_steps_of_our_own_with_bf16_weights_are_refused(config):
    model = network(torch.bfloat16)
    user = overspill.optim.AdamW(model.parameters(), lr=1e-2)
    engine, optimizer, *_ = overspill.initialize(model, plain_settings(config, "host", "0"), user)
    run(model, [optimizer], range(2))
    engine.give_back()
    before = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match=r"those that engine\.give_back\(\) left.*optimizer\.state\.clear"):
        run(model, [user], range(2, 3))
    assert_same(model, before)
    user.state.clear()
    run(model, [user], range(2, 4))
    assert user.state[model[0].weight]["step"] == 2


def test_several_optimizers_have_theirs(config):
    model, plain = network(), network()

    def pair(each):
        body = [*each[0].parameters(), *each[2].parameters()]
        return [torch.optim.SGD(body, lr=0.1, momentum=0.9), torch.optim.SGD(each[4].parameters(), lr=0.05)]

    users, theirs = pair(model), pair(plain)
    engine, optimizers, *_ = overspill.initialize(model, plain_settings(config, "host", "0"), users)
    run(model, optimizers, range(3))
    engine.give_back()
    run(model, users, range(3, 6))
    run(plain, theirs, range(6))
    assert_same(model, plain)


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


@pytest.mark.parametrize("when", ["before", "under the engine"])
def test_a_scheduler_of_the_scripts_own_goes_on(config, when, recwarn):
    model = network(torch.bfloat16)
    user = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(user, 1, 0.5) if when == "before" else None
    for job in range(2):
        engine, _, *_ = overspill.initialize(model, plain_settings(config, "host", str(job)), user)
        scheduler = scheduler or torch.optim.lr_scheduler.StepLR(user, 1, 0.5)
        run(model, [user], range(1))
        scheduler.step()
        engine.give_back()
        run(model, [user], range(1))
        scheduler.step()
        assert user.state[model[0].weight]["exp_avg"].dtype is torch.bfloat16
    assert user.param_groups[0]["lr"] == 1e-2 / 16
    assert not [w for w in recwarn if "step" in str(w.message)], [str(w.message) for w in recwarn]


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


# ---- found by readers


def sgd_pair(model):
    body = [*model[0].parameters(), *model[2].parameters()]
    return [
        torch.optim.SGD(body, lr=0.1, momentum=0.9),
        torch.optim.SGD(model[4].parameters(), lr=0.05, momentum=0.5),
    ]


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


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.RAdam])
@pytest.mark.filterwarnings("ignore:overspill. the engine has no update")
def test_a_layer_is_frozen_before_the_next_engine(config, make):
    """Its states stay where they are, as in plain PyTorch."""
    model, plain = network(), network()
    for each in (model, plain):
        each[0].register_parameter("empty", nn.Parameter(torch.empty(0)))
    user, theirs = make(model.parameters(), lr=1e-3), make(plain.parameters(), lr=1e-3)
    for stage, frozen in enumerate((False, True, False)):
        for each, optimizer in ((model, user), (plain, theirs)):
            optimizer.zero_grad()
            each[0].requires_grad_(not frozen)
        engine, optimizer, *_ = overspill.initialize(model, plain_settings(config, "host", str(stage)), user)
        steps = range(2 * stage, 2 * stage + 2)
        run(model, [optimizer], steps)
        run(plain, [theirs], steps)
        engine.give_back()
        assert user.state.keys() == {
            p for p, q in zip(model.parameters(), plain.parameters()) if q in theirs.state
        }
    assert_same(model, plain, near=1e-6)


def test_states_that_were_written_before_any_step_are_given(config):
    model, plain = network(), network()
    user, theirs = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain))
    engine, *_ = overspill.initialize(model, plain_settings(config, "host", "0"), user)
    for each, optimizer in ((model, user), (plain, theirs)):
        for p in each.parameters():
            ones = torch.ones_like(p)
            optimizer.state[p] = {"step": torch.tensor(0.0), "exp_avg": ones, "exp_avg_sq": ones.clone()}
    engine.give_back()
    assert len(user.state) == 6
    engine, *_ = overspill.initialize(model, plain_settings(config, "host", "1"), user)
    run(model, [user], range(1))
    engine.give_back()
    run(model, [user], range(1, 2))
    run(plain, [theirs], range(2))
    assert_same(model, plain, near=1e-6)


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


def test_a_scheduler_that_is_made_afterwards_warns_of_nothing(config, recwarn):
    model = network()
    user = sgd(model)
    overspill.initialize(model, plain_settings(config, "host", "0"), user)[0].give_back()
    scheduler = torch.optim.lr_scheduler.StepLR(user, 1, 0.5)
    run(model, [user], range(1))
    scheduler.step()
    assert not [w for w in recwarn if "step" in str(w.message)]


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


# ---- found by the second reader


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


def test_numbers_that_no_update_can_use_are_refused_before_anything_is_changed(config):
    model = network()
    user = torch.optim.AdamW(model.parameters(), lr=1e-2)
    user.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match=r"parameter group 0 has lr = nan"):
        overspill.initialize(model, plain_settings(config, "host", "0"), user)
    assert torch.isfinite(model(torch.ones(1, 16))).all() and "step" not in vars(user)


@pytest.mark.parametrize("how", [lambda t: t[:1, :1].expand(t.shape), lambda t: t.repeat(1, 2)[:, ::2]])
def test_states_in_any_memory_are_taken(config, how):
    model = network(torch.bfloat16)
    user = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = overspill.initialize(model, plain_settings(config, "host", "0"), user)
    run(model, [user], range(2))
    engine.give_back()
    state = user.state[model[0].weight]
    state["exp_avg"] = how(state["exp_avg"])
    expected = state["exp_avg"].float()
    engine, *_ = overspill.initialize(model, plain_settings(config, "host", "1"), user)
    assert torch.equal(engine.optimizer_state(model[0].weight)["exp_avg"], expected)
    engine.give_back()


def test_states_of_a_layer_that_was_frozen_for_an_engine_are_exact_and_fit(config):
    model = network(torch.bfloat16)
    user = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = overspill.initialize(model, plain_settings(config, "host", "0"), user)
    run(model, [user], range(2))
    exact = engine.optimizer_state(model[0].weight)["exp_avg"]
    engine.give_back()
    user.zero_grad()
    model[0].requires_grad_(False)
    engine, *_ = overspill.initialize(model, plain_settings(config, "host", "1"), user)
    run(model, [user], range(2, 4))
    engine.give_back()
    model[0].requires_grad_(True)
    assert user.state[model[0].weight]["exp_avg"].dtype is torch.bfloat16
    engine, *_ = overspill.initialize(model, plain_settings(config, "host", "2"), user)
    assert torch.equal(engine.optimizer_state(model[0].weight)["exp_avg"], exact)
    assert not user.__dict__["_exact_states_of_an_engine"], "the engine has them"
    engine.give_back()
    run(model, [user], range(4, 5))


def test_sums_that_were_written_before_any_step_count(config):
    model, plain = network(), network()
    user, theirs = (torch.optim.Adagrad(each.parameters(), lr=1e-2) for each in (model, plain))
    for each, optimizer in ((model, user), (plain, theirs)):
        for p in each.parameters():
            optimizer.state[p]["sum"].fill_(4.0)
    engine, *_ = overspill.initialize(model, plain_settings(config, "host", "0"), user)
    run(model, [user], range(2))
    engine.give_back()
    run(plain, [theirs], range(2))
    assert_same(model, plain, near=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("first", "then"), [(0.0, 0.9), (0.9, 0.0)])
def test_momentum_comes_and_goes_between_two_engines(config, dtype, first, then):
    model, plain = network(dtype), network()
    user, theirs = sgd(model, momentum=first), sgd(plain, momentum=first)
    for stage, momentum in enumerate((first, then)):
        for optimizer in (user, theirs):
            optimizer.param_groups[0]["momentum"] = momentum
        engine, *_ = overspill.initialize(model, plain_settings(config, "host", str(stage)), user)
        run(model, [user], range(2 * stage, 2 * stage + 2))
        run(plain, [theirs], range(2 * stage, 2 * stage + 2))
        engine.give_back()
    if dtype is torch.float32:
        assert_same(model, plain)


def test_hooks_of_the_returned_object_that_makes_its_own_steps(config, recwarn):
    model = network()
    user = torch.optim.RAdam(model.parameters(), lr=1e-3)
    engine, optimizer, *_ = overspill.initialize(model, plain_settings(config, "host", "0"), user)
    seen = []
    optimizer.register_state_dict_post_hook(lambda o, state: seen.append("saved"))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
    run(model, [optimizer], range(1))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["saved", "loaded"]
    engine.give_back()


def test_a_copy_of_our_own_optimizer_steps():
    model = network(torch.bfloat16)
    optimizer = overspill.optim.AdamW(model.parameters(), lr=1e-2, threads=1)
    run(model, [optimizer], range(1))
    copies = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    run(model, [optimizer], range(1, 2))
    for other, theirs in copies:
        run(other, [theirs], range(1, 2))
        assert_same(model, other)
