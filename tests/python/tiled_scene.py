"""A model whose layers are computed in tiles, for test_tiled_layers.py and test_tiled_edges.py."""

import torch
import torch.nn.functional as F
from test_logits import same as alike
from torch import nn
from torch.utils.checkpoint import checkpoint

import overspill

ROWS, WIDTH, INNER = 1536, 256, 1100
STEPS = 3


class Model(nn.Module):
    """An embedding, two linear layers in a block, and a head; with `frozen`, the first of them does not train."""

    def __init__(self, tied=False, bias=True, padding=None, frozen=False, checkpointed=False):
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH, padding_idx=padding)
        self.up, self.down = nn.Linear(WIDTH, INNER, bias=bias), nn.Linear(INNER, WIDTH, bias=bias)
        self.head = nn.Linear(WIDTH, ROWS, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight
        self.up.requires_grad_(not frozen)
        self.checkpointed = checkpointed

    def block(self, x):
        return x + self.down(torch.tanh(self.up(x)))

    def forward(self, ids):
        x = self.embedding(ids)
        x = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        return F.cross_entropy(self.head(x).flatten(0, -2).float(), ids.flatten())


def ids_of(i, rows=3):
    return torch.randint(0, ROWS, (rows, 40), generator=torch.Generator().manual_seed(i))


def made(dtype=torch.float32, **options):
    torch.manual_seed(0)
    return Model(**options).to(dtype)


def started(config, model, tile, placement="nvme", **settings):
    said = config(placement, job=f"tile{tile}", **settings)
    said["budget"] |= {"tile": tile, "host": "128MiB"}
    return overspill.initialize(model, said)[0]


def train(engine, passes=1, autocast=None):
    losses, gradients = [], None
    for i in range(STEPS):
        for j in range(passes):
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                loss = engine(ids_of(10 * i + j))
            engine.backward(loss)
        if i == 0:
            trained = {n: p for n, p in engine.module.named_parameters() if p.requires_grad}
            gradients = {n: engine.grad(p).clone() for n, p in trained.items()}
        for _ in range(passes):
            engine.step()
        losses.append(loss.item())
    return losses, gradients, {n: v.clone() for n, v in engine.state_dict().items()}


def same(one, other, tolerance=1e-6):
    """Losses and gradients; weights less closely: AdamW's first updates turn a gradient's sign into a whole step."""
    alike(one[:2], other[:2], tolerance)
    alike(([], one[2]), ([], other[2]), max(3 * tolerance, 1e-4))
