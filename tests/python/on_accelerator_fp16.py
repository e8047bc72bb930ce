"""Training in fp16 on an accelerator, beside plain fp32 masters under autocast and GradScaler. Run as on_accelerator.py
is."""

import itertools

import fp16_job
import pytest
import torch
from accelerator_scene import DEVICE, expect_on_device
from test_fp16 import STEPS, batch, network, plain_run, scaler
from torch import nn

import overspill

pytest_plugins = "accelerator_scene"
SCALING = {"enabled": True, "initial_scale_power": 20, "hysteresis": 1, "loss_scale_window": 3}


def loss_of(engine, i):
    x, y = (rows.to(engine.device) for rows in batch(i))
    return nn.functional.mse_loss(engine(x.half()).float(), y)


def settings(on_device, placement, **more):
    return on_device(placement, clipping=0.5, **more) | {"dtype": "fp16"}


@pytest.mark.parametrize("placement", ["host", "nvme", "device"])
def test_as_plain_fp32_masters_under_a_grad_scaler(placement, on_device):
    """Those train on the CPU."""
    expected = plain_run()
    assert sum(left_out for *_, left_out in expected) > 3, "overflows, also after the first steps"
    assert any(b > a for (_, a, _), (_, b, _) in itertools.pairwise(expected)), "grows"
    engine, *_ = overspill.initialize(network(), settings(on_device, placement) | {"loss_scaling": SCALING})
    expect_on_device(engine)
    assert engine._core.plan.as_dict()["units_on_device"] == (2 if placement == "device" else 0)
    for i, (loss, scale, left_out) in enumerate(expected):
        ours = loss_of(engine, i)
        engine.backward(ours)
        engine.step()
        assert ours.item() == pytest.approx(loss, abs=1e-3), i
        assert (engine.current_loss_scale, engine.last_step.skipped) == (scale, left_out), i
    engine.close()


@pytest.mark.parametrize("placement", ["host", "device"])
def test_a_grad_scaler_gives_the_bits_of_the_engines_own(placement, on_device):
    runs = []
    for own in (True, False):
        said = settings(on_device, placement, job=f"own{own}") | ({"loss_scaling": SCALING} if own else {})
        engine, optimizer, *_ = overspill.initialize(network(), said)
        scale, found = scaler(DEVICE), []
        for i in range(STEPS):
            loss = loss_of(engine, i)
            now = fp16_job.update(engine, optimizer, None if own else scale, loss)
            found.append((loss.item(), now, engine.last_step.skipped))
        runs.append((found, engine.state_dict()))
        engine.close()
    assert runs[0][0] == runs[1][0] and any(skipped for *_, skipped in runs[0][0])
    for name, value in runs[0][1].items():
        assert torch.equal(value, runs[1][1][name]), name


@pytest.mark.parametrize("placement", ["host", "device"])
def test_updates_are_those_of_the_loss(placement, on_device):
    """SGD, which follows the gradient's size; in fp32, where a power of two costs no bit."""
    runs = []
    for scale in (1.0, 2.0**10):
        said = on_device(placement, section={"type": "SGD", "lr": 1e-2, "momentum": 0.9}, job=f"scale{scale}")
        said["loss_scaling"] = {"enabled": True, "loss_scale": scale}
        engine, *_ = overspill.initialize(network(), said)
        norms = []
        for i in range(3):
            x, y = (rows.to(engine.device) for rows in batch(i))
            engine.backward(nn.functional.mse_loss(engine(x), y))
            engine.step()
            norms.append(engine.last_step.norm)
        runs.append((norms, engine.state_dict()))
        engine.close()
    assert runs[0][0] == runs[1][0]
    for name, value in runs[0][1].items():
        assert torch.equal(value, runs[1][1][name]), name
