"""engine.give_back(): states of optimizers are the script's, and go on in plain PyTorch and under another engine."""

import copy
import pickle

import pytest
import torch
from give_back_scene import assert_same, plain_settings, sgd
from test_several import network
from test_several import train as run
from torch import nn

import overspill

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


def test_a_scheduler_that_is_made_afterwards_warns_of_nothing(config, recwarn):
    model = network()
    user = sgd(model)
    overspill.initialize(model, plain_settings(config, "host", "0"), user)[0].give_back()
    scheduler = torch.optim.lr_scheduler.StepLR(user, 1, 0.5)
    run(model, [user], range(1))
    scheduler.step()
    assert not [w for w in recwarn if "step" in str(w.message)]


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
