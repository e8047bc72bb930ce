"""A script for DeepSpeed, as its documentation shows them: nothing in it is Overspill's. It prints what it found, as
JSON.

python -m overspill.deepspeed deepspeed_script.py FOLDER --deepspeed_config ds_config.json
"""

import argparse
import json

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.lr_schedules import WarmupLR
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--resume", action="store_true")
deepspeed.add_config_arguments(parser)
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-2, weight_decay=0.1)
schedule = WarmupLR(optimizer, 0, 1e-2, 4, "linear")
engine, _, _, _ = deepspeed.initialize(args=args, model=model, optimizer=optimizer, lr_scheduler=schedule)
begin = 0
if args.resume:
    path, state = engine.load_checkpoint(args.folder)
    begin = state["micro_step"]
found = {"losses": [], "boundaries": [], "begin": begin}
for micro_step in range(begin, 12):
    generator = torch.Generator().manual_seed(micro_step)
    x = torch.randn(8, 16, generator=generator)
    loss = (engine(x.to(engine.device)) ** 2).mean()
    engine.backward(loss)
    if micro_step == 1:
        found["grad"] = safe_get_full_grad(model[0].weight).norm().item()
    found["boundaries"].append(engine.is_gradient_accumulation_boundary())
    engine.step()
    found["losses"].append(loss.item())
    if micro_step == 5:
        assert engine.save_checkpoint(args.folder, client_state={"micro_step": 6})
with deepspeed.zero.GatheredParameters(model[0].weight, modifier_rank=0):
    found["sum"] = model[0].weight.double().sum().item()
found |= {
    "steps": engine.global_steps,
    "lr": engine.get_lr(),
    "norm": engine.get_global_grad_norm(),
    "applied": engine.was_step_applied(),
    "accumulation": engine.gradient_accumulation_steps(),
    "batch": engine.train_batch_size(),
    "stage": engine.zero_optimization_stage(),
    "samples": engine.global_samples,
    "fp32": safe_get_full_fp32_param(model[0].weight).double().sum().item(),
    "moment": safe_get_full_optimizer_state(model[0].weight, "exp_avg").norm().item(),
    "device": get_accelerator().current_device_name(),
    "version": deepspeed.__version__,
}
print(json.dumps(found))
engine.destroy()
