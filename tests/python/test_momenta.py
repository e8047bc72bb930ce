"""NAdam's product of momenta, which torch keeps as a state: it follows from a parameter's updates and its group."""

import copy

import pytest
import torch
from torch import nn

import overspill

STEPS = 3


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def train(model, optimizer, steps):
    losses = []
    for i in steps:
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(i))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def of_torch(model, **options):
    return torch.optim.NAdam(model.parameters(), lr=1e-2, **options)


def of_an_engine(start):
    def make(model, **options):
        return start(model, of_torch(model, **options)).optimizer

    return make


def of_overspill(_):
    return lambda model, **options: overspill.optim.NAdam(model.parameters(), lr=1e-2, **options)


@pytest.fixture(params=[of_an_engine, of_overspill], ids=lambda make: make.__name__)
def nadam(request, start):
    """Makes an optimizer over a model: an engine's, or the one for plain tensors."""
    return request.param(start)


def test_it_is_among_the_states_as_torch_has_it(nadam):
    plain, model = made(), made()
    theirs, ours = of_torch(plain, momentum_decay=0.1), nadam(model, momentum_decay=0.1)
    train(plain, theirs, range(STEPS))
    train(model, ours, range(STEPS))
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        expected = theirs.state[a]["mu_product"]
        assert 0 < expected < 0.5
        torch.testing.assert_close(ours.state[b]["mu_product"], expected)
        assert set(ours.state[b]) == set(theirs.state[a])
    saved = ours.state_dict()["state"][0]
    torch.testing.assert_close(saved["mu_product"], expected)


@pytest.mark.parametrize("name, value", [("betas", (0.8, 0.999)), ("momentum_decay", 0.2)])
def test_an_option_that_it_is_of_must_not_change(nadam, name, value):
    model = made()
    optimizer = nadam(model)
    train(model, optimizer, range(STEPS))
    before = [p.detach().clone() for p in model.parameters()]
    given = optimizer.param_groups[0][name]
    optimizer.param_groups[0][name] = value
    with pytest.raises(
        ValueError, match=r"parameter group 0 of NAdam has betas\[0\] = .*, and had 0.9 and 0.004"
    ):
        train(model, optimizer, [STEPS])
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.param_groups[0][name] = given
    optimizer.param_groups[0]["betas"] = (0.9, 0.99)  # the second is of no product
    train(model, optimizer, [STEPS])


def test_states_of_another_product_are_refused_and_change_nothing(nadam):
    plain, model = made(), made()
    theirs, ours = of_torch(plain, betas=(0.8, 0.999)), nadam(model)
    train(plain, theirs, range(STEPS))
    train(model, ours, range(1))
    before = copy.deepcopy(ours.state_dict()["state"])
    for wrong in (torch.tensor(0.3), torch.ones(2), "half", None):
        saved = theirs.state_dict()
        saved["state"][1] = {**saved["state"][1], "mu_product": wrong}
        with pytest.raises(ValueError, match="mu_product"):
            nadam_state = copy.deepcopy(saved)
            if wrong is None:
                del nadam_state["state"][1]["mu_product"]
            ours.load_state_dict(nadam_state)
    if not isinstance(
        ours, overspill.optim.NAdam
    ):  # which torch's own class has changed before it is looked at
        after = ours.state_dict()["state"]
        assert all(torch.equal(before[n][k], after[n][k]) for n in before for k in before[n])


def test_states_come_with_the_options_that_they_are_of(nadam):
    """The dict brings its groups, so that what follows a load is of other options."""
    plain, model = made(), made()
    theirs, ours = of_torch(plain, betas=(0.8, 0.999), momentum_decay=0.1), nadam(model)
    train(plain, theirs, range(STEPS))
    train(model, ours, range(1))
    model.load_state_dict(plain.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["betas"][0] == 0.8
    assert train(model, ours, range(5)) == pytest.approx(train(plain, theirs, range(5)), rel=1e-5)


def test_a_script_may_write_what_it_is_and_nothing_else(start):
    model = made()
    engine = start(model, of_torch(model))
    train(model, engine.optimizer, range(2))
    state = engine.optimizer.state[model[0].weight]
    kept = {name: value.clone() for name, value in state.items()}
    engine.optimizer.state[model[0].weight] = kept
    with pytest.raises(
        ValueError, match=r"mu_product of 0\.weight is 0\.5; 2 updates with betas\[0\] = 0\.9"
    ):
        engine.optimizer.state[model[0].weight]["mu_product"] = 0.5


def test_torchs_own_goes_on_after_give_back(start):
    plain, model = made(), made()
    theirs, own = of_torch(plain), of_torch(model)
    engine = start(model, own)
    train(plain, theirs, range(STEPS))
    train(model, own, range(STEPS))
    engine.give_back()
    assert set(own.state[model[0].weight]) == set(theirs.state[plain[0].weight])
    assert train(model, own, range(5)) == pytest.approx(train(plain, theirs, range(5)), rel=1e-5)


@pytest.mark.filterwarnings("ignore:overspill. the engine has no update")
def test_a_child_of_torchs_class_may_change_its_momenta(start):
    """The way out that the error names."""

    class Own(torch.optim.NAdam):
        pass

    def trained(model, optimizer, driven):
        schedule = torch.optim.lr_scheduler.OneCycleLR(driven, 1e-2, total_steps=8)
        losses = []
        for i in range(5):
            losses += train(model, optimizer, [i])
            schedule.step()
        return losses

    plain, model = made(), made()
    theirs = of_torch(plain)
    engine = start(model, Own(model.parameters(), lr=1e-2))
    assert trained(model, engine.optimizer, engine.optimizer) == trained(plain, theirs, theirs)


@pytest.mark.parametrize("way", ["load_state_dict", "load_checkpoint"])
def test_an_option_that_changes_right_after_a_load_is_refused_too(start, tmp_path, way):
    model = made()
    engine = start(model, of_torch(model))
    train(model, engine.optimizer, range(STEPS))
    if way == "load_state_dict":
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    else:
        engine.save_checkpoint(tmp_path / "saved")
        engine.load_checkpoint(tmp_path / "saved")
    engine.optimizer.param_groups[0]["betas"] = (0.5, 0.999)
    with pytest.raises(ValueError, match=r"had 0\.9 and 0\.004"):
        train(model, engine.optimizer, [STEPS])


def test_an_option_may_change_before_the_first_step(start):
    plain, model = made(), made()
    theirs = of_torch(plain)
    engine = start(model, of_torch(model))
    for optimizer in (theirs, engine.optimizer):
        optimizer.param_groups[0]["betas"] = (0.5, 0.999)
    assert train(model, engine.optimizer, range(3)) == pytest.approx(train(plain, theirs, range(3)), rel=1e-5)


def test_the_form_of_weight_decay_comes_with_a_state_dict(nadam):
    plain, model = made(), made()
    theirs = of_torch(plain, weight_decay=0.5, decoupled_weight_decay=True)
    ours = nadam(model, weight_decay=0.5)
    train(plain, theirs, range(STEPS))
    model.load_state_dict(plain.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert train(model, ours, range(4)) == pytest.approx(train(plain, theirs, range(4)), rel=1e-5)


def test_states_are_rolled_back(start):
    model = made()
    engine = start(model, of_torch(model))
    train(model, engine.optimizer, range(2))
    weights, kept = copy.deepcopy(model.state_dict()), copy.deepcopy(engine.optimizer.state)
    kept = {
        p: dict(reversed(entry.items())) for p, entry in zip(model.parameters(), kept.values(), strict=True)
    }
    expected = train(model, engine.optimizer, range(2, 5))
    model.load_state_dict(weights)
    for p, entry in kept.items():
        engine.optimizer.state[p] = entry
    assert train(model, engine.optimizer, range(2, 5)) == expected


def test_a_write_in_place_is_looked_at(start):
    model = made()
    engine = start(model, of_torch(model))
    train(model, engine.optimizer, range(2))
    engine.optimizer.state[model[0].weight]["mu_product"].fill_(0.9)
    with pytest.raises(ValueError, match=r"mu_product of 0\.weight"):
        train(model, engine.optimizer, [2])


def test_what_torch_has_rounded_to_bf16_is_taken(start):
    """torch's load_state_dict turns the product into the dtype of the weight."""
    plain = made().bfloat16()
    theirs = of_torch(plain)
    x = torch.randn(4, 8).bfloat16()
    for _ in range(4):
        theirs.zero_grad()
        plain(x).square().mean().backward()
        theirs.step()
    again = of_torch(plain)
    again.load_state_dict(theirs.state_dict())
    assert again.state[plain[0].weight]["mu_product"].dtype is torch.bfloat16
    engine = start(plain, again)
    assert engine.optimizer.state[plain[0].weight]["step"] == 4


def test_counts_are_exact_whatever_the_default_dtype(start):
    model = made()
    engine = start(model, torch.optim.Adamax(model.parameters()))
    train(model, engine.optimizer, range(3))
    state = engine.optimizer.state[model[0].weight]
    torch.set_default_dtype(torch.bfloat16)
    try:
        state["step"] = 259
        assert engine.optimizer.state_dict()["state"][0]["step"] == 259
    finally:
        torch.set_default_dtype(torch.float32)
    assert engine.optimizer.state[model[0].weight]["step"] == 259
