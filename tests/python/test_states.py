"""optimizer.state of an optimizer that the engine updates. What scripts do with it is compared in test_habits.py."""

import copy
import io

import pytest
import torch
from torch import nn

from overspill import copies, ranks, states


def net(layers=4):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))


def backward(model, i=0):
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(i))
    model(x).square().mean().backward()


def step(model, optimizer, i=0):
    optimizer.zero_grad()
    backward(model, i)
    optimizer.step()


def test_what_is_written_between_backward_and_a_guessed_step_counts(start):
    ends = []
    for speculate in (False, True):
        model = net()
        engine = start(model, placement="half", speculate=speculate)
        optimizer = engine.optimizer
        for i in range(5):
            optimizer.zero_grad()
            backward(model, i)
            if i > 1:
                optimizer.state[model[1].weight]["exp_avg"].mul_(0.5)
                optimizer.state[model[2].weight]["step"].fill_(1)
            optimizer.step()
        ends.append(dict(model.state_dict()))
    assert all(torch.equal(ends[0][name], value) for name, value in ends[1].items())


@pytest.mark.parametrize("format", ["exact", "compact", "8bit"])
def test_states_in_every_format_are_read_and_written(start, format):
    model = net().bfloat16()
    engine = start(model, format=format)
    state = engine.optimizer.state
    engine.backward(model(torch.ones(2, 16).bfloat16()).float().square().mean())
    engine.step()
    weight = model[0].weight
    assert torch.equal(state[weight]["exp_avg"], engine.optimizer_state(weight)["exp_avg"])
    assert state[weight]["exp_avg"].dtype is torch.float32
    held = state[weight]["exp_avg"]
    held.fill_(0.5)
    near = 0.01 if format == "8bit" else 0
    assert torch.allclose(engine.optimizer_state(weight)["exp_avg"], torch.tensor(0.5), rtol=0, atol=near)
    del held
    assert torch.allclose(state[weight]["exp_avg"], torch.tensor(0.5), rtol=0, atol=near)


def test_copies_do_not_pile_up(start):
    model = net(20)
    engine = start(model)
    step(model, engine.optimizer)
    state = engine.optimizer.state
    for p in model.parameters():
        state[p]["exp_avg"].mul_(0.5)
        assert len(state.copies) <= copies.RECENT
    held = [value for p in model.parameters() for value in state[p].values()]
    assert len(state.copies) == len(held) == 3 * 40
    del held
    step(model, engine.optimizer)
    assert not state.copies


def test_a_checkpoint_and_a_state_dict_have_what_was_written(start, tmp_path):
    model = net()
    engine = start(model)
    step(model, engine.optimizer)
    weight = model[0].weight
    held = engine.optimizer.state[weight]["exp_avg"]
    held.fill_(0.25)
    engine.save_checkpoint(tmp_path / "saved")
    held.fill_(0.5)
    assert torch.equal(engine.optimizer.state_dict()["state"][0]["exp_avg"], held)
    engine.load_checkpoint(tmp_path / "saved")
    assert torch.equal(engine.optimizer_state(weight)["exp_avg"], torch.full((16, 16), 0.25))
    assert (held == 0.5).all(), "the script's own since the load"
    held.fill_(2.0)
    engine.optimizer.state[weight]["exp_avg"].fill_(0.125)
    assert (engine.optimizer_state(weight)["exp_avg"] == 0.125).all()
    step(model, engine.optimizer)
    assert engine.optimizer_state(weight)["exp_avg"].abs().max() < 1


def test_an_interrupt_before_an_update_has_told(start, monkeypatch):
    def strike(self):
        raise KeyboardInterrupt

    model = net()
    engine = start(model)
    step(model, engine.optimizer)
    held = engine.optimizer.state[model[0].weight]["exp_avg"]
    before = held.clone()
    with monkeypatch.context() as patch:
        patch.setattr(states.States, "updated", strike)
        with pytest.raises(KeyboardInterrupt):
            step(model, engine.optimizer, 1)
    now = engine.optimizer_state(model[0].weight)["exp_avg"]
    assert torch.equal(held, now) and not torch.equal(held, before)


def test_the_users_optimizer_has_them_too(start):
    model = net()
    own = torch.optim.AdamW(model.parameters())
    engine = start(model, own)
    step(model, own)
    assert own.state is engine.optimizer.state and len(own.state) == 8


def test_states_that_were_replaced_say_so(start):
    model = net()
    engine = start(model)
    step(model, engine.optimizer)
    old = engine.optimizer.state
    engine.optimizer.state = {}
    assert len(engine.optimizer.state) == 0
    with pytest.raises(RuntimeError, match=r"was replaced by another.*copy\.deepcopy\(optimizer\.state\)"):
        engine.optimizer.state = old


def test_copies_of_the_dicts_are_plain(start):
    model = net()
    engine = start(model)
    step(model, engine.optimizer)
    state = engine.optimizer.state
    expected = state[model[0].weight]["exp_avg"].clone()
    file = io.BytesIO()
    torch.save(state[model[0].weight], file)
    file.seek(0)
    for made in (
        next(iter(copy.deepcopy(state).values())),
        copy.copy(state[model[0].weight]),
        torch.load(file),
    ):
        assert isinstance(made, dict) and torch.equal(made["exp_avg"], expected)


def test_where_they_are_refused(start):
    model = net()
    engine = start(model)
    state = engine.optimizer.state
    state.ranks = 2
    for call in (lambda: state[model[0].weight]["exp_avg"], lambda: list(state), lambda: state.clear()):
        with pytest.raises(
            ranks.RankError, match=r"2 ranks hold parts of the states: call engine\.optimizer_state"
        ):
            call()
    state.ranks = 1
    with pytest.raises(ValueError, match=r"step = -1\.0 of 0\.weight is not a count of updates"):
        state[model[0].weight]["step"] = torch.tensor(-1.0)
    with pytest.raises(ValueError, match=r"elements of this tensor share memory \(expand\).*clone"):
        state[model[0].weight]["exp_avg"] = torch.zeros(1).expand(16, 16)
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        state[model[0].weight]["exp_avg"]


def test_an_assignment_that_is_refused_changes_nothing(start):
    model = net()
    engine = start(model)
    step(model, engine.optimizer)
    with pytest.raises(ValueError, match="keep what is yours"):
        engine.optimizer.state = {model[0].weight: {"mine": 1}}
    assert len(engine.optimizer.state) == 8


def test_dicts_of_before_a_load_are_the_scripts_own(start):
    model = net()
    engine = start(model)
    step(model, engine.optimizer)
    of_before = engine.optimizer.state[model[0].weight]
    expected = of_before["exp_avg"].clone()
    engine.optimizer.load_state_dict(copy.deepcopy(engine.optimizer.state_dict()))
    of_before["exp_avg"].zero_()
    of_before["mine"] = 1
    assert torch.equal(engine.optimizer.state[model[0].weight]["exp_avg"], expected)


def test_after_the_end_states_are_an_error_not_nothing(start):
    model = net()
    engine = start(model)
    step(model, engine.optimizer)
    state = engine.optimizer.state
    engine.close()
    for call in (lambda: len(state), lambda: copy.deepcopy(state), lambda: state.get(model[0].weight)):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_a_parameter_without_elements_has_a_dict_of_the_scripts(start):
    model = net()
    model.nothing = nn.Identity()
    model.nothing.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    engine = start(model)
    step(model, engine.optimizer)
    state, empty = engine.optimizer.state, model.nothing.empty
    assert empty not in state and len(state) == 8
    state[empty]["mine"] = 1
    assert empty in state and len(state) == len(list(state)) == 9
    assert state.pop(empty) == {"mine": 1} and empty not in state
    with pytest.raises(KeyError):
        del state[empty]
