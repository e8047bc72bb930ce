"""torch.amp.GradScaler over an engine: what it gives with a step is that step's alone, and a step that it leaves out
says what the core's own would."""

import math

import pytest
import torch
from test_fp16 import batch, loss_of, network, scaler, settings
from torch import nn

import overspill
from overspill import loss_scaling


def made(config, own, **more):
    model = network()
    said = config("host", **more)
    del said["optimizer"]
    user = own(model.parameters())
    engine, ours, *_ = overspill.initialize(model, said, user)
    return engine, user, ours


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-2)


def scaled(engine, scale, i=0, times=1.0):
    x, y = batch(i)
    scale.scale(nn.functional.mse_loss(engine(x), y) * times).backward()


@pytest.mark.parametrize("mine", [True, False], ids=["the_scripts_own", "the_engines"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_step_that_an_exception_ended_gives_the_next_one_no_scale(mine, error, config, monkeypatch):
    """SGD, which follows the gradient's size."""
    plain = network()
    nn.functional.mse_loss(plain(batch(0)[0]), batch(0)[1]).backward()
    sgd(plain.parameters()).step()
    engine, user, ours = made(config, sgd)
    stepped, scale = user if mine else ours, torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled(engine, scale)

    def struck():
        raise error

    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(ours, "before_step", struck)
        scale.step(stepped)
    assert not hasattr(stepped, "grad_scale") and not hasattr(stepped, "found_inf")
    scale.step(stepped)
    scale.update()
    for name, weight in engine.state_dict().items():
        torch.testing.assert_close(weight, plain.state_dict()[name])
    engine.close()


def test_what_ctrl_c_left_on_the_object_is_not_the_next_steps(config):
    """Between GradScaler's assignments and the step nothing of the engine's runs."""
    engine, user, _ = made(config, sgd)
    scale = torch.amp.GradScaler("cpu", init_scale=1024.0)
    user.grad_scale, user.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    norms = []
    for i in range(2):
        scaled(engine, scale)
        scale.step(user)
        scale.update()
        norms.append(engine.last_step.norm)
        engine.zero_grad()
        assert not hasattr(user, "grad_scale"), i
    plain = network()
    nn.functional.mse_loss(plain(batch(0)[0]), batch(0)[1]).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item()
    assert norms[0] == pytest.approx(expected, rel=1e-5)
    engine.close()


def test_a_scale_of_the_scripts_own_is_multiplied_as_torch_does(config):
    """torch: "if the user has already set optimizer.grad_scale"."""
    engine, user, _ = made(config, sgd)
    scale = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaled(engine, scale, times=8.0)
    user.grad_scale = torch.tensor(8.0)
    scale.step(user)
    eight = engine.last_step.norm
    engine.close()
    engine, user, _ = made(config, sgd)
    scale = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaled(engine, scale)
    scale.step(user)
    assert engine.last_step.norm == eight
    engine.close()


@pytest.mark.parametrize("unscaled", [True, False])
def test_a_step_that_it_leaves_out_tells_its_norm(unscaled, config):
    engine, user, _ = made(config, sgd)
    scale = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaled(engine, scale, times=math.inf)
    if unscaled:
        scale.unscale_(user)
    scale.step(user)
    scale.update()
    last = engine.last_step
    assert last.skipped and not math.isfinite(last.norm) and last.not_finite and scale.get_scale() == 32
    engine.close()


def test_a_step_that_it_leaves_out_is_left_out_though_gradients_are_finite_by_then(config):
    engine, user, _ = made(config, sgd)
    scale = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaled(engine, scale, times=math.inf)
    scale.unscale_(user)
    for p in engine.module.parameters():
        p.grad.nan_to_num_(0.0, 0.0, 0.0)
    before = engine.state_dict()
    scale.step(user)
    assert engine.last_step.skipped
    assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    engine.close()


@pytest.mark.parametrize("amsgrad", [True, False])
def test_fused_optimizers_are_given_the_gradients_of_the_loss(amsgrad, config):
    """Torch's fused ones divide in their own step; with amsgrad that step runs here, after the engine has clipped."""

    def own(parameters):
        return torch.optim.AdamW(parameters, lr=1e-2, amsgrad=amsgrad, fused=True)

    found = []
    for init in (1.0, 2.0**12):
        engine, user, _ = made(config, own, clipping=0.5, job=f"scale{init}")
        scale = torch.amp.GradScaler("cpu", init_scale=init)
        for i in range(3):
            scaled(engine, scale, i)
            scale.step(user)
            scale.update()
            engine.zero_grad()
        found.append((engine.last_step.norm, engine.state_dict()))
        engine.give_back()
        assert getattr(user, loss_scaling.PROTOCOL)  # as torch had it
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    for name, weight in found[0][1].items():
        torch.testing.assert_close(weight, found[1][1][name])


def test_one_that_divides_by_itself_is_let_do_so(config):
    """As scripts patch it, so that unscale_ takes gradients in fp16."""

    class Scaler(torch.amp.GradScaler):
        def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)

    said = settings(config, "host")
    del said["loss_scaling"]
    norms = []
    for kind in (Scaler, torch.amp.GradScaler):
        engine, optimizer, *_ = overspill.initialize(network(), said | {"optimizer": {"type": "SGD"}})
        scale = kind("cpu", init_scale=1024.0)
        scale.scale(loss_of(engine, 0)).backward()
        if kind is Scaler:
            scale.unscale_(optimizer)
        scale.step(optimizer)
        norms.append(engine.last_step.norm)
        engine.close()
    assert norms[0] == pytest.approx(norms[1], rel=2e-3)


# ---- what the engine's own scaling reaches


def test_a_scaled_loss_that_reaches_weights_of_others_is_refused(config):
    engine, *_ = overspill.initialize(network(), settings(config, "host"))
    other, *_ = overspill.initialize(nn.Linear(4, 4), config("host", job="other"))
    plain = nn.Linear(4, 4)
    for beside, said in (
        (plain, r"a weight of shape \[4, 4\], which no engine trains"),
        (other, "weight, which another engine trains"),
    ):
        with pytest.raises(RuntimeError, match=f"the loss of engine.backward reaches {said}"):
            engine.backward(beside(engine(batch(0)[0].half()).float()).sum())
    for p in plain.parameters():
        p.requires_grad_(False)
    engine.backward(plain(engine(batch(0)[0].half()).float()).sum())
    engine.step()
    other.close()
    engine.close()


def test_inputs_and_weights_without_elements_may_have_gradients(config):
    model = network()
    model.nothing = nn.Parameter(torch.empty(0))
    engine, *_ = overspill.initialize(model, settings(config, "host"))
    x = batch(0)[0].half().requires_grad_()
    engine.backward(engine(x).float().sum() * 2**-10 + model.nothing.sum())
    engine.step()
    assert x.grad is not None and not engine.last_step.skipped
    engine.close()


def test_gradients_that_nobody_scaled_are_named_where_the_engine_is_made(config):
    model = network()
    model(batch(0)[0]).sum().backward()
    gradient = model[0].weight.grad.clone()
    with pytest.raises(RuntimeError, match=r"initialize: loss_scaling\.enabled: 0\.weight has a gradient"):
        overspill.initialize(model, settings(config, "host"))
    assert torch.equal(model[0].weight.grad, gradient.half())


def test_give_back_names_gradients_of_a_scaled_loss(config):
    engine, *_ = overspill.initialize(network(), settings(config, "host"))
    engine.backward(loss_of(engine, 0) * 2**-10)
    with pytest.raises(
        RuntimeError, match=r"give_back: the engine has gradients of a loss times 1\.04858e\+06"
    ):
        engine.give_back()
    engine.step()
    assert engine.give_back()[0].weight.grad is None


def test_fp16_without_scaling_is_told_once(config, recwarn):
    said = settings(config, "host")
    del said["loss_scaling"]
    for scaling in (False, True):
        engine, optimizer, *_ = overspill.initialize(network(), said)
        scale = scaler()
        recwarn.clear()
        for i in range(2):
            loss = loss_of(engine, i)
            if scaling:
                scale.scale(loss).backward()
                scale.step(optimizer)
                scale.update()
            else:
                engine.backward(loss)
                engine.step()
        told = [w for w in recwarn if "without loss scaling" in str(w.message)]
        assert len(told) == (not scaling)
        assert all(w.filename == __file__ for w in told)
        engine.close()
