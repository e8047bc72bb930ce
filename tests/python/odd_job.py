"""One rank of test_odd_ranks.py: a model of which ranks use different parts, in numbers of passes of their own."""

import json
import os
import sys

import torch
from torch import nn

import overspill
from overspill._testing import Options

RANK, WORLD = int(os.environ.get("RANK", "0")), 3
STEPS, MICRO, WIDTH = 8, 2, 16


class Odd(nn.Module):
    """Experts of which `who` chooses one, a layer that some skip, and one that nobody uses in some steps."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.skipped, self.rare, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, who, step):
        x = torch.tanh(self.stem(x))
        x = x + torch.tanh(self.experts[(2 * who + step) % 5](x))
        if (who + step) % 3:
            x = x + torch.tanh(self.skipped(x))
        if step % 4 == 3 and who == 1:
            x = x + self.rare(x)
        return self.head(x)


def loss_of(forward, who: int, step: int, micro: int) -> torch.Tensor:
    """Of one micro-batch of rank `who`: as many rows as it happens to have."""
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + who)
    rows = 1 + (5 * who + 3 * step + micro) % 7
    x, y = torch.randn(2, rows, WIDTH, generator=generator)
    return nn.functional.mse_loss(forward(x, who, step), y) / MICRO


def gives(who: int, step: int, micro: int) -> bool:
    """Rank 2 ran out of data in some micro-batches."""
    return who != 2 or (step + micro) % 3 > 0


def config(folder: str, placement: str) -> dict:
    return {
        "budget": {"host": "64MiB", "nvme": [folder]},
        "optimizer": {"type": "AdamW", "lr": 1e-2},
        "gradient_clipping": 0.3,
        "gradient_accumulation_steps": MICRO,
        "engine": Options(placement=placement, chunk_elements=256, threads=1, poison=True),
    }


def train(folder: str, placement: str, stage: str) -> dict:
    """As one rank of WORLD, or, in a world of one, as all of them one after the other."""
    model = Odd()
    options = config(folder, placement) | {"zero_optimization": {"stage": int(stage)}}
    engine, *_ = overspill.initialize(model, options)
    alone = engine.world_size == 1
    said = []
    for step in range(STEPS):
        for micro in range(MICRO):
            for who in range(WORLD) if alone else [RANK]:
                if gives(who, step, micro):
                    loss = loss_of(engine, who, step, micro)
                    (loss / WORLD if alone else loss).backward()
                    said.append(((step, micro, who), loss.item()))
            engine.step()
        if step % 2 and RANK == 0:  # this rank alone evaluates, forward only
            with torch.no_grad():
                said += [((step, 9, who), loss_of(engine, who, step + 1, 0).item()) for who in range(WORLD)]
    weights = {name: tensor.flatten().tolist() for name, tensor in engine.state_dict().items()}
    engine.close()
    return {"losses": said, "norm": engine.last_step.norm, "weights": weights}


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, placement, stage = sys.argv[1:]
    print(json.dumps(train(folder, placement if RANK else "nvme", stage)))
