"""Weights that lie in another memory order than row-major: checkpoints and merged models."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import overspill


class Conv(nn.Module):
    """Convolutions in channels_last, a transposed matrix, a frozen table in memory order of its own."""

    def __init__(self, dtype, memory_format=torch.channels_last):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, (2, 3)))
        self.body.to(dtype, memory_format=memory_format)
        self.turned = nn.Parameter(torch.randn(5, 4, dtype=dtype).t())
        self.table = nn.Parameter(torch.arange(24).view(2, 3, 4).permute(2, 0, 1), requires_grad=False)
        self.narrow = nn.Parameter(torch.randn(6, 7).half().t(), requires_grad=False)

    def forward(self, x):
        return (self.body(x).mean((2, 3)) @ self.turned).float().square().mean()


def train_conv(engine, steps, dtype):
    for i in steps:
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(i)).to(dtype)
        engine.backward(engine(x.to(memory_format=torch.channels_last)))
        engine.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_merged_weights_are_row_major_whatever_their_memory_order(start, tmp_path, dtype):
    engine = start(Conv(dtype), placement="half")
    assert engine.module.body[0].weight.stride() == (27, 1, 9, 3)
    train_conv(engine, range(3), dtype)
    engine.save_checkpoint(tmp_path / "checkpoint")
    for name, wanted in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        overspill._core.merge(str(tmp_path / "checkpoint"), str(tmp_path / name), name)
        merged = load_file(tmp_path / name / "model.safetensors")
        for key, parameter in engine.module.named_parameters():
            if not parameter.is_floating_point():
                weight = engine.weight(parameter)
            elif wanted == torch.float32 and parameter.requires_grad:
                weight = engine.weight(parameter, torch.float32)
            else:
                weight = engine.weight(parameter).to(wanted)
            assert merged[key].dtype == weight.dtype and torch.equal(merged[key], weight), (name, key)
    assert torch.equal(merged["table"], torch.arange(24).view(2, 3, 4).permute(2, 0, 1))


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_resuming_in_another_memory_order_than_row_major(start, tmp_path, placement):
    engine = start(Conv(torch.bfloat16), placement=placement)
    train_conv(engine, range(3), torch.bfloat16)
    engine.save_checkpoint(tmp_path / "checkpoint")
    train_conv(engine, range(3, 6), torch.bfloat16)
    other = start(Conv(torch.bfloat16), placement=placement)
    other.load_checkpoint(tmp_path / "checkpoint")
    train_conv(other, range(3, 6), torch.bfloat16)
    theirs = other.state_dict()
    for key, value in engine.state_dict().items():
        assert torch.equal(value, theirs[key]) and value.stride() == theirs[key].stride(), key


def test_a_checkpoint_in_another_memory_order_is_refused_before_anything_changes(start, tmp_path):
    engine = start(Conv(torch.float32))
    engine.save_checkpoint(tmp_path / "checkpoint")
    other = start(Conv(torch.float32, torch.contiguous_format))
    train_conv(other, range(1), torch.float32)
    before = other.state_dict()
    with pytest.raises(
        overspill.CheckpointError,
        match=r"body\.0\.weight has strides \(27, 1, 9, 3\) there, row-major ones here",
    ):
        other.load_checkpoint(tmp_path / "checkpoint")
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())
