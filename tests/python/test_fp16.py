"""Training in fp16: weights in fp16 with fp32 masters, losses scaled by the engine (`loss_scaling`) or by torch's
GradScaler, beside plain fp32 masters under autocast and GradScaler."""

import copy
import itertools
import json
import math
import re
import warnings

import fp16_job
import launch
import pytest
import torch
from torch import nn

import overspill
from overspill import framework, loss_scaling
from overspill.cli import main
from overspill.config import LossScaling
from overspill.deepspeed import fragments

STEPS = 14


def network(width=32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 4))


def batch(i):
    generator = torch.Generator().manual_seed(i)
    return torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)


def settings(config, placement, **more):
    scaling = {"enabled": True, "initial_scale_power": 20, "hysteresis": 1, "loss_scale_window": 3}
    made = config(placement, clipping=0.5, **more)
    return made | {"loss_scaling": scaling, "dtype": "fp16"}


def scaler(device="cpu"):
    return torch.amp.GradScaler(device, init_scale=2.0**20, growth_interval=3)


def plain_run():
    """fp32 masters under autocast: losses, scales and the steps that were left out."""
    model, scale = network(), scaler()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    found = []
    for i in range(STEPS):
        x, y = batch(i)
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        loss = nn.functional.mse_loss(out.float(), y)
        optimizer.zero_grad()
        scale.scale(loss).backward()
        scale.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        before = scale.get_scale()
        scale.step(optimizer)
        scale.update()
        found.append((loss.item(), scale.get_scale(), scale.get_scale() < before))
    return found


def loss_of(engine, i):
    x, y = batch(i)
    return nn.functional.mse_loss(engine(x.half()).float(), y)


@pytest.mark.parametrize("placement", ["host", "half", "nvme"])
def test_as_plain_fp32_masters_under_a_grad_scaler(placement, config):
    expected = plain_run()
    assert sum(left_out for *_, left_out in expected) > 3, "overflows, also after the first steps"
    assert any(b > a for (_, a, _), (_, b, _) in itertools.pairwise(expected)), "grows"
    engine, *_ = overspill.initialize(network(), settings(config, placement))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a step that is left out is no news here
        for i, (loss, scale, left_out) in enumerate(expected):
            ours = loss_of(engine, i)
            engine.backward(ours)
            engine.step()
            assert ours.item() == pytest.approx(loss, abs=1e-3)
            assert (engine.current_loss_scale, engine.last_step.skipped) == (scale, left_out)
    weight = next(engine.module.parameters())
    assert weight.dtype is torch.float16
    master = engine.weight(weight, torch.float32)
    assert torch.equal(master.half(), engine.weight(weight)) and not torch.equal(
        master, master.half().float()
    )
    engine.close()


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_a_grad_scaler_gives_the_bits_of_the_engines_own(dtype, config):
    """Without unscale_, which torch refuses for gradients in fp16."""
    runs = []
    for own in (True, False):
        said = settings(config, "host", job=f"own{own}") | {"dtype": dtype}
        if not own:
            del said["loss_scaling"]
        engine, optimizer, *_ = overspill.initialize(network(), said)
        scale, found = scaler(), []
        for i in range(STEPS):
            x, y = batch(i)
            with torch.autocast("cpu", torch.float16, enabled=dtype == "fp32"):
                out = engine(x if dtype == "fp32" else x.half())
            loss = nn.functional.mse_loss(out.float(), y)
            now = fp16_job.update(engine, optimizer, None if own else scale, loss)
            found.append((loss.item(), now, engine.last_step.skipped))
        runs.append((found, engine.state_dict()))
        engine.close()
    assert runs[0][0] == runs[1][0] and any(skipped for *_, skipped in runs[0][0])
    for name, value in runs[0][1].items():
        assert torch.equal(value, runs[1][1][name]), name


def test_two_ranks_scale_alike(tmp_path):
    one, other = (json.loads(process.out) for process in launch.run(2, "fp16_job.py", tmp_path))
    for rank in one, other:
        assert rank["engine"] == rank["scaler"]
        skipped = [skipped for *_, skipped in rank["engine"]["steps"]]
        assert any(skipped) and not all(skipped)
    assert one["engine"]["weights"] == other["engine"]["weights"]
    assert [step[1:] for step in one["engine"]["steps"]] == [step[1:] for step in other["engine"]["steps"]]


def test_a_grad_scaler_reads_no_gradients(config, monkeypatch):
    """It asks the engine, in place of copying all gradients; and of the script's own optimizer object, which has the
    protocol only while an engine has it."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    said = config("nvme")
    del said["optimizer"]
    engine, *_ = overspill.initialize(model, said, optimizer)
    scale = scaler()
    x, y = batch(0)
    scale.scale(nn.functional.mse_loss(engine(x), y)).backward()
    with monkeypatch.context() as patch:
        patch.setattr(overspill.gradients.Gradients, "read", lambda *_: pytest.fail("a gradient was read"))
        scale.step(optimizer)
    scale.update()
    assert not engine.last_step.skipped and engine.last_step.norm < 100
    engine.give_back()
    assert not hasattr(optimizer, loss_scaling.PROTOCOL)


@pytest.mark.parametrize("mine", [True, False], ids=["the_scripts_own", "the_engines"])
def test_a_grad_scaler_may_step_either_object(mine, config):
    """SGD, which follows the gradient's size."""
    found = []
    for scale in (2.0**10, 1.0):
        model = network()
        own = torch.optim.SGD(model.parameters(), lr=1e-2)
        said = config("host", job=f"scale{scale}")
        del said["optimizer"]
        engine, ours, *_ = overspill.initialize(model, said, own)
        grad_scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        x, y = batch(0)
        grad_scaler.scale(nn.functional.mse_loss(engine(x), y)).backward()
        grad_scaler.step(own if mine else ours)
        grad_scaler.update()
        found.append((engine.last_step.norm, engine.state_dict()))
        engine.close()
    assert found[0][0] == found[1][0]
    for name, weight in found[0][1].items():
        assert torch.equal(weight, found[1][1][name]), name


def test_a_fixed_scale_tells_of_steps_that_are_left_out(config):
    said = settings(config, "host")
    said["loss_scaling"] = {"enabled": True, "loss_scale": 128.0}
    engine, *_ = overspill.initialize(network(), said)
    engine.backward(loss_of(engine, 0) * math.inf)
    with pytest.warns(UserWarning, match="a step is skipped"):
        engine.step()
    assert engine.last_step.skipped and engine.current_loss_scale == 128
    engine.close()


def test_what_a_run_goes_on_with(config, tmp_path):
    said = settings(config, "half")
    engine, *_ = overspill.initialize(network(), copy.deepcopy(said))
    for i in range(6):
        engine.backward(loss_of(engine, i))
        engine.step()
    engine.save_checkpoint(tmp_path / "saved")
    going, states = engine.current_loss_scale, []
    for each in (engine, None):
        if each is None:
            engine.close()
            each, *_ = overspill.initialize(network(), copy.deepcopy(said))
            each.load_checkpoint(tmp_path / "saved")
            assert each.current_loss_scale == going != 2.0**20
        for i in range(6, 12):
            each.backward(loss_of(each, i))
            each.step()
        states.append((each.current_loss_scale, each.state_dict()))
    assert states[0][0] == states[1][0]
    for name, value in states[0][1].items():
        assert torch.equal(value, states[1][1][name]), name
    each.close()


def test_a_scaler_that_a_checkpoint_cannot_have_had_is_refused(config, tmp_path, monkeypatch):
    engine, *_ = overspill.initialize(network(), settings(config, "host"))
    course = loss_scaling.Course(-1.0, 0, 1)
    monkeypatch.setattr(loss_scaling.LossScaler, "course", course)
    engine.save_checkpoint(tmp_path / "saved")
    with pytest.raises(overspill.CheckpointError, match="loss_scaling cannot be read"):
        engine.load_checkpoint(tmp_path / "saved")
    engine.close()


def test_gradients_are_those_of_the_loss(config):
    engine, *_ = overspill.initialize(network(), settings(config, "host"))
    engine._residency.gradients.scaler.scale = 1024.0
    loss = loss_of(engine, 0)
    engine.backward(loss)
    plain = network().half()
    nn.functional.mse_loss(plain(batch(0)[0].half()).float(), batch(0)[1]).backward()
    for ours, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(engine.grad(ours), theirs.grad.float(), rtol=2e-3, atol=1e-5)
        with pytest.raises(
            RuntimeError, match=r"reading the gradient of .*: it is that of a loss times 1024"
        ):
            _ = ours.grad
        with pytest.raises(RuntimeError, match="setting the gradient of"):
            ours.grad = torch.zeros_like(theirs)
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item()
    assert engine.clip_grad_norm_(norm / 2).item() == pytest.approx(norm, rel=1e-3)
    engine.step()
    assert engine.last_step.norm == pytest.approx(norm, rel=1e-3)
    assert engine.last_step.clip == pytest.approx(0.5, rel=1e-3)
    engine.close()


def test_a_backward_that_does_not_scale_is_refused(config):
    engine, *_ = overspill.initialize(network(), settings(config, "host"))
    with pytest.raises(RuntimeError, match=r"got a gradient from a backward that is not engine\.backward"):
        loss_of(engine, 0).backward()
    engine.zero_grad()
    engine.backward(loss_of(engine, 0))
    with pytest.raises(RuntimeError, match=r"a step by torch\.amp\.GradScaler, where loss_scaling"):
        scale = scaler()
        scale.scale(torch.zeros(()))
        scale.step(engine.optimizer)
    engine.close()


def test_an_overflow_at_the_least_scale_is_an_error(config):
    said = settings(config, "host")
    said["loss_scaling"] |= {"initial_scale_power": 1, "min_loss_scale": 2.0}
    engine, *_ = overspill.initialize(network(), said)
    engine.backward(loss_of(engine, 0) * math.inf)
    with pytest.raises(
        overspill.NonFiniteError, match=r"the least that loss_scaling\.min_loss_scale allows, 2:"
    ):
        engine.step()
    assert engine.last_step.skipped and engine.current_loss_scale == 2
    engine.close()


@pytest.mark.parametrize(
    "change, said",
    [
        ({"on_nonfinite": "raise"}, 'on_nonfinite = "raise"'),
        ({"optimizer": torch.optim.Adafactor}, "Adafactor makes its steps with its own code"),
        ({"several": True}, "a list of optimizers"),
        ({"model": torch.float64}, "AdamW makes its steps with its own code"),
    ],
)
def test_what_would_use_scaled_gradients_is_refused(change, said, config):
    model = network().to(change.get("model", torch.float32))
    meant = settings(config, "host", on_nonfinite=change.get("on_nonfinite", "skip"))
    del meant["dtype"]
    optimizer = None
    if "optimizer" in change:
        optimizer = change["optimizer"](model.parameters())
    if "several" in change:
        optimizer = [torch.optim.AdamW(part.parameters()) for part in (model[0], model[2])]
        meant |= {"gradient_clipping": 0.0}
    if optimizer is not None:
        del meant["optimizer"]
    with pytest.raises(ValueError, match=rf"loss_scaling\.enabled: .*{said}"):
        overspill.initialize(model, meant, optimizer)


def test_a_step_that_ctrl_c_kept_from_counting_counts_with_the_next_backward(config, monkeypatch):
    engine, *_ = overspill.initialize(network(), settings(config, "host"))
    engine.backward(loss_of(engine, 0) * math.inf)

    def struck(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loss_scaling.LossScaler, "follow", struck)
        engine.step()
    assert engine.last_step.skipped and engine.current_loss_scale == 2.0**20
    engine.zero_grad()
    engine.backward(loss_of(engine, 1) * 2.0**-10)
    assert engine.current_loss_scale == 2.0**19
    engine.step()
    assert not engine.last_step.skipped and engine.current_loss_scale == 2.0**19
    engine.close()


def by_deepspeeds_rule(settings, overflows):
    """DeepSpeed 0.19's DynamicLossScaler.update_scale, as its documentation has it."""
    scale, since, left = 2.0**settings.initial_scale_power, -1, settings.hysteresis
    for i, overflow in enumerate(overflows):
        if overflow:
            if settings.hysteresis == 1 or left == 1:
                scale = max(scale / 2, settings.min_loss_scale)
            else:
                left -= 1
            since = i
        else:
            if settings.consecutive_hysteresis:
                left = settings.hysteresis
            if (i - since) % settings.loss_scale_window == 0:
                left = settings.hysteresis
                scale *= 2
        yield scale


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_the_scale_follows_deepspeeds_rule(hysteresis, consecutive):
    said = LossScaling(
        enabled=True, hysteresis=hysteresis, consecutive_hysteresis=consecutive, loss_scale_window=4
    )
    generator = torch.Generator().manual_seed(hysteresis)
    overflows = (torch.rand(300, generator=generator) < 0.3).tolist()
    ours = loss_scaling.LossScaler(said)
    for overflow, scale in zip(overflows, by_deepspeeds_rule(said, overflows), strict=True):
        ours.stepped(overflow)
        assert ours.scale == scale


def test_deepspeeds_json(no_group):
    said = {
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "hysteresis": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "overspill": {"budget": {"host": "64MiB"}},
    }
    engine, optimizer, *_ = overspill.deepspeed.initialize(model=network(), config=said)
    assert engine.fp16_enabled() and engine.dynamic_loss_scale() and engine.initial_dynamic_scale() == 4096
    assert optimizer.loss_scale == optimizer.cur_scale == 4096 and optimizer.needs_scaler()
    engine.backward(loss_of(engine, 0))
    engine.step()
    assert not optimizer.overflow
    engine.backward(loss_of(engine, 1))
    weight = next(engine.module.parameters())
    gradient = fragments.safe_get_full_grad(weight)
    fragments.safe_set_full_grad(weight, 2 * gradient)
    torch.testing.assert_close(fragments.safe_get_full_grad(weight), 2 * gradient, rtol=1e-3, atol=1e-6)
    with pytest.raises(RuntimeError, match=r"call engine\.backward"):
        engine.scale(loss_of(engine, 1))
    engine.close()
    both = said | {"bf16": {"enabled": True}}
    with pytest.raises(ValueError, match=r"fp16\.enabled = True beside bf16\.enabled"):
        overspill.deepspeed.initialize(model=network(), config=both)


def test_frameworks_that_call_backward_themselves_are_refused():
    with pytest.raises(overspill.ConfigError, match=r"loss_scaling\.enabled: Lightning calls loss\.backward"):
        framework.settings({"loss_scaling": {"enabled": True}}, "Lightning", {}, {})


@pytest.mark.parametrize(
    "said, key",
    [({"dtype": "fp16"}, 'dtype = "fp16"'), ({"fp16": {"enabled": True}}, r"fp16\.enabled = true")],
)
@pytest.mark.parametrize("command", ["train", "plan"])
def test_the_commands_refuse_it(command, said, key, on_disk, tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(said))
    out = ["--out", str(tmp_path / "out")] if command == "train" else ["--model", str(on_disk.model)]
    assert main([command, "--config", str(file), *out]) != 0
    assert re.search(key + ": the commands train in bf16 or fp32", capsys.readouterr().err)
