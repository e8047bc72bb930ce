"""An engine given to `accelerator.prepare`: it is wrapped in nothing, in one process and in two."""

import json
import sys

import launch
import pytest
import torch
import warm
from torch import nn

import overspill
from overspill import accelerated

accelerate = pytest.importorskip("accelerate")


def model_and_data():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    data = torch.utils.data.TensorDataset(torch.randn(48, 8), torch.randn(48, 1))
    return model, torch.utils.data.DataLoader(data, batch_size=4)


def losses_of(accelerator, clip, model, optimizer, loader, schedule):
    """Two micro-batches a step, clipped."""
    found = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                clip(model)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        found.append(accelerator.reduce(loss.detach(), "mean").item())
    return found


def trained(config=None):
    """The losses, of a plain model or over an engine."""
    model, loader = model_and_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = None
    if config is not None:
        engine, optimizer, *_ = overspill.initialize(model, config, optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    made = accelerator.prepare(engine or model, optimizer, loader, schedule)
    if engine is not None:
        assert made[0] is engine and engine.module is model
        assert accelerator.unwrap_model(made[0]) is engine
    if engine is not None and engine.world_size > 1:  # no rank has a gradient that Accelerate could look at
        found = losses_of(accelerator, lambda model: model.clip_grad_norm_(0.5), *made)
    else:
        found = losses_of(
            accelerator, lambda model: accelerator.clip_grad_norm_(model.parameters(), 0.5), *made
        )
    if engine is not None:
        engine.close()
    return found


def test_prepare_leaves_an_engine_as_it_is(config):
    settings = config("nvme", accumulation=2)
    del settings["optimizer"]
    assert trained(settings) == pytest.approx(trained(), rel=1e-5)


def test_mixed_precision_of_several_ranks_is_refused(monkeypatch):
    module = nn.Linear(2, 2)
    monkeypatch.setattr(accelerated, "_mixed_precision", lambda: "bf16")
    assert accelerated.is_prepared(module, 1) is False
    with pytest.raises(ValueError, match="mixed_precision = 'bf16' and 2 ranks"):
        accelerated.is_prepared(module, 2)


RANKS = """
import json, sys
import launch
import torch
from test_accelerate import trained

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
plain = trained()
ours = trained({"budget": {"host": "64MiB"}, "gradient_accumulation_steps": 2})
if torch.distributed.get_rank() == 0:
    print(json.dumps({"plain": plain, "ours": ours}))
launch.end_group()
"""


def test_two_ranks_under_torchrun(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(RANKS)
    done = warm.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        env=launch.environment(CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        timeout=launch.HANGS,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"plain"')))
    assert len(found["ours"]) == 6 and found["ours"] == pytest.approx(found["plain"], rel=1e-5)
