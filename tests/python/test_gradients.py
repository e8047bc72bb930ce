"""`p.grad` of a parameter whose gradient an engine holds; the habits of scripts are in habits_of_gradients.py."""

import copy

import pytest
import torch
from scene import batch, loss_of, mlp
from torch import nn

from overspill import copies, gradients, segments
from plain import Plain


@pytest.fixture
def start(start_and_restore):
    return start_and_restore


def test_gradients_are_the_engines(start):
    """And no parameter has one of its own; engine.step() clears them, as DeepSpeed's does."""
    model = mlp()
    plain = copy.deepcopy(model)
    engine = start(model)
    loss_of(engine, batch()).backward()
    loss_of(plain, batch()).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        assert torch.equal(engine.grad(ours), theirs.grad) and torch.equal(ours.grad, theirs.grad)
        ours.grad.mul_(2)
        assert torch.equal(engine.grad(ours), 2 * theirs.grad)
        assert segments.get_grad(ours) is None
    engine.step()
    assert model[0].weight.grad is None and engine.grad(model[0].weight) is None


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_copies_of_gradients_do_not_pile_up(start, placement):
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(40)))
    engine = start(model, settings={"placement": placement})
    engine.backward(loss_of(engine, batch()))
    held_copies = engine._residency.gradients.copies
    for p in model.parameters():
        p.grad.mul_(0.5)
        assert len(held_copies) <= copies.RECENT
    held = [p.grad for p in model.parameters()]
    assert len(held_copies) == len(held)
    held.clear()
    engine.optimizer.step()
    assert not held_copies
    model[0].weight.grad.zero_()
    assert len(held_copies) == 1 and torch.equal(engine.grad(model[0].weight), torch.zeros(16, 16))
    engine.zero_grad()
    assert not held_copies and model[0].weight.grad is None


def test_the_configured_clipping_is_the_steps_alone(start):
    """`p.grad` is what the script made of it, before the step and after."""
    model = mlp()
    engine = start(model, settings={"clipping": 1e-3})
    engine.backward(loss_of(engine, batch()))
    before = [p.grad.clone() for p in model.parameters()]
    held = model[0].weight.grad
    for _ in range(2):
        engine.optimizer.step()
        assert engine.last_step.clip < 1
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before))
    assert torch.equal(held, before[0]) and torch.equal(engine.grad(model[0].weight), held)


@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize("part", [False, True])
def test_a_scripts_own_clipping_is_in_place_of_the_configured_one(start, look, part):
    """Once a look at `p.grad` brought the configured one back."""
    model = mlp()
    engine = start(model, settings={"clipping": 1e-4})
    for _ in range(2):
        engine.backward(loss_of(engine, batch()))
        nn.utils.clip_grad_norm_(model[0].parameters() if part else model.parameters(), 0.05)
        if look:
            assert model[0].weight.grad.norm() <= 0.05
        norm = torch.stack([engine.grad(p).norm() for p in model.parameters()]).norm().item()
        engine.step()
        assert engine.last_step.norm * engine.last_step.clip == pytest.approx(norm, rel=1e-5)
    engine.backward(loss_of(engine, batch()))
    engine.step()
    assert engine.last_step.norm * engine.last_step.clip == pytest.approx(1e-4, rel=1e-2)


def test_a_norm_that_raises_scales_nothing(start):
    model = mlp()
    engine = start(model)
    loss_of(engine, batch()).backward()
    before = model[0].weight.grad.clone()
    model[2].bias.grad[0] = float("inf")
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert torch.equal(model[0].weight.grad, before)
    model[2].bias.grad[0] = float("nan")
    assert torch.isnan(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    assert torch.isnan(model[0].weight.grad).all()


def test_a_gradient_with_a_graph_is_refused_where_it_is_read(start):
    model = mlp()
    engine = start(model)
    loss_of(engine, batch()).backward(create_graph=True)
    with pytest.raises(
        RuntimeError, match=r"create_graph=True\) made a gradient of 0\.weight.*autograd\.grad\("
    ):
        model[0].weight.grad  # noqa: B018
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    loss_of(engine, batch()).backward()
    assert not model[0].weight.grad.requires_grad


def test_copies_of_a_skipped_step_are_the_scripts(start):
    model = mlp()
    engine = start(model)
    (loss_of(engine, batch()) * float("nan")).backward()
    held = [p.grad for p in model.parameters()]
    with pytest.warns(UserWarning, match="a step is skipped"):
        engine.optimizer.step()
    assert all(p.grad is None for p in model.parameters())
    held[0].zero_()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    engine.zero_grad(set_to_none=False)
    assert all(p.grad is None for p in model.parameters())


def test_a_default_device_changes_nothing(start):
    model = mlp()
    engine = start(model)
    loss_of(engine, batch()).backward()
    held = model[0].weight.grad
    with torch.device("meta"):
        assert engine.grad(model[0].weight).device.type == "cpu" == model[0].bias.grad.device.type
        model[0].weight.grad = held.t().contiguous().t() * 2
        engine.zero_grad(set_to_none=False)
    assert model[0].weight.grad.abs().sum() == 0


def test_ctrl_c_in_an_assignment_adds_nothing(start, monkeypatch):
    model = mlp()
    engine = start(model)
    loss_of(engine, batch()).backward()
    before = engine.grad(model[0].weight)
    for name in ("_take_up", "_replace"):
        with monkeypatch.context() as patch:

            def strike(*_):
                raise KeyboardInterrupt

            patch.setattr(gradients.Gradients, name, strike)
            with pytest.raises(KeyboardInterrupt):
                model[0].weight.grad = before * 2
        assert torch.equal(model[0].weight.grad, before)


def test_ctrl_c_between_an_engines_step_and_its_clearing(start, monkeypatch):
    model = mlp()
    engine = start(model)
    engine.backward(loss_of(engine, batch()))
    held = model[0].weight.grad

    def strike(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gradients.Gradients, "updated", strike)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert engine.stats()["step"] == 1 and model[0].weight.grad is None and torch.isfinite(held).all()
    loss_of(engine, batch()).backward()
    alone = torch.autograd.grad(loss_of(engine, batch()), model[0].weight)[0]
    assert torch.allclose(model[0].weight.grad, alone)


def test_a_step_that_fails_uses_nothing(start, monkeypatch):
    model = mlp()
    engine = start(model)
    loss_of(engine, batch()).backward()
    core = engine._residency.core

    class Failing:
        def __getattr__(self, name):
            return getattr(core, name)

        def step(self, groups, part):
            raise RuntimeError("no room")

    engine._residency.core = Failing()
    with pytest.raises(RuntimeError, match="no room"):
        engine.optimizer.step()
    engine._residency.core = core
    assert not engine._residency.gradients.used
    before = model[0].weight.grad.clone()
    engine.optimizer.step()
    assert torch.equal(model[0].weight.grad, before) and engine.stats()["step"] == 1


def test_clip_grad_norm_by_habit_reaches_the_engine(start):
    from torch.nn.utils.clip_grad import clip_grad_norm_ as imported_before

    model = mlp()
    plain = Plain(copy.deepcopy(model))
    engine = start(model)
    engine.backward(loss_of(engine, batch()))
    plain.backward(loss_of(plain.model, batch()))
    norm = imported_before(model.parameters(), 0.1)
    assert norm.item() == pytest.approx(plain.norm(), rel=1e-6)
    engine.step()
    assert engine.last_step.clip == pytest.approx(0.1 / (plain.norm() + 1e-6))
    plain.step(engine.last_step.clip)
    assert all(torch.equal(v, plain.model.state_dict()[k]) for k, v in engine.state_dict().items())


def test_zero_grad_of_the_model_reaches_the_engine(start):
    model = mlp()
    engine = start(model)
    for clear in (model.zero_grad, engine.zero_grad, engine.optimizer.zero_grad):
        engine.backward(loss_of(engine, batch()))
        clear()
        assert engine.grad(model[0].weight) is None


def test_several_backwards_add(start):
    model = mlp()
    plain = Plain(copy.deepcopy(model))
    engine = start(model)
    for i in range(3):
        loss_of(engine, batch(i)).backward()
        plain.backward(loss_of(plain.model, batch(i)))
    engine.step()
    plain.step(1.0)
    assert all(torch.equal(v, plain.model.state_dict()[k]) for k, v in engine.state_dict().items())
