"""DeepSpeed's JSON as a configuration: each of its keys means the same, is named as without meaning, or is refused."""

import copy
import json
import warnings
from pathlib import Path

import deepspeed_stock
import pytest
import torch
from pydantic import ValidationError
from tiny import SMALL
from torch import nn

import overspill
from overspill import Config, ConfigError
from overspill.cli import main
from overspill.cli.chosen import choose
from overspill.deepspeed import json_models, lr_schedules
from overspill.deepspeed.keys import KEYS, Fate, reference
from overspill.deepspeed.settings import translate

ROOT = Path(__file__).resolve().parents[2]
OWN = set(Config.model_fields)
# As in the documentation of transformers ("DeepSpeed integration"), with numbers for "auto".
STOCK = {
    "fp16": {"enabled": False, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "bf16": {"enabled": True},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500},
    },
    "zero_optimization": deepspeed_stock.ZERO_3,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "steps_per_print": 2000,
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "wall_clock_breakdown": False,
}


def with_key(path, value):
    """{"a": {"b": value}} of "a.b"."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def read(data):
    """What a JSON becomes, and what was said."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        config = Config.read(data)
    return config, "\n".join(str(each.message) for each in said)


def test_the_stock_zero_3_json_is_read(tmp_path):
    config, said = read(STOCK)
    assert (config.dtype, config.gradient_clipping, config.gradient_accumulation_steps) == ("bf16", 0.5, 2)
    assert (config.train_micro_batch_size_per_gpu, config.zero_optimization.stage) == (4, 3)
    assert (config.optimizer.lr, config.optimizer.betas, config.optimizer.weight_decay) == (
        3e-5,
        (0.8, 0.999),
        3e-7,
    )
    assert config.scheduler.type == "WarmupLR" and config.scheduler.params["warmup_num_steps"] == 500
    assert config.budget.nvme == [] and "budget.host is not given" in said
    for named in ("overlap_comm", "pin_memory", "steps_per_print", "stage3_max_live_parameters"):
        assert named in said
    assert '"auto" leaves these to their defaults: reduce_bucket_size, stage3_prefetch_bucket_size' in said
    assert (
        "fp16" not in said and "dtype" not in said
    )  # what means something, or asks for nothing, is not named
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(STOCK))
    again = read(str(file))[0]  # the host budget that is not given is half of what is free, each time
    assert again == config.model_copy(update={"budget": again.budget})


def test_nvme_folders_join_the_budget(tmp_path):
    data = copy.deepcopy(STOCK)
    for name in ("offload_optimizer", "offload_param"):
        data["zero_optimization"][name] = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 5}
    assert read(data)[0].budget.nvme == [str(tmp_path)]
    data["overspill"] = {"budget": {"host": "1GiB"}, "engine": {"prefetch_units": 2}, "gradient_clipping": 0}
    config, said = read(data)
    assert (config.budget.nvme, config.budget.host) == ([str(tmp_path)], 1 << 30)
    assert (config.engine.prefetch_units, config.gradient_clipping) == (2, 0) and "budget.host" not in said
    del data["zero_optimization"]["offload_param"]["nvme_path"]
    with pytest.raises(ConfigError, match=r"offload_param\.nvme_path = None: device nvme needs the path"):
        Config.read(data)
    data["zero_optimization"]["offload_param"] = {"device": "tape"}
    with pytest.raises(ConfigError, match=r"offload_param\.device = 'tape': one of none, cpu, nvme"):
        Config.read(data)


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.path)
def test_a_key_is_what_its_row_says(key):
    if key.fate in (Fate.OWN, Fate.REFUSED):
        for value in ({"enabled": True}, True not in key.idle, "something"):
            with pytest.raises(ValueError, match=rf"config: {key.path} = .*: not supported: "):
                translate(with_key(key.path, value), OWN, 1)
        for value in (*key.idle, *([{"enabled": False}, {}] if False in key.idle else [])):
            assert not translate(with_key(key.path, value), OWN, 1).unused
    elif key.fate is Fate.UNUSED:
        assert translate(with_key(key.path, 3), OWN, 1).unused == (key.path,)
        assert translate(with_key(key.path, {"enabled": True}), OWN, 1).unused == (key.path,)
        assert translate(with_key(key.path, {"enabled": False}), OWN, 1).unused == ()
    assert not key.here.endswith(".") and key.here


MEANT = {
    "dataloader_drop_last": (True, {"dataloader_drop_last": True}),
    "gradient_clipping": (0.25, {"gradient_clipping": 0.25}),
    "gradient_accumulation_steps": (3, {"gradient_accumulation_steps": 3}),
    "train_micro_batch_size_per_gpu": (3, {"train_micro_batch_size_per_gpu": 3}),
    "train_batch_size": (6, {"train_micro_batch_size_per_gpu": 6, "gradient_accumulation_steps": 1}),
    "optimizer.type": ("Lion", {"optimizer": {"type": "Lion", "params": {}}}),
    "optimizer.params": ({"lr": 1}, {"optimizer": {"params": {"lr": 1}}}),
    "scheduler.type": ("OneCycle", {"scheduler": {"type": "OneCycle"}}),
    "scheduler.params": ({"a": 1}, {"scheduler": {"params": {"a": 1}}}),
    "managed_gradient_accumulation": (False, {"managed_gradient_accumulation": False}),
    "gradient_allreduce_op": ("SUM", {"gradients_of_ranks": "sum"}),
    "checkpoint.tag_validation": ("fail", {}),  # by deepspeed.initialize's engine, as the next
    **{
        f"zero_optimization.leaf_module.{name}": (["x"], {}) for name in ("classes", "names", "name_suffixes")
    },
    "bf16.enabled": (True, {"dtype": "bf16"}),
    "bf16.check_grad_overflow": (False, {"on_nonfinite": "propagate"}),
    "bfloat16": ({"enabled": True}, {"dtype": "bf16"}),
    "fp16.enabled": (True, {"dtype": "fp16", "loss_scaling": {"enabled": True}}),
    **{  # of what is not enabled
        f"fp16.{name}": (1, {})
        for name in (
            "loss_scale",
            "initial_scale_power",
            "loss_scale_window",
            "hysteresis",
            "consecutive_hysteresis",
            "min_loss_scale",
        )
    },
    "zero_optimization.stage": (2, {"zero_optimization": {"stage": 2}}),
}
DEFAULTS = {"gradient_clipping": 1.0, "on_nonfinite": "skip", "zero_optimization": {"stage": 0}}


def test_what_means_the_same_becomes_it():
    mapped = {key.path for key in KEYS if key.fate is Fate.MAPPED}
    offload = {path for path in mapped if path.startswith("zero_optimization.offload_")}  # above
    assert mapped - offload == set(MEANT)
    for path, (value, becomes) in MEANT.items():
        assert translate(with_key(path, value), OWN, 1).config == DEFAULTS | becomes, path
    assert translate({"zero_optimization": True}, OWN, 1).config["zero_optimization"] == {"stage": 1}


@pytest.mark.parametrize(
    ("whole", "micro", "steps", "world", "becomes"),
    [
        (16, 2, None, 4, (2, 2)),
        (16, None, 2, 4, (2, 2)),
        (16, None, None, 4, (4, 1)),
        (None, 3, None, 4, (3, None)),
        (16, 2, 2, 4, (2, 2)),
        (16, 2, 2, 2, None),
        (15, 2, None, 2, None),
        (3, None, None, 4, None),
        (True, None, None, 1, None),
        (0, None, None, 1, None),
    ],
)
def test_batch_sizes_are_checked(whole, micro, steps, world, becomes):
    names = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    data = {
        name: value for name, value in zip(names, (whole, micro, steps), strict=True) if value is not None
    }
    data["steps_per_print"] = 1
    if becomes is None:
        with pytest.raises(ValueError, match=r"config: train_batch_size = "):
            translate(data, OWN, world)
    else:
        made = translate(data, OWN, world).config
        assert (made.get(names[1]), made.get(names[2])) == becomes


def test_the_ranks_are_those_of_torchrun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert translate({"train_batch_size": 8}, OWN).config["train_micro_batch_size_per_gpu"] == 2


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            {"steps_per_prin": 1, "bf16": {}},
            'steps_per_prin = 1: unknown key; did you mean "steps_per_print"?',
        ),
        (
            {"zero_optimization": {"stage3_max_live_parameter": 1}},
            'did you mean "stage3_max_live_parameters"?',
        ),
        ({"bf16": {"enabeld": True}}, 'bf16.enabeld = True: unknown key; did you mean "enabled"?'),
        ({"bf16": {"enabled": "yes"}}, "bf16.enabled = 'yes': true or false is expected"),
        ({"bf16": True}, "bf16 = True: an object is expected"),
        ({"bf16": {}, "budgte": {}}, 'did you mean "budget"?'),
        ({"bf16": {}, "overspill": 3}, "overspill = 3: an object"),
        ({"bf16": {}, "overspill": {"fp16": {}}}, "fp16 = {}: unknown key"),
        ({"bf16": {}, "scheduler": {"type": "Warmup"}}, "scheduler.type = 'Warmup': one of LRRangeTest"),
        ({"bf16": {}, "scheduler": {"type": "ReduceLROnPlateau"}}, "needs a metric"),
        (
            {"bf16": {}, "optimizer": {"type": "OneBitAdam", "params": {}}},
            "optimizer.type = 'OneBitAdam': not supported: it rounds what ranks exchange",
        ),
        (
            {"bf16": {}, "optimizer": {"type": "Lamb"}},
            "type = 'Lamb': not supported: on one rank leave",
        ),
        (
            {"bf16": {}, "optimizer": {"type": "radam"}},
            "that the script has made, torch.optim.RAdam; or take",
        ),
        ({"bf16": {}, "optimizer": {"type": "Adamm"}}, "optimizer.type = 'Adamm': one of AdamW"),
        (
            {"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}},
            "zenflow = {'topk_ratio': 0.1}: not supported",
        ),
        ({"zero_optimization": {"zeropp_loco_param": {"reset_T": 9}}}, "{'reset_T': 9}: not supported"),
        (
            {"fp16": {"enabled": True, "auto_cast": True}},
            "fp16.auto_cast = True: not supported: the engine does",
        ),
    ],
)
def test_what_is_wrong_is_named(data, said):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ConfigError) as error:
            Config.read(data)
    assert said in str(error.value)


def test_an_optimizer_has_deepspeeds_defaults_and_they_are_said():
    read({"fp16": {"enabled": False, "auto_cast": True}})  # Accelerate writes both
    config, said = read({"optimizer": {"type": "AdamW"}, "steps_per_print": 1, "fp16": {"enabled": "auto"}})
    assert (config.optimizer.weight_decay, config.gradient_clipping) == (0, 1.0)
    assert "DeepSpeed's defaults: gradient_clipping 1.0" in said and "enabled" in said
    lion = read({"optimizer": {"type": "Lion"}, "steps_per_print": 1})[0].optimizer
    assert (lion.lr, lion.betas) == (1e-3, (0.9, 0.999))
    for kind in ("Lion", "Adagrad", "AdamW"):
        said = {"optimizer": {"type": kind, "params": {"fp32_optimizer_states": True}}, "bf16": {}}
        assert read(said)[0].optimizer.type == kind
        said["optimizer"]["params"]["fp32_optimizer_states"] = False
        with pytest.raises(ConfigError, match='fp32_optimizer_states = false: give "format": "compact"'):
            read(said)


def test_keys_of_overspills_may_stand_beside_deepspeeds(tmp_path):
    data = {
        "bf16": {"enabled": True},
        "on_nonfinite": "raise",
        "seed": 3,
        "budget": {"host": "1GiB"},
        "dtype": "fp32",
    }
    data["zero_optimization"] = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    config, said = read(data | {"gradient_clipping": 0})
    assert (config.on_nonfinite, config.seed, config.dtype) == ("raise", 3, "fp32") and not said
    assert (config.budget.host, config.budget.nvme) == (1 << 30, [str(tmp_path)])


def test_a_configuration_of_overspills_is_none_of_deepspeeds():
    config, said = read(
        {"budget": {"host": "1GiB"}, "zero_optimization": {"stage": 2}, "gradient_clipping": 0}
    )
    assert not said and config.gradient_clipping == 0
    config, said = read({"budget": {"host": "1GiB"}, "optimizer": {"type": "AdamW"}})
    assert not said and config.gradient_clipping == 0 and config.zero_optimization.stage == 3


SCHEDULES = json.loads(Path(__file__).with_name("deepspeed_schedules.json").read_text())["cases"]


@pytest.mark.parametrize("case", SCHEDULES, ids=lambda case: case["type"])
def test_rates_are_those_of_deepspeed(case):
    """The numbers were printed by DeepSpeed 0.19's own classes."""

    def fresh():
        groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1e-3, 2e-3)]
        return lr_schedules.find(case["type"])(torch.optim.AdamW(groups), **case["params"])

    schedule = fresh()
    optimizer = schedule.optimizer
    for rates, beta in zip(case["lr"], case["beta1"], strict=True):
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(rates, rel=1e-14, abs=0)
        assert optimizer.param_groups[0]["betas"][0] == pytest.approx(beta, rel=1e-14)
        again = fresh()
        again.load_state_dict(schedule.state_dict())
        schedule.step()
        again.step()
        assert again.get_last_lr() == pytest.approx(schedule.get_last_lr(), rel=1e-14, abs=0)
    assert optimizer.param_groups[0]["betas"][1] == case["beta2"]


@pytest.mark.parametrize(
    ("name", "params", "said"),
    [
        ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps = 0"),
        ("WarmupLR", {"warmup_min_lr": [1, 2]}, "warmup_min_lr has 2 values"),
        ("WarmupDecayLR", {}, "total_num_steps"),
        (
            "OneCycle",
            {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0},
            "cycle_first_step_size",
        ),
        ("LRRangeTest", {"lr_range_test_step_size": 1.5}, "lr_range_test_step_size = 1.5"),
        ("StepLR", {}, "step_size"),
    ],
)
def test_wrong_arguments_of_a_schedule_are_named(name, params, said):
    model = nn.Linear(4, 4)
    config = {"budget": {"host": "16MiB"}, "scheduler": {"type": name, "params": params}}
    with pytest.raises(ConfigError, match="config: scheduler = ") as error:
        overspill.initialize(model, config)
    assert said in str(error.value)
    overspill.initialize(nn.Linear(4, 4), {"budget": {"host": "16MiB"}}).engine.close()


def small(dtype=torch.float32):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    for parameter in model.parameters():  # not the buffers
        parameter.data = parameter.data.to(dtype)
    return model


def trained(model, config, steps, scheduler=None, resumed=None, saved=None):
    engine, optimizer, *_ = overspill.initialize(model, config, lr_scheduler=scheduler)
    if resumed:
        engine.load_checkpoint(resumed)
    found = []
    for step in steps:
        for part in range(2):
            tokens = torch.arange(32).view(1, 32).add(7 * step + part) % SMALL["vocab_size"]
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            found.append((loss.item(), optimizer.param_groups[0]["lr"]))
    if saved:
        engine.save_checkpoint(saved)
    weights = {name: engine.weight(parameter) for name, parameter in model.named_parameters()}
    engine.close()
    return found, weights


def test_a_run_by_deepspeeds_json_is_the_run_by_its_meaning(tmp_path):
    data = copy.deepcopy(STOCK)
    data["zero_optimization"]["offload_optimizer"] = {"device": "nvme", "nvme_path": str(tmp_path)}
    data |= {"overspill": {"budget": {"host": "32MiB"}}}
    data["scheduler"]["params"] |= {"warmup_max_lr": 0.01, "warmup_num_steps": 6}
    meant = {
        "budget": {"host": "32MiB"},
        "optimizer": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
    }

    def schedule(optimizer):
        return lr_schedules.WarmupLR(optimizer, 0, 0.01, 6)

    theirs, weights = trained(small(), data, range(6), saved=tmp_path / "saved")
    ours, same = trained(small(torch.bfloat16), meant, range(6), schedule)
    assert theirs == ours and theirs[-1][1] > 0.008
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    on, _ = trained(small(), data, range(6, 8), resumed=tmp_path / "saved")
    whole, _ = trained(small(), data, range(8))
    assert on == whole[-4:]


def test_weights_are_converted_and_buffers_are_not():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).double()
    model[0].weight.grad = torch.ones(8, 8, dtype=torch.float64)
    engine = overspill.initialize(model, {"budget": {"host": "16MiB"}, "dtype": "fp32"}).engine
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model[1].running_mean.dtype == torch.float64
    engine.close()


def test_a_model_in_files_is_not_converted(tmp_path):
    config = {"budget": {"host": "16MiB", "nvme": [str(tmp_path)]}, "dtype": "bf16"}
    with overspill.Init(config):
        model = nn.Linear(1024, 1024)
    with pytest.raises(
        ValueError, match=r"weight is torch.float32 in a file: make the model in torch.bfloat16"
    ):
        overspill.initialize(model, config)


def test_a_given_scheduler_goes_before_the_configurations():
    config = {"budget": {"host": "16MiB"}, "scheduler": {"type": "WarmupLR"}}
    with pytest.warns(UserWarning, match=r"scheduler \(WarmupLR\) is not used: lr_scheduler is given"):
        made = overspill.initialize(
            nn.Linear(4, 4), config, lr_scheduler=lambda of: torch.optim.lr_scheduler.StepLR(of, 1)
        )
    assert isinstance(made.lr_scheduler, torch.optim.lr_scheduler.StepLR)
    made.engine.close()
    config["scheduler"] = {"type": "CosineAnnealingLR", "params": {"T_max": 5}}
    made = overspill.initialize(nn.Linear(4, 4), config)
    assert isinstance(made.lr_scheduler, torch.optim.lr_scheduler.CosineAnnealingLR)
    made.engine.close()


def test_the_last_micro_batch_can_be_left_out():
    for drop, count in ((True, 2), (False, 3)):
        config = {
            "budget": {"host": "16MiB"},
            "dataloader_drop_last": drop,
            "train_micro_batch_size_per_gpu": 4,
        }
        made = overspill.initialize(nn.Linear(4, 4), config, training_data=torch.zeros(10, 4))
        assert len(made.dataloader) == count
        made.engine.close()


def test_a_file_is_shown_as_what_it_becomes(tmp_path, capsys):
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(STOCK | {"overspill": {"budget": {"host": "1GiB"}}}))
    assert main(["config", str(file)]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["dtype"] == "bf16" and "overlap_comm" in shown.err
    again = tmp_path / "own.json"
    again.write_text(shown.out)
    assert Config.read(str(again)) == read(str(file))[0]


def test_the_tables_of_the_document_are_those_of_the_code(capsys):
    """After a change of keys.py: overspill config --deepspeed, between the marks."""
    text = (ROOT / "docs/coming-from-deepspeed.md").read_text()
    assert text.split("<!-- keys:begin -->\n")[1].split("<!-- keys:end -->")[0] == reference()
    assert main(["config", "--deepspeed"]) == 0 and capsys.readouterr().out == reference()


def test_the_command_trains_by_it(on_disk, tmp_path, capsys):
    data = copy.deepcopy(STOCK)
    data |= {"gradient_accumulation_steps": 1, "train_batch_size": 2, "train_micro_batch_size_per_gpu": 2}
    data["zero_optimization"]["offload_param"] = {"device": "nvme", "nvme_path": str(on_disk.nvme)}
    data["scheduler"]["params"] |= {"warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"}
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(data))
    options = {"config": file, "lr": None, "nvme": None, "batch": None}
    assert main(on_disk.train_args(tmp_path / "out", **options, steps=4, save_every=2)) == 0
    assert "keys without a meaning here" in capsys.readouterr().out
    log = [json.loads(line) for line in (tmp_path / "out/log.jsonl").read_text().splitlines()]
    assert [each["lr"] for each in log if "lr" in each] == [0, 0, 0.0025, 0.005]
    run = ["train", "--out", str(tmp_path / "out"), "--resume", "--steps", "6"]
    assert main(run) == 0
    log = [json.loads(line) for line in (tmp_path / "out/log.jsonl").read_text().splitlines()]
    assert [each["lr"] for each in log if "lr" in each][4:] == [0.0075, 0.01]
    assert main(on_disk.train_args(tmp_path / "other", **options, warmup=3)) == 1
    assert "--warmup 3 and the scheduler WarmupLR of" in capsys.readouterr().err


def test_the_commands_take_the_json_without_a_budget_and_in_fp32_where_it_enables_no_bf16(
    tmp_path, on_disk, capsys
):
    file = tmp_path / "ds_config.json"
    file.write_text('{"steps_per_print": 1, "zero_optimization": {"stage": 3}}')
    assert main(["plan", "--model", str(on_disk.model), "--config", str(file), "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert any("budget.host is not given" in note for note in notes)
    chosen = choose({"config": str(file)}, required=False)
    assert chosen.settings.dtype == "fp32" and chosen.origins["dtype"] == "file"


def test_zenflows_section_is_read_and_checked_by_its_class():
    """What reads the JSON alone may have it; deepspeed.initialize refuses it (above)."""
    zero = json_models.DeepSpeedZeroConfig(zenflow={"topk_ratio": 0.25, "select_interval": 4})
    assert (zero.zenflow.topk_ratio, zero.zenflow.select_interval, zero.zenflow.update_interval) == (
        0.25,
        4,
        "auto",
    )
    for wrong in (
        3,
        {"topk_ratio": 1.5},
        {"select_strategy": "never"},
        {"select_interval": "often"},
        {"topk": 1},
    ):
        with pytest.raises(ValidationError, match="zenflow"):
            json_models.DeepSpeedZeroConfig(zenflow=wrong)
