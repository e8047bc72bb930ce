"""One rank of a contender of bench/graph/run.py.   rank.py BUCKET BLOCKS WIDTH SWAP"""

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bindings"))

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import gelu, normalize

import overspill
from overspill import ranks
from turns import serve

BATCH = 64


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(gelu(self.up(self.norm(x))))


class Towers(nn.Module):
    """Two towers that meet in a contrastive loss. `right_first`: in which order this rank runs them."""

    def __init__(self, blocks: int, width: int):
        super().__init__()
        self.left = nn.ModuleList(Block(width) for _ in range(blocks))
        self.right = nn.ModuleList(Block(width) for _ in range(blocks))
        self.right_first = False

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = {}
        for tower in ("right", "left") if self.right_first else ("left", "right"):
            found[tower] = x if tower == "left" else y
            for block in getattr(self, tower):
                found[tower] = block(found[tower])
        scores = normalize(found["left"], dim=-1) @ normalize(found["right"], dim=-1).T
        return (scores.logsumexp(-1) - scores.diagonal()).mean()


class Counted:
    """Calls of the transport, by whichever thread."""

    def __init__(self) -> None:
        self.calls = 0
        exchange = ranks.Group.exchange

        def count(group: Any, *given: Any) -> str:
            self.calls += 1
            return exchange(group, *given)

        ranks.Group.exchange = count


def ready():
    bucket, blocks, width, swap = (int(text) for text in sys.argv[1:5])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    counted, model = Counted(), Towers(blocks, width)
    # In other orders the pool keeps gradients of all units until both ranks have come to them.
    ahead = {"prefetch_units": 2 * blocks} if swap else {}
    config = {
        "budget": {"host": "512MiB"},
        "optimizer": {"type": "AdamW", "lr": 1e-3},
        "engine": {"device": "host", "threads": 1, "bucket": bucket} | ahead,
    }
    engine = overspill.initialize(model, config)[0]
    model.right_first = bool(swap) and dist.get_rank() == 1
    random = torch.Generator().manual_seed(dist.get_rank())

    def turn(steps: int) -> dict[str, Any]:
        """Seconds of each step, the losses, and calls of the transport in a step."""
        seconds, losses, before = [], [], counted.calls
        for _ in range(steps):
            x, y = (torch.randn(BATCH, width, generator=random) for _ in range(2))
            started = time.perf_counter()
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            seconds.append(time.perf_counter() - started)
            losses.append(loss.item())
        return {"steps": seconds, "losses": losses, "calls": (counted.calls - before) / steps}

    return {"parameters": sum(p.numel() for p in model.parameters())}, {"turn": turn}


if __name__ == "__main__":
    serve(ready)
