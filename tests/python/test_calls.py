"""Calls that end in a way of their own: interrupted, inside each other. The engine is right
afterwards, or the error says what was wrong."""

import copy
import ctypes

import pytest
import torch
from scene import Meanwhile, Strike, batch, follows, in_thread, loss_of, mlp
from torch import nn
from torch.nn import functional as F

import overspill
from overspill import lending, residency, segments
from plain import Plain

# ---- interrupts


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
@pytest.mark.parametrize("hook", ["forward_pre", "forward", "full_backward_pre", "full_backward", "tensor"])
def test_an_interrupt_at_a_hook_of_torch_leaves_no_stale_weights(start, hook, error):
    """Of this engine and of any other one, called without the engine's own call."""
    model, other = mlp(), mlp()
    plain, plain_other = Plain(copy.deepcopy(model)), Plain(copy.deepcopy(other))
    engine, second = start(model), start(other)
    follows(engine, plain)
    strike = Strike(error)
    if hook == "tensor":
        handle = model[0].weight.register_hook(strike)
    else:
        handle = getattr(model[2], f"register_{hook}_hook")(strike)
    with pytest.raises(error, match="on purpose"):
        loss_of(model, batch()).backward()
    handle.remove()
    engine.zero_grad()
    follows(engine, plain)
    follows(second, plain_other)


@pytest.mark.parametrize("where", ["before", "after"])
def test_an_interrupt_that_the_model_itself_catches(start, where):
    """Its call goes on, and holds nothing of the call that was broken off."""

    class Stubborn(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x):
            try:
                return self.inner(x)
            except KeyboardInterrupt:
                return self.inner(x)

    model = Stubborn()
    plain = Plain(copy.deepcopy(model))
    engine = start(model)
    follows(engine, plain)
    register = "register_forward_pre_hook" if where == "before" else "register_forward_hook"
    handle = getattr(model.inner[2], register)(Strike())
    assert torch.equal(loss_of(model, batch()), loss_of(plain.model, batch()))
    handle.remove()
    assert not [u.name for u in engine._residency.units if u.pins or u.shown or u.flat is not None]
    follows(engine, plain)


def test_an_interrupt_in_gathered_or_while_loading(start):
    model = mlp()
    plain = Plain(copy.deepcopy(model))
    engine = start(model)
    with pytest.raises(KeyboardInterrupt), engine.gathered(model.parameters()):
        raise KeyboardInterrupt
    follows(engine, plain)
    handle = model[2].register_load_state_dict_pre_hook(Strike())
    with pytest.raises(KeyboardInterrupt):
        model.load_state_dict(model.state_dict())
    handle.remove()
    follows(engine, plain)


class _Interrupts:
    """Ctrl-C comes while `statement` is assigned, in no function of Python: it is raised where the next one begins."""

    _set = ctypes.pythonapi.PyErr_SetInterrupt
    _set.restype, _set.argtypes = None, [ctypes.py_object, ctypes.py_object]
    statement = property(None, _set)


def test_an_interrupt_in_the_last_statement_of_gathered_leaves_the_block(start):
    """Its error is raised at the beginning of what ends the block, and a handler still has it, and so the block."""
    model = mlp()
    plain = Plain(copy.deepcopy(model))
    engine, last = start(model), _Interrupts()
    try:
        with engine.gathered(model[0].weight):
            last.statement = "ends in Ctrl-C"
    except KeyboardInterrupt:
        follows(engine, plain)
    else:
        pytest.fail("nothing was interrupted")


def test_an_interrupt_at_the_end_of_gathered_hides_no_edit_from_backward(start, monkeypatch):
    """What autograd saved before is out of date, though the block's end was broken off."""
    model = mlp()
    engine = start(model)
    loss = loss_of(model, batch())
    block = engine.gathered(model[2].weight)
    block.__enter__()
    model[2].weight.data.mul_(2)
    with monkeypatch.context() as patch:
        patch.setattr(lending, "outdate", Strike())
        with pytest.raises(KeyboardInterrupt):
            block.__exit__()
    with pytest.raises(RuntimeError, match=r"2\.weight was saved for backward and has been updated"):
        loss.backward()


def test_the_end_of_gathered_looks_at_its_own_units_only(start, monkeypatch):
    """Many small blocks would look at the whole model each."""
    model = mlp()
    engine = start(model)
    looks = []
    monkeypatch.setattr(residency, "recount", lambda calls: looks.append(calls))
    for parameter in model.parameters():
        with engine.gathered(parameter):
            pass
    assert not looks


def test_a_gathered_block_is_entered_once_at_a_time(start):
    model = mlp()
    engine = start(model)
    block = engine.gathered(model[0].weight)
    with block:
        with pytest.raises(RuntimeError, match=r"entered already: call engine\.gathered"), block:
            pass
        assert not model[0].weight.isnan().any()
    with block:
        assert not model[0].weight.isnan().any()


def test_a_gradient_that_an_interrupt_left_behind_is_not_added_to_the_next(start):
    """The parameter's own hook strikes before the engine takes the gradient."""
    model = mlp()
    plain = Plain(copy.deepcopy(model))
    handle = model[0].weight.register_post_accumulate_grad_hook(Strike())
    engine = start(model)
    with pytest.raises(KeyboardInterrupt):
        loss_of(model, batch()).backward()
    handle.remove()
    engine.zero_grad()
    follows(engine, plain)


def test_an_interrupt_of_micro_batches_that_pass_units_together(config):
    expected = {}
    for strikes in (False, True):
        model = mlp()
        settings = config("nvme", accumulation=2) | {"vertical_accumulation": True}
        engine = overspill.initialize(model, settings)[0]

        def loss(x, model=model):
            return loss_of(model, x)

        for i in range(3):
            if strikes and i == 1:
                handle = model[2].register_forward_pre_hook(Strike())
                with pytest.raises(KeyboardInterrupt):
                    engine.train_batch([batch(i), batch(i + 7)], loss)
                handle.remove()
            engine.train_batch([batch(i), batch(i + 7)], loss)
        expected[strikes] = engine.state_dict()
        assert not [u.name for u in engine._residency.units if u.pins or u.shown or u.flat is not None]
        engine.close()
    assert all(torch.equal(v, expected[False][k]) for k, v in expected[True].items())


@pytest.mark.parametrize("error", [KeyboardInterrupt, overspill.EngineFailed])
def test_an_engine_whose_units_cannot_all_be_let_go_is_closed_nevertheless(start, error):
    """What was edited cannot be handed over, because the engine has failed, or Ctrl-C strikes meanwhile."""
    model = mlp()
    engine = start(model)
    core, units, strike = engine._core, engine._residency.units, Strike(error)
    with engine.gathered(model.parameters()), torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for unit in units:
            unit.core = Meanwhile(core, "written", strike)
        with pytest.raises(error, match="on purpose"):
            engine.close()
    assert not [u.name for u in units if u.flat is not None or u.shown]
    assert not [s.name for u in units for s in u.segments if id(s.parameter) in segments.registry]
    with pytest.raises(ValueError, match="the engine was closed"):
        core.synchronize()
    engine.close()


# ---- changes of weights inside a call


def test_a_step_inside_gathered_or_a_call_is_refused(start):
    model = mlp()
    plain = Plain(copy.deepcopy(model))
    engine = start(model)
    loss_of(engine, batch()).backward()
    with (
        engine.gathered(model[0].weight),
        pytest.raises(RuntimeError, match=r"a step of the optimizer inside `with engine\.gathered"),
    ):
        engine.step()
    handle = model[0].register_forward_hook(lambda *_: engine.optimizer.step())
    with pytest.raises(RuntimeError, match="a step of the optimizer inside a call of the model"):
        engine(batch())
    handle.remove()
    engine.zero_grad()
    loss_of(engine, batch()).backward()
    with engine.gathered(model[0].weight):
        said = str(in_thread(engine.step))
    assert "a step of the optimizer while thread 'MainThread' is inside `with engine.gathered" in said, said
    engine.zero_grad()
    follows(engine, plain)


def test_loading_a_checkpoint_inside_gathered_is_refused(start, tmp_path):
    model = mlp()
    plain = Plain(copy.deepcopy(model))
    engine = start(model)
    engine.save_checkpoint(tmp_path / "saved")
    with (
        engine.gathered(model[0].weight),
        pytest.raises(RuntimeError, match=r"load_checkpoint inside `with engine\.gathered"),
    ):
        engine.load_checkpoint(tmp_path / "saved")
    follows(engine, plain)


# ---- parameters at the edges


def test_a_gradient_switched_off_between_forward_and_backward_is_dropped_as_in_torch(start):
    model = mlp()
    plain = Plain(copy.deepcopy(model))
    engine = start(model)
    for each in (model, plain.model):
        loss = loss_of(each, batch())
        each[0].weight.requires_grad_(False)
        loss.backward()
        each[0].weight.requires_grad_(True)
    assert engine.grad(model[0].weight) is None and plain.model[0].weight.grad is None
    assert torch.equal(engine.grad(model[2].weight), plain.model[2].weight.grad)
    engine.zero_grad()
    plain.model.zero_grad()
    follows(engine, plain)


def test_a_parameter_without_elements_is_read_and_gathered_like_any_other(start):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.empty = mlp(), nn.Parameter(torch.zeros(0, 3))

        def forward(self, x):
            return self.net(x)

    model = Odd()
    engine = start(model)
    assert engine.weight(model.empty).shape == (0, 3)
    assert engine.weight(model.empty, torch.float64).dtype is torch.float64
    with engine.gathered(model.parameters()):
        assert torch.isfinite(model.net[0].weight).all() and model.empty.shape == (0, 3)
    with pytest.raises(ValueError, match="no parameter of this engine's model"):
        engine.weight(nn.Parameter(torch.zeros(0)))
    assert F.relu(engine(batch())).shape == (6, 4)


@pytest.mark.parametrize("grouped", [False, True])
def test_parameters_with_their_names_are_taken_as_torch_takes_them(config, grouped):
    found = []
    for named in (False, True):
        model = mlp()
        given = list(model.named_parameters() if named else model.parameters())
        parameters = [{"params": given[:2], "lr": 0.5}, {"params": given[2:]}] if grouped else given
        engine = overspill.initialize(model, config(), model_parameters=parameters)[0]
        engine.backward(loss_of(engine, batch()))
        engine.step()
        found.append(engine.state_dict())
        engine.close()
    assert all(torch.equal(v, found[1][k]) for k, v in found[0].items())


def test_what_is_no_parameter_is_refused_by_its_place(config):
    model = mlp()
    with pytest.raises(TypeError, match=r"model_parameters has '0\.bias' at place 1, a str"):
        overspill.initialize(model, config(), model_parameters=[model[0].weight, "0.bias"])


@pytest.mark.parametrize(
    ("name", "value"), [("lr", "x"), ("lr", None), ("eps", float("nan")), ("betas", (1,))]
)
def test_a_state_dict_whose_hyper_parameter_is_no_number_is_refused_with_nothing_changed(start, name, value):
    model = mlp()
    plain = Plain(copy.deepcopy(model))
    engine = start(model)
    saved = engine.optimizer.state_dict()
    saved["param_groups"][0][name] = value
    with pytest.raises(ValueError, match=f"group 0 of the state dict has {name} = "):
        engine.optimizer.load_state_dict(saved)
    follows(engine, plain)
