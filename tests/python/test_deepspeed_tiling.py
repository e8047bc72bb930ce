"""deepspeed.zero.TiledLinear: a linear layer in tiles."""

import copy

import pytest
import torch
from torch import nn

from overspill import deepspeed
from overspill.deepspeed.modules import MODULES
from overspill.deepspeed.tiling import TiledLinear, TiledLinearReturnBias
from overspill.units import partition

pytestmark = pytest.mark.usefixtures("no_group")


def whole_weight(tiled):
    return torch.cat([torch.cat([tile.weight for tile in row], dim=1) for row in tiled.linears])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("splits", [(1, 1), (3, 2), (7, 5)])
def test_tiles_make_what_the_whole_makes(splits, bias):
    torch.manual_seed(0)
    plain, x = nn.Linear(7, 5, bias=bias), torch.randn(4, 3, 7)
    tiled = TiledLinear(7, 5, bias, *splits, init_linear=copy.deepcopy(plain))
    assert torch.equal(whole_weight(tiled), plain.weight)
    for layer in (plain, tiled):
        layer(x).square().sum().backward()
    assert torch.allclose(tiled(x), plain(x), atol=1e-6)
    gradient = torch.cat([torch.cat([tile.weight.grad for tile in row], dim=1) for row in tiled.linears])
    assert torch.allclose(gradient, plain.weight.grad, atol=1e-4)
    if bias:
        assert torch.equal(torch.cat([row[-1].bias for row in tiled.linears]), plain.bias)
        assert torch.allclose(
            torch.cat([row[-1].bias.grad for row in tiled.linears]), plain.bias.grad, atol=1e-4
        )
    assert sum(tile.bias is not None for row in tiled.linears for tile in row) == (splits[1] if bias else 0)


def test_tiles_divide_as_deepspeeds_do():
    tiled = TiledLinear(7, 5, in_splits=3, out_splits=2)
    assert (tiled.in_parts, tiled.out_parts) == ([0, 3, 5, 7], [0, 3, 5])


def test_inputs_and_outputs_may_stay_in_parts():
    tiled, x = TiledLinear(6, 4, in_splits=2, out_splits=2), torch.randn(3, 6)
    parts = TiledLinear(
        6, 4, in_splits=2, out_splits=2, input_is_already_split=True, combine_out_splits=False
    )
    parts.load_state_dict(tiled.state_dict())
    made = parts(list(x.split(3, dim=-1)))
    assert [each.shape for each in made] == [(3, 2), (3, 2)] and torch.equal(torch.cat(made, -1), tiled(x))
    assert torch.equal(
        TiledLinear(6, 4, input_is_already_split=True, init_linear=(plain := nn.Linear(6, 4)))(x), plain(x)
    )
    with pytest.raises(AssertionError, match="3 inputs: in_splits = 2 are expected"):
        parts([x, x, x])


def test_tiles_that_return_their_bias():
    class Apart(nn.Linear):
        def forward(self, input):
            return nn.functional.linear(input, self.weight), self.bias

    plain, x = Apart(6, 4), torch.randn(3, 6)
    tiled = TiledLinearReturnBias(
        6, 4, in_splits=2, out_splits=2, linear_cls=Apart, init_linear=copy.deepcopy(plain)
    )
    output, bias = tiled(x)
    assert torch.allclose(output, plain(x)[0], atol=1e-6) and torch.equal(bias, plain.bias)
    assert TiledLinearReturnBias(6, 4, bias=False, in_splits=2, linear_cls=Apart)(x)[1] is None


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        ({"in_splits": 0}, RuntimeError, r"in_splits = 0: 1 to in_features = 6 is expected"),
        ({"out_splits": 5}, RuntimeError, r"out_splits = 5: 1 to out_features = 4 is expected"),
        ({"init_linear": nn.Linear(6, 5)}, AssertionError, r"\(5, 6\) with bias: \(4, 6\) with bias is expe"),
        ({"init_linear": nn.Linear(6, 4, False)}, AssertionError, r"\(4, 6\) without bias: \(4, 6\) with bi"),
    ],
)
def test_what_is_no_tiling_is_named(more, error, said):
    with pytest.raises(error, match=said):
        TiledLinear(6, 4, **more)


def test_the_engine_reads_a_large_layer_tile_by_tile():
    model = nn.Sequential(TiledLinear(4096, 2048, in_splits=2, out_splits=2, device="meta"), nn.ReLU())
    units = [unit.name for unit in partition(model) if any(p.memory.dim() == 2 for p in unit.parameters)]
    assert len(units) == 4


def test_an_engine_trains_tiles():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    tiled = copy.deepcopy(plain)
    tiled[0] = MODULES["deepspeed.zero"]["TiledLinear"](
        16, 16, in_splits=2, out_splits=2, init_linear=plain[0]
    )
    x, losses = torch.randn(4, 16), []
    for model in (plain, tiled):
        config = {
            "train_batch_size": 4,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": 3},
            "overspill": {"budget": {"host": "32MiB"}},
        }
        engine = deepspeed.initialize(model=model, config=config)[0]
        losses.append([])
        for _ in range(4):
            loss = engine(x).square().mean()
            engine.backward(loss)
            engine.step()
            losses[-1].append(loss.item())
        engine.destroy()
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and losses[1][-1] < 0.9 * losses[1][0]


def test_weights_that_are_copied_into_an_engine_count():
    tiled = TiledLinear(16, 16, in_splits=2)
    config = {"train_batch_size": 1, "overspill": {"budget": {"host": "32MiB"}}}
    engine = deepspeed.initialize(model=tiled, config=config)[0]
    tiled.copy_params_from(given := nn.Linear(16, 16))
    x = torch.randn(2, 16)
    assert torch.allclose(engine(x), given(x), atol=1e-6)
    engine.destroy()
