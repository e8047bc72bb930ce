"""Units follow from the model alone."""

import pytest
import torch
from torch import nn

from overspill.units import memory_order, partition


def names(model):
    return {unit.name: [p.name for p in unit.parameters] for unit in partition(model)}


class Decoder(nn.Module):
    def __init__(self, width=64, wide=1024):
        super().__init__()
        self.embed = nn.Embedding(8192, width)  # 512 Ki elements
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(width, wide), "norm": nn.LayerNorm(width)}) for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 8192, bias=False)
        self.head.weight = self.embed.weight


def test_small_blocks_large_modules_and_the_rest():
    model = Decoder()
    units = names(model)
    assert list(units) == ["embed:fp32:F32", "layers.0:fp32:F32", "layers.1:fp32:F32", "*:fp32:F32"]
    assert units["layers.1:fp32:F32"] == [
        "layers.1.up.weight",
        "layers.1.up.bias",
        "layers.1.norm.weight",
        "layers.1.norm.bias",
    ]
    assert units["*:fp32:F32"] == ["norm.weight", "norm.bias"]
    (embed,) = partition(model)[0].parameters
    assert embed.aliases == ["head.weight"]


def test_a_large_block_is_split_by_module_and_keeps_its_small_ones_together():
    with torch.device("cpu"):
        model = Decoder(64, 1 << 17)  # 8 Mi elements in `up`
    assert names(model)["layers.0.up:fp32:F32"] == ["layers.0.up.weight", "layers.0.up.bias"]
    assert names(model)["layers.0.*:fp32:F32"] == ["layers.0.norm.weight", "layers.0.norm.bias"]


def test_the_outermost_small_element_is_the_unit():
    model = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), nn.Sequential(nn.Linear(2, 2))])
    assert list(names(model)) == ["0:fp32:F32", "1:fp32:F32"]


def test_one_format_one_dtype_one_trainability():
    model = nn.Sequential(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2).requires_grad_(False))
    )
    assert list(names(model)) == ["0:fp32:F32", "0:bf16_split:BF16", "0:frozen:F32"]


def test_what_cannot_be_held():
    model = nn.Linear(2, 2)
    model.other = nn.Parameter(torch.empty(2, 2))
    model.other.data = model.weight.data
    with pytest.raises(ValueError, match="weight and other share memory"):
        partition(model)
    with pytest.raises(ValueError, match="not initialised yet"):
        partition(nn.LazyLinear(3))


def test_shapes_are_enough():
    assert [u.name for u in partition(nn.Linear(2, 2, device="meta"))] == ["*:fp32:F32"]


def test_memory_order():
    x = torch.empty(2, 3, 4, 5)
    assert memory_order(x.to(memory_format=torch.channels_last)) == (60, 1, 15, 3)
    assert memory_order(x.transpose(0, 1)) == x.transpose(0, 1).stride()
    assert memory_order(torch.empty(3).expand(2, 3)) == (3, 1)
    assert memory_order(torch.empty(4, 4)[:, :2]) == (2, 1)
