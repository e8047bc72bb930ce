"""engine.partition_activations: of a block's inputs that the ranks of a model-parallel group have alike each keeps a
slice, and gradients have the same bits."""

import json

import launch
import pytest
import torch
from torch import nn

import overspill
from overspill.activations import partitioned, recompute

pytest.importorskip("transformers", reason="transformers is not installed")


def of_ranks(world, tmp_path, activations="none"):
    ended = launch.run(world, "partitioned_job.py", tmp_path, activations)
    return [json.loads(process.out.splitlines()[-1]) for process in ended]


@pytest.mark.parametrize("world", [2, 4])
def test_each_rank_keeps_its_slice_and_gradients_have_the_same_bits(world, tmp_path):
    for whole, divided in of_ranks(world, tmp_path):
        for key in ("losses", "norms", "digest"):
            assert divided[key] == whole[key], key
        assert divided["whole"] >= 4 * 5 * (
            1 << 20
        )  # of each step five blocks' inputs: the first call is not kept
        assert divided["kept"] * world == divided["whole"]
        saved = whole["grown"] - divided["grown"]
        assert saved == pytest.approx((1 - 1 / world) * 6 * (1 << 20), abs=1 << 20), "of six inputs of 1 MiB"


def test_slices_move_as_other_activations_do(tmp_path):
    for whole, divided in of_ranks(2, tmp_path, "4MiB"):
        for key in ("losses", "norms", "digest"):
            assert divided[key] == whole[key], key
        assert divided["kept"] * 2 == divided["whole"] > 0
        # Half of five blocks' inputs in four steps.
        assert 0 < divided["moved"] <= whole["moved"] - 4 * 5 * (1 << 20) // 2


class Others:
    """A group of two, of which this is rank 0; `change`: what the other one has otherwise."""

    rank, world = 0, 2

    def __init__(self, change=None):
        self.change, self.gathered = change, None

    def tables(self, mine):
        other = bytearray(mine)
        if self.change is not None:
            other[8 * self.change] ^= 1
        return [mine, other]

    def all_gather(self, parts):
        parts[1].copy_(self.rest)


class Owner:
    moving = closed = None


def test_what_ranks_have_otherwise_stays_whole():
    tensors = [torch.randn(2000), torch.randn(50, 40), torch.randn(4)]
    for change, expected in ((None, [0, 1]), (0, [1]), (1, [0])):
        alike = partitioned.Partitioning(Others(change), Owner()).alike([None, *tensors, "text"])
        assert [n for n, each in enumerate(tensors) if alike.keep(each) is not None] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(2101,), (3, 5, 401)])
def test_slices_make_the_whole(dtype, shape):
    group = Others()
    tensor = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    kept = partitioned.Partitioning(group, Owner()).alike([tensor]).keep(tensor)
    half = tensor.numel() // 2
    assert kept.mine.numel() == half and kept.mine.untyped_storage().nbytes() == half * tensor.itemsize
    group.rest = tensor.flatten()[half:].clone()
    assert torch.equal(kept.tensor(), tensor) and kept.tensor().dtype is dtype


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(100, 100).t(),
        torch.randn(2000, requires_grad=True),
        nn.Parameter(torch.randn(2000)),
        torch.randn(2000, dtype=torch.complex64).conj(),
        torch.randn(2000, device="meta"),
    ],
    ids=["transposed", "leaf", "parameter", "conjugate", "meta"],
)
def test_what_is_no_plain_memory_stays_whole(tensor):
    assert partitioned.Partitioning(Others(), Owner()).alike([tensor]).keep(tensor) is None


def test_it_needs_a_model_group(config):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    with pytest.raises(overspill.ConfigError, match="needs ranks that hold other parts of the model"):
        overspill.initialize(model, config(recompute="blocks", partition_activations=True))


def test_parts_with_other_layers_are_refused(monkeypatch):
    class Group:
        def check_alike(self, what):
            self.what = what

    monkeypatch.setattr(recompute, "is_divided", lambda p: True)
    said = []
    for model in (nn.Sequential(nn.Linear(2, 2)), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])):
        group = Group()
        recompute.check_parts(model, group)
        said.append(group.what)
    assert said[0].keys() == said[1].keys() and said[0] != said[1]


def test_stages_of_a_pipeline_are_refused():
    class Group:
        def check_alike(self, what):
            assert next(iter(what.values())) is False

    with pytest.raises(overspill.ConfigError, match=r"Sequential has no DTensors.*leave it out"):
        recompute.check_parts(nn.Sequential(nn.Linear(2, 2)), Group())
