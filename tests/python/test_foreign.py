"""Optimizers whose own torch code makes the steps (foreign.py); what they compute is compared in test_habits.py."""

import copy
import errno
import io
import os

import pytest
import torch
from disks import lies_in_a_file
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:overspill. the engine has no update")


def net(width=16, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)).to(dtype)


def batch(width=16, dtype=torch.float32, i=0):
    return torch.randn(4, width, generator=torch.Generator().manual_seed(i)).to(dtype)


def train(model, optimizer, steps=3, **options):
    for i in range(steps):
        optimizer.zero_grad()
        model(batch(i=i, **options)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("kind", [torch.optim.RAdam, torch.optim.ASGD])
def test_weights_in_half_precision_are_those_of_torch(start, placement, kind):
    model = net(dtype=torch.bfloat16)
    plain = copy.deepcopy(model)
    engine = start(model, kind(model.parameters(), lr=1e-2), placement=placement)
    theirs = kind(plain.parameters(), lr=1e-2)
    train(plain, theirs, dtype=torch.bfloat16)
    train(model, engine.optimizer, dtype=torch.bfloat16)
    assert all(torch.equal(v, plain.state_dict()[k]) for k, v in model.state_dict().items())


@pytest.mark.filterwarnings("default")
def test_it_is_said_once(start):
    model = net()
    with pytest.warns(
        UserWarning, match=r"no update of torch\.optim\.\w+\.RAdam.*one unit after the other"
    ) as told:
        engine = start(model, torch.optim.RAdam(model.parameters()))
    train(model, engine.optimizer)
    assert len(told) == 1 and "bindings" not in told[0].filename  # it names the script's line
    model = net()
    with pytest.warns(UserWarning, match=r"LBFGS.*over all its parameters at once"):
        start(model, torch.optim.LBFGS(model.parameters()))


def test_large_states_lie_in_files_where_there_is_a_disk(start):
    model = net(512)
    plain = copy.deepcopy(model)
    engine = start(model, torch.optim.RAdam(model.parameters(), lr=1e-3), placement="nvme")
    theirs = torch.optim.RAdam(plain.parameters(), lr=1e-3)
    train(plain, theirs, width=512)
    train(model, engine.optimizer, width=512)
    assert all(torch.equal(v, plain.state_dict()[k]) for k, v in model.state_dict().items())
    kept = engine.optimizer.state[model[0].weight]["exp_avg"]
    assert lies_in_a_file(kept) and kept.is_contiguous()
    assert not lies_in_a_file(engine.optimizer.state[model[0].bias]["exp_avg"])
    assert torch.equal(
        engine.optimizer_state(model[0].weight)["exp_avg"], theirs.state[plain[0].weight]["exp_avg"]
    )


def test_a_run_goes_on_by_state_dicts(start):
    model = net()
    engine = start(model, torch.optim.RAdam(model.parameters(), lr=1e-2))
    train(model, engine.optimizer)
    file = io.BytesIO()
    torch.save((model.state_dict(), engine.optimizer.state_dict()), file)
    file.seek(0)
    weights, states = torch.load(file)
    train(model, engine.optimizer)
    other = net()
    again = start(other, torch.optim.RAdam(other.parameters(), lr=1e-2))
    other.load_state_dict(weights)
    again.optimizer.load_state_dict(states)
    train(other, again.optimizer)
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in other.state_dict().items())


def test_a_gradient_that_is_not_finite_skips_the_step(start):
    model = net()
    engine = start(model, torch.optim.RAdam(model.parameters(), lr=1e-2))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    (model(batch()).sum() * float("inf")).backward()
    with pytest.warns(UserWarning, match="a step is skipped"):
        engine.optimizer.step()
    assert engine.last_step.skipped and engine.stats()["skipped_steps"] == 1 and not engine.optimizer.state
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    train(model, engine.optimizer, 2)
    assert engine.last_step.step == 2 and engine.last_step.norm > 0 and not engine.last_step.skipped


def test_the_engines_own_step_clips_and_schedules(start):
    """engine.step() with accumulation, the configured clipping and a scheduler, as with any optimizer."""
    model = net()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.RAdam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    engine = start(model, optimizer, schedule, clipping=0.05, accumulation=2)
    theirs = torch.optim.RAdam(plain.parameters(), lr=1e-2)
    for i in range(4):
        engine.backward(engine(batch(i=i)).square().mean())
        engine.step()
        (plain(batch(i=i)).square().mean() / 2).backward()
        if i % 2:
            norm = nn.utils.clip_grad_norm_(list(plain.parameters()), 0.05)
            theirs.step()
            theirs.zero_grad()
            theirs.param_groups[0]["lr"] *= 0.5
            assert engine.last_step.norm == pytest.approx(norm.item(), rel=1e-5) and engine.last_step.clip < 1
    assert model[0].weight.grad is None and engine.global_steps == 2
    assert all(torch.allclose(v, plain.state_dict()[k], atol=1e-6) for k, v in model.state_dict().items())


def test_a_scripts_own_clipping_is_in_place_of_the_configured_one(start):
    model = net()
    plain = copy.deepcopy(model)
    engine = start(model, torch.optim.RAdam(model.parameters(), lr=1e-2), clipping=1e-4)
    theirs = torch.optim.RAdam(plain.parameters(), lr=1e-2)
    for each, its in ((model, engine.optimizer), (plain, theirs)):
        for i in range(2):
            its.zero_grad()
            each(batch(i=i)).square().mean().backward()
            nn.utils.clip_grad_norm_(each.parameters() if i else each[0].parameters(), 0.05)
            its.step()
    assert engine.last_step.clip == 1 and engine.last_step.norm == pytest.approx(0.05, rel=1e-3)
    assert all(torch.allclose(v, plain.state_dict()[k], atol=1e-6) for k, v in model.state_dict().items())


def test_states_stay_in_memory_where_the_disk_is_full(start, monkeypatch):
    model = net(512)
    plain = copy.deepcopy(model)
    engine = start(model, torch.optim.RAdam(model.parameters(), lr=1e-3), placement="nvme")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.warns(
        UserWarning, match=r"RAdam keeps exp_avg of 0\.weight.*No space left.*it stays in memory"
    ):
        train(model, engine.optimizer, width=512)
    train(plain, torch.optim.RAdam(plain.parameters(), lr=1e-3), width=512)
    assert all(torch.equal(v, plain.state_dict()[k]) for k, v in model.state_dict().items())


def test_an_error_in_its_code_leaves_the_engine_usable(start):
    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure=None):
            if self.fails:
                raise ZeroDivisionError("in the script's own step")
            return super().step(closure)

    model = net()
    optimizer = Failing(model.parameters(), lr=0.1)
    engine = start(model, optimizer)
    model(batch()).sum().backward()
    with pytest.raises(ZeroDivisionError):
        engine.optimizer.step()
    assert engine.stats()["step"] == 0 and model[0].weight.grad is not None
    Failing.fails = False
    engine.optimizer.step()
    assert engine.stats()["step"] == 1


def test_a_stray_object_is_no_optimizer(start):
    with pytest.raises(TypeError, match=r"a child of torch\.optim\.Optimizer"):
        start(net(), object())
