"""RMSprop of groups with and without momentum, beside torch's; and options that come too late."""

import copy

import pytest
import torch
from test_momenta import made, train

import overspill

LR = 1e-2


def groups(model, momenta):
    return [
        {"params": list(part.parameters()), "momentum": momentum}
        for part, momentum in zip((model[0], model[2]), momenta, strict=True)
    ]


def of_torch(model, momenta=(0.9, 0.0)):
    return torch.optim.RMSprop(groups(model, momenta), lr=LR)


def driven(model, optimizer, momenta):
    losses = []
    for i, momentum in enumerate(momenta):
        optimizer.param_groups[0]["momentum"] = momentum
        losses += train(model, optimizer, [i])
    return losses


@pytest.mark.parametrize("kind", ["engine", "overspill.optim"])
def test_a_momentum_of_zero_leaves_the_buffer_alone(start, kind):
    plain, model = made(), made()
    momenta = [0.9] * 4 + [0.0] * 3 + [0.9] * 5
    wanted = driven(plain, of_torch(plain), momenta)
    if kind == "engine":
        ours = start(model, of_torch(model)).optimizer
    else:
        ours = overspill.optim.RMSprop(groups(model, (0.9, 0.0)), lr=LR)
    assert driven(model, ours, momenta) == pytest.approx(wanted, rel=1e-4)


def test_states_of_groups_with_and_without_momentum_are_taken(start):
    plain = made()
    theirs = of_torch(plain)
    train(plain, theirs, range(3))
    model = copy.deepcopy(plain)
    stepped = of_torch(model)
    stepped.load_state_dict(theirs.state_dict())
    taken = start(model, stepped)
    other = copy.deepcopy(plain)
    loaded = start(other, of_torch(other))
    loaded.optimizer.load_state_dict(theirs.state_dict())
    wanted = train(plain, theirs, range(3, 7))
    assert train(model, taken.optimizer, range(3, 7)) == pytest.approx(wanted, rel=1e-4)
    assert train(other, loaded.optimizer, range(3, 7)) == pytest.approx(wanted, rel=1e-4)


def test_a_momentum_that_is_gone_leaves_nothing(start):
    plain = made()
    theirs = of_torch(plain, (0.9, 0.9))
    train(plain, theirs, range(3))
    for group in theirs.param_groups:
        group["momentum"] = 0.0
    model = copy.deepcopy(plain)
    stepped = of_torch(model, (0.0, 0.0))
    stepped.load_state_dict(theirs.state_dict())
    engine = start(model, stepped)
    assert train(model, engine.optimizer, range(3)) == pytest.approx(train(plain, theirs, range(3)), rel=1e-4)


def test_a_momentum_that_comes_too_late_says_what_to_do(start):
    model = made()
    engine = start(model, of_torch(model, (0.0, 0.0)))
    engine.optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ValueError, match=r"made no buffers for it: make what sets it .* before initialize"):
        train(model, engine.optimizer, [0])


@pytest.mark.parametrize("kind", ["engine", "overspill.optim"])
@pytest.mark.parametrize("name, option", [("RMSprop", "centered"), ("AdamW", "amsgrad")])
def test_an_option_that_comes_too_late_is_refused(start, kind, name, option):
    model = made()
    own = torch.optim if kind == "engine" else overspill.optim
    optimizer = getattr(own, name)(model.parameters(), lr=LR)
    if kind == "engine":
        optimizer = start(model, optimizer).optimizer
    optimizer.param_groups[0][option] = True
    with pytest.raises(
        ValueError, match=rf"group 0 has {option} = True, which Overspill's update of {name} does not"
    ):
        train(model, optimizer, [0])


def test_adamax_has_no_8_bit_states(start):
    model = made().bfloat16()
    with pytest.raises(ValueError, match=r'Adamax has no format "8bit".*take "compact"'):
        overspill.optim.Adamax(model.parameters(), format="8bit")
    with pytest.raises(ValueError, match='Adamax has no format "8bit"'):
        start(model, section={"type": "Adamax"}, format="8bit")
