"""A Llama-shaped model in plain torch: nothing of it knows of an engine. Layers are recomputed in backward."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 32000


@dataclass(frozen=True)
class Shape:
    width: int
    layers: int
    heads: int
    groups: int  # of keys and values
    inner: int
    context: int  # tokens of one sequence


SHAPES = {
    "tiny": Shape(64, 2, 4, 2, 128, 32),
    "1b": Shape(2048, 16, 32, 8, 8192, 2048),
    "7b": Shape(4096, 32, 32, 32, 11008, 2048),
    "9b": Shape(4096, 45, 32, 32, 11008, 2048),  # 131 GB of weights, states and gradients
}


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Su et al. 2021, https://arxiv.org/abs/2104.09864. x: batch, heads, tokens, width of a head."""
    first, second = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.shape, self.head = shape, shape.width // shape.heads
        kept = shape.groups * self.head
        self.before, self.between = (nn.RMSNorm(shape.width, eps=1e-5) for _ in range(2))
        self.query, self.out = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(shape.width, kept, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(shape.width, shape.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        seen = self.before(x)

        def by_head(values: torch.Tensor) -> torch.Tensor:
            return values.unflatten(-1, (-1, self.head)).transpose(1, 2)

        query = rotate(by_head(self.query(seen)), angles)
        key = rotate(by_head(self.key(seen)), angles)
        mixed = F.scaled_dot_product_attention(
            query, key, by_head(self.value(seen)), is_causal=True, enable_gqa=True
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        seen = self.between(x)
        return x + self.down(F.silu(self.gate(seen)) * self.up(seen))


class Llama(nn.Module):
    """forward(tokens) returns the mean loss of predicting each next one."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(VOCABULARY, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        half = self.shape.width // self.shape.heads // 2
        steps = torch.arange(half, device=tokens.device, dtype=torch.float32) / half
        places = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        angles = torch.outer(places, 10000.0**-steps)
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, angles, use_reentrant=False)
        x = self.norm(x)
        losses = [self._loss(part, next_) for part, next_ in zip(x[:, :-1].split(1), tokens[:, 1:].split(1))]
        return torch.stack(losses).mean()

    def _loss(self, x: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        """Sequence by sequence, and again in backward: logits of all would take more memory than the layers."""

        def loss(x: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(x).flatten(0, 1).float(), expected.flatten())

        return checkpoint(loss, x, use_reentrant=False)


def build(shape: Shape, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu") -> Llama:
    """With random weights of the size that training starts with, the same ones everywhere."""
    return fill(build_empty(shape, dtype, device))


def build_empty(
    shape: Shape, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
) -> Llama:
    """Its memory is there when somebody writes to it."""
    with torch.device("meta"):
        model = Llama(shape).to(dtype)
    return model.to_empty(device=device)


def fill(model: Llama) -> Llama:
    """Quickly: one block of random numbers, turned."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(1 << 20, generator=generator) * 0.02
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            flat = parameter.data.view(-1)
            turned = numbers.to(flat).roll(zlib.crc32(name.encode()) % numbers.numel())
            for begin in range(0, flat.numel(), numbers.numel()):
                part = flat[begin : begin + numbers.numel()]
                part.copy_(turned[: part.numel()])
            del flat, part
    return model


def floating_point_operations(shape: Shape, tokens: int, recomputed: bool = True) -> float:
    """Of forward and backward: 2 a weight and token forward, 4 backward, 2 more where forward is done again, and
    attention's products (causal: half of them)."""
    head = shape.width // shape.heads
    layer = (
        2 * shape.width * shape.width + 2 * shape.width * shape.groups * head + 3 * shape.width * shape.inner
    )
    weights = shape.layers * layer + VOCABULARY * shape.width
    attention = (
        shape.layers * shape.width * shape.context
    )  # multiply-adds a token: QK and its product, half of each
    return (4 if recomputed else 3) * 2.0 * tokens * (weights + attention)
