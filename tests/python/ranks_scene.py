"""The model and the batches of ranks_job.py and divided_job.py, and how one rank trains on its part of them."""

import json
import os

import torch
from torch import nn

import overspill
from overspill._testing import Options

RANK = int(os.environ.get("RANK", "0"))
STEPS, ROWS, WIDTH = 6, 24, 24  # ROWS divide by worlds of 1 to 4, with two micro-batches


class Net(nn.Module):
    """A buffer, a tied weight, a frozen one, and dropout of nothing: enough to notice what is not shared."""

    def __init__(self, dtype):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(4))
        self.layers[3].weight = self.layers[1].weight
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.frozen = nn.Linear(WIDTH, WIDTH, dtype=dtype).requires_grad_(False)
        self.register_buffer("scale", torch.rand(1, dtype=dtype) + 0.5)

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return nn.functional.mse_loss(self.norm(self.frozen(x) * self.scale).float(), y.float())


def batches(dtype):
    """The same on every rank, and in one process."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        x, y = torch.randn(2, ROWS, WIDTH, generator=generator)
        yield x.to(dtype), y.to(dtype)


def config(folder: str, placement: str = "half", accumulation: int = 1, **more) -> dict:
    return {
        "budget": {"host": "64MiB", "nvme": [folder]},
        "optimizer": {"type": "AdamW", "lr": 1e-2, "weight_decay": 0.1},
        "gradient_clipping": 0.5,
        "gradient_accumulation_steps": accumulation,
        "engine": Options(placement=placement, chunk_elements=512, threads=1, poison=True),
        **more,
    }


def train(engine, dtype, accumulation: int) -> list[float]:
    """This rank's losses, by step."""
    losses = []
    for x, y in batches(dtype):
        x, y = (rows.chunk(engine.world_size)[engine.rank] for rows in (x, y))
        total = 0.0
        for rows, wanted in zip(x.chunk(accumulation), y.chunk(accumulation), strict=True):
            loss = engine(rows, wanted)
            engine.backward(loss)
            engine.step()
            total += loss.item() / accumulation
        losses.append(total)
    return losses


def learn(folder: str, placement="half", precision="fp32", accumulation="1", stage="3", group=None) -> dict:
    """Losses, the norm and clip factor of the last step, weights."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    torch.manual_seed(RANK)  # ranks begin with other weights: the first one's count
    model = Net(dtype)
    options = config(folder, placement, int(accumulation), zero_optimization={"stage": int(stage)})
    engine, *_ = overspill.initialize(model, options, process_group=group)
    losses = train(engine, dtype, int(accumulation))
    with engine.gathered(list(model.parameters())):
        weights = {name: p.detach().float().flatten().tolist() for name, p in model.named_parameters()}
    norm = [engine.last_step.norm, engine.last_step.clip]
    plan = engine._core.plan.as_dict()
    states_bytes = plan["states_host_bytes"] + plan["states_nvme_bytes"]
    engine.close()
    found = {"losses": losses, "norm": norm, "weights": weights, "scale": model.scale.item()}
    return found | {"states_bytes": states_bytes}


def plain(value):
    if isinstance(value, list):
        return [number for tensor in value for number in plain(tensor)]
    return value.detach().float().flatten().tolist() if isinstance(value, torch.Tensor) else value


def printed(job):
    return lambda *arguments: print(json.dumps(job(*arguments)))
