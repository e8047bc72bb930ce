"""One rank of test_pipelining.py: a stage of torch.distributed.pipelining under an engine of its own, on a mesh of
stages and rows of data. Prints, as JSON, losses and norms, and the weights of its stage."""

import json
import sys

import torch
import torch.distributed as dist
from pipeline_job import Block
from ranks_scene import ROWS, WIDTH, batches, config
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import overspill

MICRO, STAGES = 3, 2
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def blocks() -> list[nn.Module]:
    torch.manual_seed(11)
    return [Block(WIDTH) for _ in range(2 * STAGES)]


def whole(folder: str) -> dict:
    """One process with all stages and all rows."""
    model = nn.Sequential(*blocks())
    engine, *_ = overspill.initialize(model, config(folder, gradient_clipping=0.05))
    losses, norms = [], []
    for x, y in batches(torch.float32):
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.last_step.norm)
    weights = {name: value.flatten().tolist() for name, value in engine.state_dict().items()}
    engine.close()
    return {"losses": losses, "norms": norms, "weights": weights}


def stage(folder: str, schedule: str, zero: int) -> dict:
    mesh = init_device_mesh(
        "cpu", (STAGES, dist.get_world_size() // STAGES), mesh_dim_names=("stage", "data")
    )
    stages, data = mesh["stage"].get_group(), mesh["data"].get_group()
    mine = mesh["stage"].get_local_rank()
    model = nn.ModuleDict({str(n): block for n, block in enumerate(blocks()) if n // 2 == mine})
    part = nn.Sequential(*model.values())
    options = config(folder, gradient_clipping=0.05, zero_optimization={"stage": zero})
    engine, *_ = overspill.initialize(part, options, process_group=data, model_group=stages)
    here = PipelineStage(engine.module, mine, STAGES, torch.device("cpu"), group=stages)
    # The engine's gradients are those of the losses: the division by the micro-batches is the loss's.
    run = SCHEDULES[schedule](
        here, MICRO, loss_fn=lambda out, y: nn.functional.mse_loss(out, y) / MICRO, scale_grads=False
    )
    losses, norms = [], []
    for x, y in batches(torch.float32):
        x, y = (rows.chunk(engine.world_size)[engine.rank] for rows in (x, y))
        told: list[torch.Tensor] = []
        if mine == 0:
            run.step(x)
        else:
            run.step(target=y, losses=told)
        engine.step()
        losses.append(sum(each.item() for each in told))
        norms.append(engine.last_step.norm)
    with engine.gathered(list(part.parameters())):
        weights = {
            f"{2 * mine + int(name[0])}{name[1:]}": p.detach().flatten().tolist()
            for name, p in part.named_parameters()
        }
    engine.close()
    return {"losses": losses, "norms": norms, "weights": weights, "stage": mine}


if __name__ == "__main__":
    assert ROWS % (MICRO * 2) == 0
    dist.init_process_group("gloo")
    print(json.dumps(stage(sys.argv[1], sys.argv[2], int(sys.argv[3]))), flush=True)
    dist.destroy_process_group()
