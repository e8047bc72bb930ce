"""Checkpoints of a run in fp16: merged, exported, converted on opening, taken over from elsewhere, with adapters."""

import copy

import joined_job
import launch
import pytest
import torch
from safetensors.torch import load_file
from test_dcp_export import model_for, train
from test_fp16 import loss_of, network, settings
from test_joined import made
from tiny import SMALL
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import overspill
from overspill import deepspeed, export_dcp, loss_scaling, merge

IDS = torch.arange(24).view(2, 12) % 64


def steps(engine, numbers):
    losses = []
    for i in numbers:
        loss = loss_of(engine, i)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def llama(config, placement="half", **options):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL, **options), dtype=torch.float16)
    engine, *_ = overspill.initialize(model, config(placement) | {"loss_scaling": joined_job.SCALING})
    for _ in range(3):
        engine.backward(engine(input_ids=IDS, labels=IDS).loss)
        engine.step()
    return engine


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_merged_and_exported_folders_have_the_masters_rounded_once(dtype, config, tmp_path):
    engine = llama(config)
    masters = {n: engine.weight(p, torch.float32) for n, p in engine.module.named_parameters()}
    wide = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    engine.save_checkpoint(tmp_path / "saved")
    engine.save_pretrained(tmp_path / "own", dtype=wide)
    engine.module.config.save_pretrained(tmp_path / "config")
    merge(tmp_path / "saved", tmp_path / "merged", dtype=dtype, model=tmp_path / "config")
    engine.close()
    twice = 0
    for folder in ("own", "merged"):
        found = load_file(tmp_path / folder / "model.safetensors")
        for name, master in masters.items():
            assert torch.equal(found[name], master.to(wide)), (folder, name)
            twice += (master.half().to(wide) != found[name]).sum().item()
        again = AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=wide)
        assert torch.isfinite(again(IDS).logits).all()
    assert twice > 0, "rounding by fp16 shows"


def test_save_pretrained_by_itself_writes_fp16(config, tmp_path):
    engine = llama(config)
    expected = engine.state_dict()
    engine.save_pretrained(tmp_path / "own")
    engine.close()
    found = load_file(tmp_path / "own/model.safetensors")
    for name, value in found.items():
        assert value.dtype is torch.float16 and torch.equal(value, expected[name])


def test_dcp_has_the_masters_and_training_goes_on_from_it(start, tmp_path):
    engine = start(model_for("fp32").half(), placement="nvme")
    train(engine, range(3))
    engine.save_checkpoint(tmp_path / "saved")
    export_dcp(tmp_path / "saved", tmp_path / "dcp")
    expected = train(engine, range(3, 6))
    again = start(model_for("fp32").half(), placement="half")
    again.load_checkpoint(tmp_path / "dcp")
    assert train(again, range(3, 6)) == expected


@pytest.mark.parametrize("kind", ["frozen", "trained"])
@pytest.mark.parametrize("there", [torch.float32, torch.bfloat16])
def test_a_checkpoint_of_another_dtype_is_loaded_by_name(kind, there, config, tmp_path):
    """For transfer: weights alone, from a run in another dtype."""
    engine, *_ = overspill.initialize(network().to(there), config("nvme", job="there"))
    engine.save_checkpoint(tmp_path / "saved")
    exact = {n: engine.weight(p).float() for n, p in engine.module.named_parameters()}
    engine.close()
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).half()
    model[0].requires_grad_(kind == "trained")
    engine, *_ = overspill.initialize(model, config("half"))
    engine.load_checkpoint(tmp_path / "saved", states="new")
    for name, p in model.named_parameters():
        assert torch.equal(engine.weight(p), exact[name].half()), name
    assert torch.equal(engine.weight(model[2].weight, torch.float32), exact["2.weight"])
    engine.close()


def test_adapters_over_a_frozen_base(config, tmp_path):
    """They train in fp32, as PEFT makes them, over a base in fp16, whose activations scale with the loss."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed (requirements-dev.txt)")
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL), dtype=torch.float16)
    torch.manual_seed(1)
    adapter = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"])
    model = peft.get_peft_model(base, adapter)
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    plain = copy.deepcopy(model)
    engine, *_ = overspill.initialize(model, config("half") | {"loss_scaling": joined_job.SCALING})
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    scale = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    for _ in range(4):
        loss, theirs = (each(input_ids=IDS, labels=IDS).loss for each in (engine, plain))
        assert loss.item() == pytest.approx(theirs.item(), abs=2e-3)
        engine.backward(loss)
        engine.step()
        scale.scale(theirs).backward()
        scale.step(optimizer)
        scale.update()
        optimizer.zero_grad()
    assert engine.current_loss_scale == scale.get_scale() == 2.0**10
    for name, weight in frozen.items():
        assert torch.equal(engine.weight(model.get_parameter(name)), weight), name
    engine.close()


# ---- the scale goes with the run


def test_parts_that_are_joined_bring_their_scale(config, tmp_path):
    (tmp_path / "llama").mkdir()
    made("llama", tmp_path / "llama/base", torch.float16)
    launch.run(2, "joined_job.py", tmp_path, "llama:torch:2:")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "llama/base", dtype="auto")
    engine, *_ = overspill.initialize(
        model, config() | joined_job.TRAINING | {"loss_scaling": joined_job.SCALING}
    )
    engine.load_checkpoint([tmp_path / "llama/of1", tmp_path / "llama/of0"])
    assert engine.current_loss_scale == 2.0**9
    engine.close()


def test_deepspeeds_load_without_states_leaves_the_scale(no_group, tmp_path):
    said = {
        "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "overspill": {"budget": {"host": "64MiB"}},
    }
    engine, *_ = deepspeed.initialize(model=network(), config=said)
    steps(engine, range(2))
    assert engine.current_loss_scale == 2.0**9
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    for with_states in (True, False):
        engine, *_ = deepspeed.initialize(model=network(), config=said)
        engine.load_checkpoint(tmp_path, load_optimizer_states=with_states)
        assert engine.current_loss_scale == 2.0 ** (9 if with_states else 8)
        engine.destroy()


def test_deepspeeds_init_makes_weights_in_fp16(no_group):
    with deepspeed.zero.Init(config_dict_or_path={"fp16": {"enabled": True}}):
        assert nn.Linear(2, 2).weight.dtype is torch.float16
    assert nn.Linear(2, 2).weight.dtype is torch.float32


def test_a_save_after_ctrl_c_has_the_scale_of_after(config, tmp_path, monkeypatch):
    engine, *_ = overspill.initialize(network(), settings(config, "host"))
    engine.backward(loss_of(engine, 0) * float("inf"))

    def struck(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loss_scaling.LossScaler, "follow", struck)
        engine.step()
    engine.save_checkpoint(tmp_path / "saved")
    assert engine.current_loss_scale == 2.0**19
    engine.zero_grad()
    engine.backward(loss_of(engine, 0) * float("inf"))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loss_scaling.LossScaler, "follow", struck)
        engine.step()
    engine.load_checkpoint(tmp_path / "saved")
    engine.backward(loss_of(engine, 1) * 2.0**-10)
    assert engine.current_loss_scale == 2.0**19, "what was before the load does not count after it"
    engine.close()


@pytest.mark.parametrize(
    "course",
    [
        {"scale": "1024", "good": 0, "left": 1},
        {"scale": True, "good": 0, "left": 1},
        {"scale": 1024.0, "good": 2**63, "left": 1},
        {"scale": 1024.0, "good": 0, "left": 0},
        {"scale": float("nan"), "good": 0, "left": 1},
        {"scale": 1024.0, "good": True, "left": 1},
    ],
)
def test_a_course_that_no_scaler_has_been_on(course):
    with pytest.raises(ValueError, match="a scale"):
        loss_scaling.Course.from_json(course)
