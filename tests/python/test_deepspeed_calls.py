"""What scripts call of DeepSpeed beside the engine's steps: optimizers, leaves, forms of the JSON, small helpers, and
the names that are refused."""

import importlib.machinery
import logging
import re
import sys
import types
from argparse import Namespace

import pytest
import torch
from deepspeed_scene import PARAMS, made, step
from torch import nn

from overspill import deepspeed
from overspill.config import ConfigError
from overspill.deepspeed import leaves, optimizers, parts
from overspill.deepspeed.accelerator import get_accelerator
from overspill.deepspeed.finder import Finder
from overspill.deepspeed.modules import MODULES
from overspill.deepspeed.refused import NotSupported

pytestmark = pytest.mark.usefixtures("no_group")


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
