"""budget.tile: linear layers and embeddings are computed in tiles of their weights, and equal whole ones."""

import json
import warnings

import launch
import pytest
import torch
from tiled_scene import ROWS, STEPS, ids_of, made, same, started, train
from torch import nn

import overspill
from overspill.layers import tiled_layers


@pytest.fixture
def count(monkeypatch):
    """Reads of tiles."""
    found = {"reads": 0}
    read = tiled_layers.Rows.read

    def counted(self, begin, end):
        found["reads"] += 1
        return read(self, begin, end)

    monkeypatch.setattr(tiled_layers.Rows, "read", counted)
    return found


@pytest.mark.parametrize("placement", ["host", "half", "nvme"])
@pytest.mark.parametrize(
    "options",
    [{}, {"tied": True}, {"bias": False}, {"padding": 5}, {"frozen": True}, {"checkpointed": True}],
    ids=["plain", "tied", "no_bias", "padding", "frozen", "checkpointed"],
)
def test_the_loss_and_all_gradients_are_those_of_whole_weights(options, placement, config, count):
    found = []
    for tile in (None, "100KiB"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine = started(config, made(**options), tile, placement)
            found.append(train(engine))
        said = engine.plan_text
        engine.close()
    assert "layers in tiles: embedding, up, down, head, of 100.0 KiB" in said
    assert count["reads"] > 50
    same(found[1], found[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision(dtype, config, count):
    found = []
    for tile in (None, "100KiB"):
        engine = started(config, made(dtype), tile)
        found.append(train(engine))
        engine.close()
    assert count["reads"] > 50
    same(found[1], found[0], tolerance=0.02)


def test_under_autocast(config, count):
    found = []
    for tile in (None, "100KiB"):
        engine = started(config, made(), tile)
        found.append(train(engine, autocast=torch.bfloat16))
        engine.close()
    assert count["reads"] > 50
    same(found[1], found[0], tolerance=0.02)


def test_over_micro_batches_with_clipping_and_moving_activations(config, count):
    found = []
    for tile in (None, "100KiB"):
        said = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.3}
        model = made()
        settings = config("nvme", job=f"tile{tile}") | said
        settings["budget"] |= {"tile": tile, "host": "128MiB", "activations": "4MiB"}
        engine = overspill.initialize(model, settings)[0]
        found.append(train(engine, passes=2))
        engine.close()
    assert count["reads"] > 50
    same(found[1], found[0])


class Stacked(nn.Module):
    """Blocks that are larger than what is gathered at once."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(1024, 2560), nn.Tanh(), nn.Linear(2560, 1024)) for _ in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def test_in_blocks_that_backward_computes_again(config, count):
    found = []
    for recompute in ("none", "blocks"):
        for tile in (None, "1MiB"):
            torch.manual_seed(0)
            engine = started(config, Stacked(), tile, recompute=recompute)
            x = torch.randn(7, 1024, generator=torch.Generator().manual_seed(1))
            losses = []
            for _ in range(STEPS):
                losses.append(engine(x))
                engine.backward(losses[-1])
                engine.step()
            found.append([loss.item() for loss in losses])
            engine.close()
    assert count["reads"] > 50
    assert found[1] == found[3] and found[0] == found[2]
    assert found[1] == pytest.approx(found[0], rel=1e-6)


def test_memory_is_that_of_tiles(tmp_path):
    """A weight of 256 MiB in 48 MiB of host memory."""

    def grown(tile, host):
        (process,) = launch.run(
            1, "tiled_job.py", json.dumps({"folder": str(tmp_path), "tile": tile, "host": host})
        )
        return json.loads(process.out.splitlines()[-1])

    whole = grown(None, "48MiB")
    assert "host budget" in whole["error"]
    said = grown("4MiB", "48MiB")
    assert said["error"] is None and said["losses"][1] < said["losses"][0]
    assert said["host_peak"] <= 48 << 20
    assert said["grown"] < 256 << 20, "libraries and all: neither the weight nor its gradient is ever whole"


def test_evaluation_saves_nothing(config, count):
    engine = started(config, made(), "100KiB")
    plain = made()
    with torch.no_grad():
        assert engine(ids_of(0)).item() == pytest.approx(plain(ids_of(0)).item(), rel=1e-6)
    assert count["reads"] > 20
    engine.close()


def test_numbers_outside_an_embedding(config):
    engine = started(config, made(), "100KiB")
    for wrong in (ROWS, -1):
        with pytest.raises(IndexError, match="index out of range"):
            engine(torch.tensor([[1, wrong]]))
    engine.close()
