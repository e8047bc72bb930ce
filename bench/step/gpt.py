"""The model of make bench-step and make bench-sizes, for all contenders: a GPT in plain torch (pre-norm, learned
positions, untied head), bf16, with random weights and random tokens."""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCAB = 50304


class Shape(NamedTuple):
    """Of a model, and of its batch."""

    width: int
    layers: int
    heads: int
    batch: int = 1
    length: int = 256
    checkpointing: bool = False  # blocks are computed anew in backward


SHAPES = {  # by millions of parameters
    "tiny": Shape(128, 2, 2, 1, 64),
    "50": Shape(384, 6, 6),
    "160": Shape(768, 12, 12),
    "350": Shape(1024, 20, 16),
    "690": Shape(1536, 19, 16),
    "1000": Shape(1792, 21, 14),
    "1500": Shape(1600, 44, 25),
    "3000": Shape(2560, 35, 20),
}


class Block(nn.Module):
    """Attention and MLP."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Returns the mean loss over the next tokens."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, shape.width)
        self.positions = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCAB, bias=False)
        self.checkpointing = shape.checkpointing

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def make(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> GPT:
    """On the CPU."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return GPT(shape)
    finally:
        torch.set_default_dtype(before)


def batch(shape: Shape, number: int) -> torch.Tensor:
    """Token ids, the same for every contender."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(VOCAB, (shape.batch, shape.length), generator=generator)
