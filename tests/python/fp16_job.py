"""One rank of test_fp16.py: trains in fp16 by the engine's scaling, then by a GradScaler. Prints, as JSON, losses,
scales, the steps that were left out, and weights."""

import json
import sys

import torch
import torch.distributed as dist
from ranks_scene import Net, batches, config

import overspill


def update(engine, optimizer, scaler, loss):
    """One step of the engine's own scaling; with a GradScaler, of that. Returns the next scale."""
    if scaler is None:
        engine.backward(loss)
        engine.step()
        return engine.current_loss_scale
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return scaler.get_scale()


def run(folder: str, by: str) -> dict:
    scaling = {"enabled": by == "engine", "initial_scale_power": 22, "hysteresis": 1, "loss_scale_window": 2}
    torch.manual_seed(7)
    model = Net(torch.float16)
    settings = config(folder, loss_scaling=scaling)
    engine, optimizer, *_ = overspill.initialize(model, settings)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=2)
    found = []
    for x, y in batches(torch.float16):
        x, y = (rows.chunk(engine.world_size)[engine.rank] for rows in (x, y))
        loss = engine(x, y)
        scale = update(engine, optimizer, None if by == "engine" else scaler, loss)
        found.append((loss.item(), scale, engine.last_step.skipped))
    with engine.gathered(list(model.parameters())):
        weights = {name: p.detach().float().flatten().tolist() for name, p in model.named_parameters()}
    engine.close()
    return {"steps": found, "weights": weights}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(json.dumps({by: run(sys.argv[1], by) for by in ("engine", "scaler")}), flush=True)
    dist.destroy_process_group()
