"""What scripts call of DeepSpeed beside the engine's steps: weights and states by hand, parts of a checkpoint, small
helpers, and the names that are refused."""

import importlib.machinery
import logging
import random
import re
import sys
import types
from argparse import Namespace

import pytest
import torch
from torch import nn

from overspill import deepspeed, reading
from overspill.config import ConfigError
from overspill.deepspeed import checkpoints, fragments, leaves, lr_schedules, optimizers, parts, zero_params
from overspill.deepspeed.accelerator import get_accelerator
from overspill.deepspeed.finder import Finder
from overspill.deepspeed.modules import MODULES
from overspill.deepspeed.refused import NotSupported

PARAMS = {"lr": 1e-2, "weight_decay": 0.0}


@pytest.fixture(autouse=True)
def no_group():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def made(seed=0, **more):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": PARAMS},
        "overspill": {"budget": {"host": "32MiB"}},
        **more,
    }
    return deepspeed.initialize(model=model, config=config)[0]


def step(engine, count=1):
    for number in range(count):
        x = torch.full((2, 8), number + 1.0, dtype=engine.module[0].weight.dtype)
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()


def test_a_weight_that_is_set_is_seen_where_it_was_used_right_before(tmp_path):
    placed = {"budget": {"host": "32MiB", "nvme": [str(tmp_path)]}, "engine": {"placement": "nvme"}}
    engine = made(overspill=placed)
    weight, bias = engine.module[0].weight, engine.module[0].bias
    assert weight.norm() > 0
    bias.data.fill_(7.0)
    fragments.safe_set_full_fp32_param(weight, torch.full((8, 8), 3.0))
    assert weight.norm() == 24.0
    weight.data.mul_(2.0)
    assert torch.equal(engine.weight(weight), torch.full((8, 8), 6.0))
    assert torch.equal(engine.weight(bias), torch.full((8,), 7.0))


def test_an_exact_weight_that_is_set_is_the_one_that_counts():
    engine = made(bf16={"enabled": True})
    weight = engine.module[0].weight
    value = torch.randn(8, 8) + 1e-4
    fragments.safe_set_full_fp32_param(weight, value)
    assert torch.equal(fragments.safe_get_full_fp32_param(weight), value)
    assert torch.equal(engine.weight(weight), value.bfloat16())
    x = torch.randn(2, 8).bfloat16()
    shown = nn.functional.linear(x, value.bfloat16(), engine.weight(engine.module[0].bias))
    assert torch.equal(engine.module[0](x), shown)
    with pytest.raises(ValueError, match=r"0.weight is \(8, 8\), and the value \(3,\)"):
        fragments.safe_set_full_fp32_param(weight, torch.zeros(3))
    with pytest.raises(ValueError, match="no engine has this parameter"):
        fragments.safe_set_full_fp32_param(nn.Parameter(torch.zeros(3)), torch.zeros(3))
    engine.destroy()


def test_states_and_gradients_that_are_set_make_the_update():
    engine, same = made(), made()
    for each in (engine, same):
        step(each, 2)
    weights = engine.module[0].weight, same.module[0].weight
    for key in ("exp_avg", "exp_avg_sq"):
        state = fragments.safe_get_full_optimizer_state(weights[1], key)
        fragments.safe_set_full_optimizer_state(weights[0], torch.zeros_like(state), key)
        assert not fragments.safe_get_full_optimizer_state(weights[0], key).any()
        fragments.safe_set_full_optimizer_state(weights[0], state, key)
    with pytest.raises(ValueError, match="has no state 'momentum': it has exp_avg, exp_avg_sq"):
        fragments.safe_set_full_optimizer_state(weights[0], torch.zeros(8, 8), "momentum")
    x = torch.full((2, 8), 3.0)
    same.backward(same(x).square().mean())
    engine.backward(engine(x).abs().mean())  # another loss, whose gradients are replaced
    for one, other in zip(engine.module.parameters(), same.module.parameters(), strict=True):
        fragments.safe_set_full_grad(one, fragments.safe_get_full_grad(other))
    for each in (engine, same):
        each.step()
    assert torch.equal(engine.weight(weights[0]), same.weight(weights[1]))
    engine.backward(engine(x).square().mean())
    before = fragments.safe_get_full_grad(weights[0])
    fragments.safe_update_full_grad_vectorized([weights[0]], lambda gradient, _: gradient * 2)
    assert torch.equal(fragments.safe_get_full_grad(weights[0]), before * 2)
    for each in (engine, same):
        each.destroy()


SCHEDULER = {
    "type": "WarmupLR",
    "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 8, "warmup_type": "linear"},
}


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


class Tied(nn.Module):
    """A weight and a whole module, with a buffer, by two names each."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = self.same = nn.BatchNorm1d(4)
        self.register_buffer("passing", torch.zeros(1), persistent=False)

    def forward(self, x):
        return self.head(self.same(self.embedding(x)))


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


def test_backward_passes_that_are_coalesced_are_one_step():
    engine, plain = made(zero_optimization={"stage": 2}), made()
    x = torch.ones(2, 8)
    with pytest.raises(NotImplementedError, match="stage 1, 2 or 3"), plain.coalesce_grad_reduction():
        pass
    with pytest.raises(AssertionError, match="incompatible with gradient part"), engine.no_sync():
        pass
    with engine.coalesce_grad_reduction():
        for scale in (0.25, 0.75):
            engine.scale(engine(x).square().mean() * scale).backward()
        with pytest.raises(AssertionError, match="inside coalesce_grad_reduction"):
            engine.step()
        with pytest.raises(AssertionError), engine.coalesce_grad_reduction():
            pass
    with pytest.raises(AssertionError, match="scalar tensor with grad_fn"):
        engine.scale(engine(x))
    engine.step()
    plain.backward(plain(x).square().mean())
    plain.step()
    torch.testing.assert_close(engine.weight(engine.module[0].weight), plain.weight(plain.module[0].weight))
    engine.empty_partition_cache()
    engine.offload_states(device=parts.OffloadDeviceEnum.cpu)
    engine.reload_states()
    with pytest.raises(ValueError, match="cpu is expected"):
        engine.offload_states(device="nvme")
    for each in (engine, plain):
        each.destroy()


def test_optimizers_have_deepspeeds_signatures():
    weights = [nn.Parameter(torch.zeros(2))]
    fused = optimizers.fused_adam(weights, 1e-3, True, (0.9, 0.99), 1e-8, False, 0.5)
    assert type(fused) is torch.optim.Adam and fused.defaults["weight_decay"] == 0.5
    assert type(optimizers.fused_adam(weights, adam_w_mode=True)) is torch.optim.AdamW
    assert type(optimizers.cpu_adam(weights, adamw_mode=False)) is torch.optim.Adam
    fused_kind, lion = MODULES["deepspeed.ops.adam"]["FusedAdam"], MODULES["deepspeed.ops.lion"]["FusedLion"]
    assert isinstance(fused_kind(weights), fused_kind) and not isinstance(lion(weights), fused_kind)
    engine = made()
    assert isinstance(engine.optimizer, fused_kind) and not isinstance(engine.optimizer, lion)
    engine.destroy()
    lions = MODULES["deepspeed.ops.lion"]
    for name in ("DeepSpeedCPULion", "FusedLion"):
        assert lions[name](weights).defaults["betas"] == (
            0.9,
            0.999,
        )  # the paper, and overspill.optim, have 0.99
    assert lions["FusedLion"](weights, set_grad_none=False).defaults["lr"] == 1e-3
    for kind in (optimizers.cpu_adagrad, optimizers.cpu_lion, optimizers.cpu_adam):
        assert isinstance(kind(weights, fp32_optimizer_states=True), torch.optim.Optimizer)
        with pytest.raises(ValueError, match=r'\(fp32_optimizer_states=False\) is not .*"format": "compact"'):
            kind(weights, fp32_optimizer_states=False)
    for wrong in ({"amsgrad": True}, {"bias_correction": False}):
        with pytest.raises(ValueError, match="not supported"):
            optimizers.fused_adam(weights, **wrong)
        with pytest.raises(ValueError, match="not supported"):
            optimizers.cpu_adam(weights, **wrong)


def test_leaves_are_marked_by_class_name_and_suffix():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    assert leaves.set_z3_leaf_modules(model, [nn.ReLU, "torch.nn.modules.linear.Linear"]) == [
        model[0],
        *model[1],
    ]
    assert leaves.get_z3_leaf_modules(model) == [model[0], *model[1]]
    assert leaves.unset_z3_leaf_modules(model, ["Linear"]) == [model[0], model[1][1]]
    assert leaves.set_z3_leaf_modules_by_name(model, ["1.1", "2"], raise_if_not_found=False) == (
        [model[1][1]],
        ["2"],
    )
    assert leaves.set_z3_leaf_modules_by_suffix(model, ["0"])[0] == [model[0], model[1][0]]
    with pytest.raises(ValueError, match="has no module of"):
        leaves.set_z3_leaf_modules(model, [nn.Bilinear])
    with pytest.raises(ValueError, match="no module named 7"):
        leaves.set_z3_leaf_modules_by_name(model, ["7"])


def test_the_json_marks_leaves():
    leaf = {"classes": "torch.nn.modules.linear.Linear", "name_suffixes": ["0"], "names": ["1"]}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    config = {
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": 3, "leaf_module": leaf},
        "overspill": {"budget": {"host": "32MiB"}},
    }
    deepspeed.initialize(model=model, config=config)[0].destroy()
    assert leaves.get_z3_leaf_modules(model) == list(model)
    config["zero_optimization"]["leaf_module"] = {"names": ["7"]}
    with pytest.raises(ValueError, match="no module named 7"):
        deepspeed.initialize(model=nn.Linear(2, 2), config=config)


def test_a_tag_validation_that_is_none_and_a_folder_that_is_missing_are_refused():
    with pytest.raises(
        MODULES["deepspeed"]["DeepSpeedConfigError"], match="tag_validation = 'foo': one of FAIL"
    ):
        made(checkpoint={"tag_validation": "foo"})
    engine = made()
    with pytest.raises(ValueError, match="save_dir is missing"):
        engine.save_checkpoint(None)
    engine.destroy()


def test_small_helpers(caplog):
    loader = parts.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    with caplog.at_level(logging.INFO, "overspill.deepspeed"):
        parts.log_dist("said", ranks=[7])
    assert "[Rank -1] said" in caplog.text
    assert parts.required_torch_version(min_version=2.0) and not parts.required_torch_version(
        max_version="1.13"
    )
    accelerator = get_accelerator()
    assert accelerator.device_count() >= 1 and torch.bfloat16 in accelerator.supported_dtypes()
    with pytest.raises(AttributeError, match=r"get_accelerator\(\).Stream is not supported: use torch.cuda"):
        _ = accelerator.Stream
    with caplog.at_level(logging.INFO, "overspill.deepspeed"):
        parts.see_memory_usage("here")
        parts.see_memory_usage("there", force=True)
    # How much it is depends on what else has run in this process.
    assert re.search(r"there: \d+\.\d+ GiB", caplog.text) and not re.search(r"\bhere:", caplog.text)
    with pytest.raises(AssertionError, match="model is missing"):
        deepspeed.initialize(config={})


def test_a_schedule_of_another_optimizer_is_stepped_and_drives_that_one_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    other = torch.optim.SGD(model.parameters(), lr=8.0)
    schedule = torch.optim.lr_scheduler.StepLR(other, 1, gamma=0.5)
    config = {
        "optimizer": {"type": "Adam", "params": {"lr": 0.25}},
        "scheduler": SCHEDULER,
        "overspill": {"budget": {"host": "32MiB"}},
    }
    with pytest.warns(
        UserWarning, match="made on another optimizer than the engine's: as in DeepSpeed it is"
    ):
        engine, optimizer, _, found = deepspeed.initialize(model=model, config=config, lr_scheduler=schedule)
    assert found is schedule is engine.lr_scheduler
    step(engine, 2)
    assert other.param_groups[0]["lr"] == 2.0 and optimizer.param_groups[0]["lr"] == 0.25
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


def test_a_step_without_managed_accumulation_always_updates():
    engine = made(managed_gradient_accumulation=False, gradient_accumulation_steps=2, train_batch_size=4)
    same = made()
    x = torch.ones(2, 8)
    for scale in (0.5, 0.5, 2.0):
        engine.backward(engine(x).square().mean() * scale)
    same.backward(same(x).square().mean() * 1.5)  # each is halved
    for each in (engine, same):
        each.step()
        assert each.was_step_applied()
    torch.testing.assert_close(engine.weight(engine.module[0].weight), same.weight(same.module[0].weight))
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (1, 3, 6)
    assert not engine.managed_gradient_accumulation() and same.managed_gradient_accumulation()
    for call in (
        lambda: engine.set_gradient_accumulation_boundary(True),
        engine.coalesce_grad_reduction().__enter__,
    ):
        with pytest.raises(AssertionError, match="is not supported with managed_gradient_accumulation=False"):
            call()
    for each in (engine, same):
        each.destroy()
    with pytest.raises(AssertionError, match="supports ZeRO overlap_comm only with ZeRO stage 2"):
        made(managed_gradient_accumulation=False, zero_optimization={"stage": 1, "overlap_comm": True})
    with pytest.raises(
        AssertionError, match="must be a multiple of nccl_start_alignment_factor, 2, and is 1001"
    ):
        made(zero_optimization={"stage": 2, "allgather_bucket_size": 1001})


def test_what_is_not_there_is_not_implemented():
    with pytest.raises(
        NotImplementedError, match="grad_accum_dtype = 'bf16': not supported: micro-batches"
    ) as error:
        made(data_types={"grad_accum_dtype": "bf16"})
    assert isinstance(error.value, ConfigError)
    with pytest.raises(ConfigError, match="unknown key") as error:
        made(bf17={})
    assert not isinstance(error.value, NotImplementedError)


def test_an_optimizer_is_zeros_at_its_stages():
    kind = MODULES["deepspeed.runtime.base_optimizer"]["ZeROOptimizer"]
    for stage in (0, 1):
        engine = made(zero_optimization={"stage": stage})
        assert isinstance(engine.optimizer, kind) is (stage > 0) and not engine.optimizer.needs_scaler()
        engine.destroy()


def test_at_stage_0_the_optimizer_passes_for_the_scripts_own():
    for stage in (0, 1):
        model = nn.Linear(8, 2)
        own = torch.optim.AdamW(model.parameters(), lr=0.1)
        config = {"overspill": {"budget": {"host": "32MiB"}}, "zero_optimization": {"stage": stage}}
        engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=own, config=config)
        assert isinstance(optimizer, torch.optim.AdamW) is (stage == 0)
        assert (optimizer == own) is (own == optimizer) is (stage == 0)
        assert optimizer == optimizer and optimizer != torch.optim.AdamW(nn.Linear(1, 1).parameters())
        assert (hash(optimizer) == hash(own)) is (stage == 0)
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
        assert optimizer.state[model.weight]["step"] == 1
        engine.destroy()


def test_the_json_as_an_object():
    config = MODULES["deepspeed"]["DeepSpeedConfig"](
        {
            "train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
            "gradient_allreduce_op": "SUM",
            "zero_optimization": {"stage": 2, "cpu_offload": True, "stage3_max_reuse_distance": 7},
            "bfloat16": {"enabled": True},
        }
    )
    assert (config.train_micro_batch_size_per_gpu, config.world_size) == (4, 1)
    assert (config.optimizer_name, config.optimizer_params, config.scheduler_name) == (
        "adamw",
        {"lr": 0.5},
        None,
    )
    assert (config.gradient_allreduce_op, config.gradient_clipping) == ("sum", 1.0)
    assert (
        config.bfloat16_config.enabled and config.zero_enabled and config.zero_config.max_reuse_distance == 7
    )
    assert config.zero_config.offload_optimizer.device == "cpu" and not config.zero_config.overlap_comm
    with pytest.raises(AttributeError, match=r"DeepSpeedConfig\.sparse_attention is not supported"):
        _ = config.sparse_attention
    for wrong, kind, why in (
        ({}, AssertionError, "Either train_batch_size or"),
        ({"train_batch_size": 3, "train_micro_batch_size_per_gpu": 2}, AssertionError, "3 != 2 [*] 1"),
        (
            {"train_batch_size": 1, "gradient_allreduce_op": "max"},
            ValueError,
            "Invalid gradient_allreduce_op",
        ),
        ({"train_batch_size": 1, "zero_optimization": {"stagee": 1}}, ValueError, "stagee"),
    ):
        with pytest.raises(kind, match=why):
            MODULES["deepspeed.runtime.config"]["DeepSpeedConfig"](wrong)


@pytest.mark.parametrize(
    "other, said",
    [
        ({"zero_optimization": {"stage": 3}}, "ZeRO stage 3"),
        ({"zero_optimization": {"stage": 2, "zenflow": {}}}, "ZenFlow"),
        ({"compile": {"deepcompile": True}}, "DeepCompile"),
    ],
)
def test_gradients_are_not_summed_where_deepspeed_does_not(other, said):
    with pytest.raises(ValueError, match=f"'sum': not supported with {said}"):
        MODULES["deepspeed"]["DeepSpeedConfig"](
            {"train_batch_size": 1, "gradient_allreduce_op": "sum", **other}
        )


def test_the_json_comes_by_its_old_name_and_as_hjson_where_that_is_installed(tmp_path, monkeypatch):
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 2, "overspill": {"budget": {"host": "32MiB"}}}')
    engine = deepspeed.initialize(Namespace(deepscale_config=file), nn.Linear(2, 2))[0]
    assert engine.train_batch_size() == 2
    engine.destroy()
    file.write_text("{\n  train_batch_size: 2\n}")
    monkeypatch.setitem(sys.modules, "hjson", None)
    with pytest.raises(
        ConfigError, match="HJSON, which DeepSpeed reads too, needs the package hjson: write JSON"
    ):
        deepspeed.initialize(model=nn.Linear(2, 2), config=file)

    def loads(text, object_pairs_hook):
        assert text == file.read_text()
        return object_pairs_hook(pairs)

    package = types.ModuleType("hjson")
    package.loads, package.__spec__ = loads, importlib.machinery.ModuleSpec("hjson", None)
    monkeypatch.setitem(sys.modules, "hjson", package)
    pairs = [("train_batch_size", 6), ("overspill", {"budget": {"host": "32MiB"}})]
    engine = deepspeed.initialize(model=nn.Linear(2, 2), config=file)[0]
    assert engine.train_batch_size() == 6
    engine.destroy()
    pairs *= 2
    with pytest.raises(ConfigError, match='and no HJSON: "train_batch_size" is there twice'):
        deepspeed.initialize(model=nn.Linear(2, 2), config=file)


def test_a_parameter_of_stage_3_says_so():
    """Inside zero.Init, in a nested one and in a class that was made there, and in an engine; no other one."""
    plain = nn.Linear(3, 2)
    with deepspeed.zero.Init(), deepspeed.zero.Init():

        class Mine(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.own = nn.utils.skip_init(nn.Linear, 3, 2), nn.Parameter(torch.ones(5))

        model = Mine()
    ours = list(model.parameters())
    assert len({parameter.ds_id for parameter in ours}) == 3
    assert model.own.ds_numel == 5 and model.inner.weight.ds_shape == (2, 3)
    status = zero_params.ZeroParamStatus
    assert model.own.ds_status == status.NOT_AVAILABLE
    with deepspeed.zero.GatheredParameters(ours):
        assert model.own.ds_status == status.AVAILABLE
    assert model.own.ds_status == status.NOT_AVAILABLE
    is_zero_param = MODULES["deepspeed.runtime.zero.utils"]["is_zero_param"]
    for other in (plain.weight, nn.Linear(3, 2).weight):
        assert not is_zero_param(other) and not hasattr(other, "ds_id") and not hasattr(other, "ds_tensor")
    with pytest.raises(AssertionError, match=r"ZeRO-3 partitioned parameters.*call safe_get_full_grad"):
        fragments.safe_get_local_grad(plain.weight)
    engine = made(zero_optimization={"stage": 3})
    assert all(is_zero_param(parameter) for parameter in engine.module.parameters())
    engine.destroy()
    engine = made(zero_optimization={"stage": 2})
    assert not any(is_zero_param(parameter) for parameter in engine.module.parameters())
    engine.destroy()


def test_a_piece_is_read_and_its_data_set():
    """Of one rank the whole, flat."""
    engine = made(zero_optimization={"stage": 3})
    weight = engine.module[0].weight
    before = engine.weight(weight)
    assert weight.ds_tensor.shape == (weight.numel(),) and weight.ds_tensor.dtype == weight.dtype
    assert torch.equal(weight.ds_tensor, before.flatten())
    assert torch.equal(2 * weight.ds_tensor.clone(), 2 * before.flatten())
    of_data = weight.ds_tensor.data
    assert type(2 * of_data) is torch.Tensor
    assert torch.equal(torch.cat([weight.ds_tensor, weight.ds_tensor]), before.flatten().repeat(2))
    for given in (weight.ds_tensor, of_data):
        assert torch.equal(torch.zeros(weight.numel()).copy_(given), before.flatten())
        assert torch.equal(torch.zeros(weight.numel()).add_(given), before.flatten())
    for write in (
        lambda: weight.ds_tensor.fill_(1),
        lambda: weight.ds_tensor.__setitem__(0, 1.0),
        lambda: of_data.fill_(1),
        lambda: of_data.__setitem__(0, 1.0),
        lambda: of_data.view(-1).mul_(2),
        lambda: of_data.detach().fill_(1),
        lambda: weight.ds_tensor.data.narrow(0, 0, 2).zero_(),
        lambda: torch.add(before.flatten(), 1, out=of_data),
    ):
        with pytest.raises(NotSupported, match=r"call deepspeed\.utils\.safe_set_local_fp32_param"):
            write()
    assert torch.equal(engine.weight(weight), before)
    weight.ds_tensor.data = torch.full_like(weight.ds_tensor.data, 3.0)
    assert torch.equal(engine.weight(weight), torch.full_like(before, 3.0))
    with pytest.raises(ValueError, match=f"has {weight.numel()} elements, and the value has 2"):
        fragments.safe_set_local_fp32_param(weight, torch.zeros(2))
    step(engine)
    value = torch.rand(weight.numel())
    fragments.safe_set_local_optimizer_state(weight, value, "exp_avg")
    assert torch.equal(fragments.safe_get_full_optimizer_state(weight, "exp_avg"), value.view_as(before))
    assert torch.equal(fragments.safe_get_local_optimizer_state(weight, "exp_avg"), value)
    engine.destroy()


def test_what_is_not_there_says_what_to_do():
    with pytest.raises(NotSupported, match=r"engine\.plan says where weights and states live"):
        MODULES["deepspeed.runtime.zero.offload_states"]["get_state_devices"](None, None)

    class Mine(MODULES["deepspeed.moe.layer"]["MoE"]):
        pass

    with pytest.raises(NotSupported, match=r"deepspeed.moe.layer.MoE is not supported"):
        Mine(hidden_size=4)
    module = type(logging)("deepspeed.runtime.utils")
    Finder().exec_module(module)
    with pytest.raises(
        AttributeError, match=r"deepspeed.runtime.utils.nothing is not supported: docs/coming-from"
    ):
        _ = module.nothing


def test_which_operators_have_something_in_their_place():
    there, builders = MODULES["deepspeed.ops"]["__compatible_ops__"], MODULES["deepspeed.ops.op_builder"]
    for kind, compatible in (("CPUAdamBuilder", True), ("AsyncIOBuilder", True), ("QuantizerBuilder", False)):
        builder = builders[kind]
        assert there[builder.NAME] is builder().is_compatible() is compatible
        with pytest.raises(NotSupported, match=f"{kind}.load is not supported"):
            builder().load()


def test_an_unknown_warmup_is_log():
    """As there, with a warning."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.warns(UserWarning, match="warmup_type = 'sine': log is taken, as in DeepSpeed"):
        schedule = lr_schedules.WarmupLR(optimizer, warmup_num_steps=9, warmup_type="sine")
    assert schedule.warmup_type == "log"


@pytest.mark.parametrize("warmup_type", ["log", "linear"])
@pytest.mark.parametrize("kind, arguments", [("WarmupLR", {}), ("WarmupDecayLR", {"total_num_steps": 20})])
def test_the_rate_before_the_first_step_is_the_least(kind, arguments, warmup_type):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = lr_schedules.SCHEDULES[kind](
        optimizer, warmup_min_lr=0.1, warmup_max_lr=0.5, warmup_type=warmup_type, **arguments
    )
    assert schedule.get_lr() == schedule.get_last_lr() == [0.1]
    cosine = lr_schedules.WarmupCosineLR(optimizer, 20, warmup_min_ratio=0.1, warmup_type=warmup_type)
    assert cosine.get_lr() == cosine.get_last_lr() == [0.0]


def test_a_model_may_be_given_again():
    first = made()
    step(first, 2)
    weight = first.weight(first.module[0].weight)
    config = {"optimizer": {"type": "AdamW", "params": PARAMS}, "overspill": {"budget": {"host": "32MiB"}}}
    second = deepspeed.initialize(model=first.module, config=config)[0]
    assert torch.equal(second.weight(second.module[0].weight), weight)
    step(second)
    with pytest.raises(RuntimeError, match="was ended by give_back"):
        step(first)
    second.destroy()


def test_a_cycles_betas_are_pairs():
    weights = [nn.Parameter(torch.zeros(1))]
    arguments = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 4, "cycle_min_mom": 0.5}
    cycle = lr_schedules.OneCycle(torch.optim.Adam(weights), **arguments)
    assert cycle.get_mom() == [(0.9, 0.99)]
    cycle.step()
    assert cycle.get_mom() == [cycle.optimizer.param_groups[0]["betas"]] == [(pytest.approx(0.8), 0.99)]
    with pytest.warns(UserWarning, match="no betas"):
        assert lr_schedules.OneCycle(torch.optim.SGD(weights), **arguments).get_mom() is None


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("kind", lr_schedules.SCHEDULES)
def test_a_rate_that_is_a_tensor_stays_that_tensor(kind, shape):
    rate = torch.full(shape, 0.1, dtype=torch.float64)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
    arguments = {
        "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_momentum": False},
        "WarmupDecayLR": {"total_num_steps": 9},
        "WarmupCosineLR": {"total_num_steps": 9},
    }.get(kind, {})
    schedule = lr_schedules.SCHEDULES[kind](optimizer, **arguments)
    if kind == "WarmupLR":
        assert schedule.max_lrs == [0.1]  # and not the tensor, which changes
    for _ in range(2):
        held = optimizer.param_groups[0]["lr"]
        assert held is rate and rate.item() == pytest.approx(schedule.get_lr()[0])
        schedule.step()


def test_the_ratio_of_a_cosine_is_of_the_optimizers_own_rate():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = lr_schedules.WarmupCosineLR(optimizer, 9, warmup_num_steps=4, warmup_type="linear")
    assert schedule.get_lr_ratio() == 0.0
    schedule.step(2)
    assert schedule.get_lr_ratio() == 0.5 and schedule.get_lr() == [0.25]


@pytest.mark.parametrize("is_given", [True, False])
def test_what_no_group_has_is_not_updated(is_given):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    groups = [{"params": [], "weight_decay": 0.5}, {"params": [layer.bias for layer in model]}]
    before = model[0].weight.detach().clone()
    config = {"overspill": {"budget": {"host": "32MiB"}}}
    if is_given:
        given = {"optimizer": torch.optim.AdamW(groups, lr=0.1)}
    else:
        given = {"model_parameters": groups}
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.1}}
    with pytest.warns(UserWarning, match=r"0.weight, 1.weight: in no parameter group: as in DeepSpeed"):
        engine = deepspeed.initialize(model=model, config=config, **given)[0]
    step(engine, 2)
    assert torch.equal(engine.weight(model[0].weight), before)
    assert engine.optimizer.state[model[0].bias]["step"] == 2
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
