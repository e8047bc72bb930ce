"""Four small models, each a row of layers, and a batch for each. Names are those that the page shows."""

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import nn


def sequence(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


def mlp() -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
    """A perceptron with two hidden layers (Rumelhart, Hinton and Williams 1986)."""
    model = sequence(
        hidden1=nn.Linear(64, 128),
        tanh1=nn.Tanh(),
        hidden2=nn.Linear(128, 128),
        tanh2=nn.Tanh(),
        output=nn.Linear(128, 16),
    )
    return model, lambda seed: torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))


def alexnet() -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
    """As AlexNet (Krizhevsky, Sutskever and Hinton 2012), for pictures of 32 by 32: most numbers are in the first
    layers behind the convolutions."""
    model = sequence(
        conv1=nn.Conv2d(3, 24, 5, padding=2),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(24, 64, 5, padding=2),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        conv3=nn.Conv2d(64, 96, 3, padding=1),
        relu3=nn.ReLU(),
        pool3=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        dense1=nn.Linear(96 * 4 * 4, 256),
        relu4=nn.ReLU(),
        dense2=nn.Linear(256, 256),
        relu5=nn.ReLU(),
        output=nn.Linear(256, 10),
    )
    return model, lambda seed: torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


class Residual(nn.Module):
    """Two convolutions, whose result is added to what they were given."""

    def __init__(self, width: int):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.conv2(torch.relu(self.conv1(x))))


def resnet() -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
    """As ResNet (He, Zhang, Ren and Sun 2016), without normalisation: blocks of one size."""
    model = sequence(
        stem=nn.Conv2d(3, 32, 3, padding=1),
        block1=Residual(32),
        block2=Residual(32),
        block3=Residual(32),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        output=nn.Linear(32, 10),
    )
    return model, lambda seed: torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


class Block(nn.Module):
    """Attention, then a perceptron for each position (Vaswani et al. 2017; normalisation first)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def transformer() -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
    """Two layers of a GPT."""
    model = sequence(
        tokens=nn.Embedding(512, 64), layer1=Block(64, 4), layer2=Block(64, 4), output=nn.Linear(64, 512)
    )
    return model, lambda seed: torch.randint(0, 512, (2, 16), generator=torch.Generator().manual_seed(seed))


MODELS = {"MLP": mlp, "AlexNet": alexnet, "ResNet": resnet, "Transformer": transformer}
