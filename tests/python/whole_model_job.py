"""What test_whole_model.py runs in a process of its own: things that scripts do with all parameters of a model at once.
Prints a line for each that ended."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import overspill

LAYERS, WIDTH = 32, 2048  # 8 MiB each in bf16, 256 in all

folder = Path(sys.argv[1])
config = {
    "budget": {"host": "64MiB", "nvme": [str(folder)]},
    "optimizer": {"type": "SGD", "lr": 1e-3},
    "engine": {"placement": "nvme"},
}
with overspill.Init(config):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]).bfloat16()
engine, optimizer, *_ = overspill.initialize(model, config)
x = torch.randn(1, WIDTH).bfloat16()


def step(term=None):
    optimizer.zero_grad()
    loss = model(x).float().square().mean()
    if term is not None:
        loss = loss + 1e-6 * sum(term(p) for p in model.parameters())
    loss.backward()
    optimizer.step()


step()
print("step")
step(lambda p: p.square().sum())
print("L2 term")
step(lambda p: p.abs().sum())
print("L1 term")
for p in model.parameters():
    torch.histc(p.float(), 64)
print("histograms")
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
for _ in range(2):
    step()
    average.update_parameters(model)
print("average")
torch.save(model.state_dict(), folder / "weights.pt")
read = torch.load(folder / "weights.pt", mmap=True)
assert all(torch.equal(p, read[name]) for name, p in model.named_parameters())
print("state_dict")
assert all(torch.isfinite(p).all() for p in average.module.parameters())
print("average read")
