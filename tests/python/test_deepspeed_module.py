"""Scripts that were written for DeepSpeed, unchanged: by its own calls, by transformers' Trainer, by Accelerate."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import BINDINGS
from torch import nn

import overspill
from overspill import deepspeed
from overspill.deepspeed import finder
from overspill.deepspeed.modules import MODULES

pytestmark = pytest.mark.usefixtures("no_group")

HERE = Path(__file__).parent
ENVIRONMENT = {
    **{
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ACCELERATE", "RANK", "WORLD"))
    },
    "PYTHONPATH": str(BINDINGS),
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
JSON = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "zero_allow_untested_optimizer": True,
    "overspill": {"budget": {"host": "64MiB"}},
}


def ran(script, *arguments, code=0, program=("-m", "overspill.deepspeed")):
    """What the script printed as JSON in its last line, and all that it said."""
    process = subprocess.run(
        [sys.executable, *program, str(script), *map(str, arguments)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == code, process.stderr
    lines = process.stdout.splitlines()
    found = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else None
    return found, process.stdout + process.stderr


def plain():
    """The losses of tests/python/deepspeed_script.py without an engine, with the engine's own update."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = overspill.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = deepspeed.lr_schedules.WarmupLR(optimizer, 0, 1e-2, 4, "linear")
    losses = []
    for micro_step in range(12):
        generator = torch.Generator().manual_seed(micro_step)
        loss = (model(torch.randn(8, 16, generator=generator)) ** 2).mean()
        (loss / 2).backward()
        losses.append(loss.item())
        if micro_step % 2:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return losses, norm.item(), model[0].weight.double().sum().item()


def test_a_script_runs_unchanged_and_goes_on_where_it_stopped(tmp_path):
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(JSON))
    arguments = (tmp_path / "saved", "--deepspeed_config", file)
    found, said = ran(HERE / "deepspeed_script.py", *arguments)
    losses, norm, weights = plain()
    assert found["losses"] == pytest.approx(losses, rel=1e-5)
    assert found["norm"] == pytest.approx(norm, rel=1e-5)
    assert found["sum"] == found["fp32"] == pytest.approx(weights, rel=1e-5)
    assert found["boundaries"] == [False, True] * 6 and found["steps"] == 6 and found["lr"] == [1e-2]
    assert (found["accumulation"], found["batch"], found["stage"], found["samples"]) == (2, 16, 3, 96)
    assert found["applied"] and found["device"] == "cpu" and found["moment"] > 0 and found["grad"] > 0
    assert "zero_allow_untested_optimizer" in said and "pin_memory" in said
    assert (tmp_path / "saved/latest").read_text() == "global_step3\n"
    again, _ = ran(HERE / "deepspeed_script.py", *arguments, "--resume")
    assert again["begin"] == 6 and again["losses"] == found["losses"][6:] and again["sum"] == found["sum"]


def made(**more):
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW"},
        "overspill": {"budget": {"host": "32MiB"}},
        **more,
    }
    return deepspeed.initialize(model=model, config=config)[0]


def pass_of(engine, micro_step):
    loss = engine(torch.full((1, 8), float(micro_step + 1))).square().mean()
    return engine.backward(loss)


def test_a_boundary_that_was_set_decides_alone(tmp_path):
    engine = made(gradient_accumulation_steps=2)
    engine.set_gradient_accumulation_boundary(False)
    for micro_step in range(3):
        pass_of(engine, micro_step)
        engine.step()
    assert engine.global_steps == 0
    with pytest.warns(UserWarning, match="in the middle of a step: the gradients of its 3 micro-batches"):
        engine.save_checkpoint(tmp_path)
    assert not engine.was_step_applied()
    engine.set_gradient_accumulation_boundary(True)
    pass_of(engine, 3)
    engine.step()
    assert engine.global_steps == 1 and engine.was_step_applied()
    pass_of(engine, 4)
    engine.step()
    assert engine.global_steps == 2
    with engine.no_sync():
        pass_of(engine, 5)
        with pytest.raises(AssertionError, match=r"illegal to call Engine.step\(\) inside no_sync"):
            engine.step()
        with pytest.raises(AssertionError, match="reentry"), engine.no_sync():
            pass
    engine.set_gradient_accumulation_boundary(False)
    engine.step()
    assert engine.global_steps == 2 and not engine.is_gradient_accumulation_boundary()
    assert not engine.was_step_applied()
    with pytest.warns(UserWarning, match="1 of 2 micro-batches"):
        engine.zero_grad()
    engine.zero_grad()
    assert engine.micro_steps == 5 and engine._begun() == 0
    engine.destroy()


def test_a_loss_is_divided_unless_the_script_has_done_it():
    engine = made(gradient_accumulation_steps=2)
    whole = pass_of(engine, 0)
    loss = engine(torch.full((1, 8), 1.0)).square().mean()
    assert engine.backward(loss, scale_wrt_gas=False).item() == loss.item() == pytest.approx(2 * whole.item())
    engine.destroy()


def test_a_checkpoint_of_the_same_tag_is_replaced(tmp_path):
    engine = made()
    for number in range(2):
        assert engine.save_checkpoint(tmp_path, tag="best", client_state={"number": number})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "latest"]
    assert engine.load_checkpoint(tmp_path) == (str(tmp_path / "best"), {"number": 1})
    assert engine.load_checkpoint(tmp_path, tag="best")[1] == {"number": 1}
    engine.save_checkpoint(tmp_path / "others", tag="best.old")  # a name of the script's own
    new, old = "best.overspill-new", "best.overspill-old"
    for left in ([new], [old], [new, old]):  # of a process that was killed in a save
        for name in left:
            shutil.copytree(tmp_path / "best", tmp_path / name)
        if len(left) == 2:
            shutil.rmtree(tmp_path / "best")
        assert engine.load_checkpoint(tmp_path)[1] == {"number": 1}
        assert engine.save_checkpoint(tmp_path, tag="best", client_state={"number": 1})
        assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "latest", "others"]
        assert engine.save_checkpoint(tmp_path / "others", tag="best")
        assert sorted(path.name for path in (tmp_path / "others").iterdir()) == ["best", "best.old", "latest"]
    (tmp_path / "latest").unlink()
    with pytest.warns(UserWarning, match="has no file 'latest'"):
        assert engine.load_checkpoint(tmp_path) == (None, None)
    for tag in ("..", "a/b", ""):
        with pytest.raises(ValueError, match="is no name of a folder"):
            engine.save_checkpoint(tmp_path, tag=tag)
    with pytest.raises(TypeError, match="custom_load_fn is not supported"):
        engine.load_checkpoint(tmp_path, tag="best", custom_load_fn=print)
    engine.destroy()


def test_an_engine_without_an_optimizer_runs_the_model_and_does_not_step():
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    config = {"zero_optimization": {"stage": 3}, "overspill": {"budget": {"host": "32MiB"}}}
    engine = deepspeed.initialize(model=model, config=config)[0]
    pass_of(engine, 0)
    with pytest.raises(RuntimeError, match="had an optimizer: give one"):
        engine.step()
    weight = engine.weight(model.weight)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.1}}
    after = deepspeed.initialize(model=model, config=config)[0]  # as Trainer does after an evaluate()
    assert torch.equal(after.weight(model.weight), weight)
    pass_of(after, 0)
    after.step()
    assert not torch.equal(after.weight(model.weight), weight)
    after.destroy()


def test_clipping_is_deepspeeds_default_where_nothing_is_said():
    engine = made()
    assert engine.gradient_clipping() == 1.0 and engine.zero_optimization_stage() == 0
    assert engine.config == {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW"},
        "overspill": {"budget": {"host": "32MiB"}},
    }
    engine.destroy()
    with pytest.raises(TypeError, match="mpu and mesh_param"):
        deepspeed.initialize(model=nn.Linear(2, 2), config={}, mpu=object())


@pytest.mark.parametrize("name", sorted(MODULES))
def test_every_module_is_found_and_no_other(name):
    program = (
        "import sys, importlib, importlib.metadata\nfrom overspill.deepspeed.finder import install\ninstall()\n"
        f"module = importlib.import_module({name!r})\n"
        f"import deepspeed\nassert deepspeed.zero.Init and importlib.metadata.version('deepspeed')\n"
        "try:\n    import deepspeed.sequence.layer\nexcept ModuleNotFoundError as error:\n"
        "    assert 'overspill stands in' in str(error), error\nelse:\n    sys.exit('it is there')\n"
    )
    if name == "deepspeed":
        process = subprocess.run(
            [sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True
        )
        assert process.returncode == 0, process.stderr
    assert all(value is not None for value in MODULES[name].values())
    assert not name.rpartition(".")[0] or name.rpartition(".")[0] in MODULES


def test_a_process_of_another_launcher_is_not_taken_for_the_only_one(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="OMPI_COMM_WORLD_SIZE = 2: there are several processes"):
        deepspeed.init_distributed()
    monkeypatch.undo()
    deepspeed.init_distributed(init_method="tcp://127.0.0.1:29713", rank=0, world_size=1)
    assert torch.distributed.get_world_size() == 1


def test_init_makes_the_model_in_bf16_where_the_json_says_so():
    with deepspeed.zero.Init(
        config_dict_or_path={"bf16": {"enabled": True}, "overspill": {"budget": {"host": 1}}}
    ):
        assert nn.Linear(2, 2).weight.dtype == torch.bfloat16
    assert nn.Linear(2, 2).weight.dtype == torch.float32


def test_the_real_deepspeed_is_not_replaced_behind_the_scripts_back(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", sys)
    with pytest.raises(RuntimeError, match="DeepSpeed is imported already"):
        finder.install()


def test_the_command_says_what_it_wants(tmp_path):
    _, said = ran("--help")
    assert "python -m overspill.deepspeed train.py" in said
    _, said = ran(tmp_path / "none.py", code=2)
    assert "none.py is no file" in said
    script = tmp_path / "stops.py"
    script.write_text("import sys; print(sys.argv[1:]); sys.exit(7)")
    assert "['--x', '1']" in ran(script, "--x", "1", code=7)[1]


TRAINER = """
import json, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

folder, config, resume = sys.argv[1], sys.argv[2], len(sys.argv) > 3 and sys.argv[3]
args = TrainingArguments(
    folder, deepspeed=config if config != "plain" else None, use_cpu=config == "plain", max_steps=6,
    per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2, max_grad_norm=0.5,
    save_steps=3, logging_steps=1, report_to=[], warmup_steps=2, disable_tqdm=True, weight_decay=0.1,
)
torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(**sizes))
rows = [(torch.arange(16) * (i % 7 + 1) + i) % 64 for i in range(20)]
trainer = Trainer(model, args, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
trainer.train(resume_from_checkpoint=resume)
trainer.save_model(folder + "/final")
log = [(each["loss"], each["learning_rate"], each["grad_norm"]) for each in trainer.state.log_history if "loss" in each]
weights = LlamaForCausalLM.from_pretrained(folder + "/final")
print(json.dumps({"log": log, "sum": sum(p.detach().double().sum().item() for p in weights.parameters())}))
"""


def test_a_trainer_with_deepspeeds_json_is_the_trainer_without_it(tmp_path):
    script, file, disk = tmp_path / "run.py", tmp_path / "ds_config.json", tmp_path / "disk"
    disk.mkdir()
    script.write_text(TRAINER)
    offload = {"device": "nvme", "nvme_path": str(disk)}
    data = {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": offload,
            "offload_param": offload,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "overspill": {"budget": {"host": "64MiB"}},
    }
    file.write_text(json.dumps(data))
    without, _ = ran(script, tmp_path / "plain", "plain", program=())
    found, _ = ran(script, tmp_path / "ours", file)
    assert len(found["log"]) == 6
    for ours, theirs in zip(found["log"], without["log"], strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
        assert ours[1] == theirs[1]
        assert ours[2] == pytest.approx(theirs[2], rel=1e-4)
    assert math.isclose(found["sum"], without["sum"], rel_tol=1e-4)
    again, _ = ran(script, tmp_path / "ours", file, tmp_path / "ours/checkpoint-3")
    assert again["log"] == found["log"] and again["sum"] == found["sum"]


ACCELERATE = """
import json, sys
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DummyOptim, DummyScheduler
from torch import nn

plugin = DeepSpeedPlugin(hf_ds_config=sys.argv[1])
accelerator = Accelerator(deepspeed_plugin=plugin)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
loader = torch.utils.data.DataLoader(data, batch_size=4)
optimizer = DummyOptim(model.parameters(), lr=1e-2)
schedule = DummyScheduler(optimizer, total_num_steps=8, warmup_num_steps=2)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
losses = []
for x, y in loader:
    with accelerator.accumulate(model):
        loss = (model(x) - y).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps({"losses": losses, "steps": model.global_steps, "lr": schedule.get_last_lr()}))
"""


def test_accelerates_loop_with_its_plugin(tmp_path):
    script, file = tmp_path / "run.py", tmp_path / "ds_config.json"
    script.write_text(ACCELERATE)
    data = {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
        },
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "overspill": {"budget": {"host": "64MiB"}},
    }
    file.write_text(json.dumps(data))
    found, _ = ran(script, file)
    assert found["steps"] == 4 and len(found["losses"]) == 8 and found["lr"] == [0.01]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    x, y = torch.randn(32, 8), torch.randn(32, 1)
    optimizer = overspill.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    schedule = deepspeed.lr_schedules.WarmupLR(optimizer, 0, 1e-2, 2)
    for step in range(8):
        loss = (model(x[4 * step : 4 * step + 4]) - y[4 * step : 4 * step + 4]).square().mean()
        assert found["losses"][step] == pytest.approx(loss.item(), rel=1e-5)
        (loss / 2).backward()
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


RANKS = """
import json, sys
import deepspeed, torch
from torch import nn

torch.manual_seed(0)
config = {
    "train_batch_size": 8, "gradient_accumulation_steps": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 3}, "overspill": {"budget": {"host": "32MiB"}},
}
engine = deepspeed.initialize(model=nn.Linear(8, 8), config=config)[0]
assert engine.train_micro_batch_size_per_gpu() == 2 and deepspeed.comm.get_world_size() == 2
for number in range(2):
    for part in range(2):
        x = torch.full((2, 8), float(number + part + deepspeed.comm.get_rank()))
        engine.backward(engine(x).square().mean())
        engine.step()
    engine.save_checkpoint(sys.argv[1], tag="last", client_state={"number": number})
path, state = engine.load_checkpoint(sys.argv[1])
total = engine.weight(engine.module.weight).double().sum().item()
if deepspeed.comm.get_rank() == 0:
    print(json.dumps({"steps": engine.global_steps, "state": state, "path": path, "sum": total}))
engine.destroy()
"""


def test_several_ranks_by_torchrun(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(RANKS)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    found, _ = ran("overspill.deepspeed", script, tmp_path / "saved", program=torchrun)
    assert found["steps"] == 2 and found["state"] == {"number": 1}
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["last", "latest"]
