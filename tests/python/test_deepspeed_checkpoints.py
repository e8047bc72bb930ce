"""Checkpoints by DeepSpeed's calls: in part, without an engine, inside a step, as state dicts and 16-bit models."""

import random

import pytest
import torch
from deepspeed_scene import SCHEDULER, Tied, made, step
from torch import nn

from overspill import deepspeed, reading
from overspill.deepspeed import checkpoints, fragments
from overspill.deepspeed.modules import MODULES

pytestmark = pytest.mark.usefixtures("no_group")


def test_a_checkpoint_is_loaded_in_part(tmp_path):
    engine = made(scheduler=SCHEDULER)
    step(engine, 3)
    engine.save_checkpoint(tmp_path, client_state={"epoch": 1})
    weight = engine.weight(engine.module[0].weight)
    random.random()  # the generators are elsewhere now than where they were saved

    def loaded(**arguments):
        fresh = made(seed=1, scheduler=SCHEDULER)
        generators = torch.get_rng_state(), random.getstate()
        assert fresh.load_checkpoint(tmp_path, **arguments)[1] == {"epoch": 1}
        same = torch.equal(torch.get_rng_state(), generators[0]), random.getstate() == generators[1]
        assert same == ((True, True) if arguments else (False, False))
        assert torch.equal(fresh.weight(fresh.module[0].weight), weight)
        found = {
            "moment": bool(fragments.safe_get_full_optimizer_state(fresh.module[0].weight, "exp_avg").any()),
            "scheduler": fresh.lr_scheduler.last_batch_iteration,
            "steps": fresh.global_steps,
        }
        step(fresh)  # what was restored goes on
        fresh.destroy()
        return found

    whole = {"moment": True, "scheduler": engine.lr_scheduler.last_batch_iteration, "steps": 3}
    begun = made(scheduler=SCHEDULER)
    at_start = begun.lr_scheduler.last_batch_iteration
    assert whole["scheduler"] > at_start
    assert loaded() == whole
    assert loaded(load_lr_scheduler_states=False) == whole | {"scheduler": at_start}
    assert loaded(load_optimizer_states=False) == whole | {"moment": False}
    assert loaded(load_module_only=True) == {"moment": False, "scheduler": at_start, "steps": 0}
    step(begun)
    with pytest.raises(RuntimeError, match="not supported once the engine has made updates"):
        begun.load_checkpoint(tmp_path, load_module_only=True)
    with pytest.raises(TypeError, match="custom_load_fn is not supported"):
        begun.load_checkpoint(tmp_path, custom_load_fn=print)
    begun.destroy()
    engine.destroy()


def test_the_exact_weights_of_a_checkpoint_without_an_engine(tmp_path):
    engine = made(bf16={"enabled": True})
    step(engine, 2)
    engine.save_checkpoint(tmp_path, tag="one")
    exact = {name: engine.weight(each, torch.float32) for name, each in engine.module.named_parameters()}
    found = checkpoints.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert found.keys() == exact.keys() and all(torch.equal(found[name], exact[name]) for name in exact)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    checkpoints.load_state_dict_from_zero_checkpoint(plain, tmp_path, tag="one")
    assert torch.equal(plain[0].weight, exact["0.weight"])
    checkpoints.convert_zero_checkpoint_to_fp32_state_dict(
        tmp_path, tmp_path / "out", safe_serialization=True
    )
    assert [path.suffix for path in (tmp_path / "out").iterdir()].count(".safetensors") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "one", "out"]
    with pytest.raises(TypeError, match="safe_serialization=False is not supported"):
        checkpoints.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out")
    (tmp_path / "latest").unlink()
    with pytest.raises(ValueError, match="give the tag"):
        checkpoints.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    engine.destroy()


def test_a_state_dict_of_a_checkpoint_has_all_names_of_what_is_tied(tmp_path):
    torch.manual_seed(0)
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW"},
        "overspill": {"budget": {"host": "32MiB"}},
    }
    engine = deepspeed.initialize(model=Tied(), config=config)[0]
    engine.backward(engine(torch.arange(6)).square().mean())
    engine.step()
    engine.save_checkpoint(tmp_path)
    found = checkpoints.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    wanted = engine.state_dict()
    assert found.keys() == wanted.keys() and found["head.weight"] is found["embedding.weight"]
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    Tied().load_state_dict(found)  # strict
    engine.destroy()


def test_what_is_frozen_is_not_read_for_a_state_dict_without_it(monkeypatch):
    """As the Trainer asks for it where the model is one of PEFT."""
    torch.manual_seed(0)
    model = Tied()
    model.norm.requires_grad_(False)
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW"},
        "overspill": {"budget": {"host": "32MiB"}},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    whole, asked, read = engine.state_dict(), [], reading.read
    monkeypatch.setattr(
        reading, "read", lambda segment, out: (asked.append(segment.name), read(segment, out))
    )
    found = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    assert asked == ["embedding.weight"] and found["head.weight"] is found["embedding.weight"]
    buffers = {f"norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert found.keys() == {"embedding.weight", "head.weight"} | buffers
    assert all(torch.equal(found[name], whole[name]) for name in found)
    engine.destroy()


def test_a_tag_validation_that_is_none_and_a_folder_that_is_missing_are_refused():
    with pytest.raises(
        MODULES["deepspeed"]["DeepSpeedConfigError"], match="tag_validation = 'foo': one of FAIL"
    ):
        made(checkpoint={"tag_validation": "foo"})
    engine = made()
    with pytest.raises(ValueError, match="save_dir is missing"):
        engine.save_checkpoint(None)
    engine.destroy()


def test_a_checkpoint_inside_a_step_begins_it_anew(tmp_path):
    engine = made(gradient_accumulation_steps=2, train_batch_size=4)
    step(engine, 3)
    with pytest.warns(UserWarning, match="the gradients of its 1 micro-batches are not in the checkpoint"):
        engine.save_checkpoint(tmp_path)
    fresh = made(seed=1, gradient_accumulation_steps=2, train_batch_size=4)
    fresh.load_checkpoint(tmp_path)
    assert (fresh.micro_steps, fresh.global_steps) == (2, 1) and engine.micro_steps == 3
    step(fresh)
    assert not fresh.was_step_applied()
    step(fresh)
    assert fresh.was_step_applied()
    for each in (engine, fresh):
        each.destroy()


def test_the_16bit_model_is_a_file_where_it_has_a_name(tmp_path):
    engine = made(bf16={"enabled": True})
    engine.module[1].bias.requires_grad_(False)
    assert engine.save_16bit_model(tmp_path / "out", "model.pt")
    found = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    assert found.keys() == engine.module.state_dict().keys()
    assert all(
        torch.equal(found[name], engine.weight(each)) for name, each in engine.module.named_parameters()
    )
    assert engine.save_16bit_model(tmp_path / "out", exclude_frozen_parameters=True)
    found = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert sorted(found) == ["0.bias", "0.weight", "1.weight"]
    with pytest.raises(ValueError, match="is no name of a folder"):
        engine.save_16bit_model(tmp_path, "../model.pt")
    engine.destroy()


@pytest.mark.filterwarnings("ignore:overspill. the engine has no update")
def test_a_checkpoint_has_the_states_of_an_optimizer_that_runs_its_own_code(tmp_path):
    def fresh():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        config = {"train_batch_size": 2, "overspill": {"budget": {"host": "32MiB"}}}
        optimizer = torch.optim.RAdam(model.parameters(), lr=1e-2)
        return deepspeed.initialize(model=model, config=config, optimizer=optimizer)[0]

    straight, again = fresh(), fresh()
    step(straight, 3)
    straight.save_checkpoint(tmp_path, tag="three", client_state={"epoch": 1})
    path, client_state = again.load_checkpoint(tmp_path)
    assert path == str(tmp_path / "three") and client_state["epoch"] == 1
    step(straight, 3)
    step(again, 3)
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in straight.state_dict().items())
    assert again.optimizer.state[again.module[0].weight]["step"] == 6
    with pytest.raises(RuntimeError, match="nor with an optimizer that runs its own code"):
        again.load_checkpoint(tmp_path, load_optimizer_states=False)
