"""Which transport ranks choose: the same on all of them, and a reason where NCCL was asked for and cannot be had."""

import types

import pytest
import torch

from overspill import _core, place, transport
from overspill.config import Config, ConfigError
from overspill.ranks import RankError

CUDA = types.SimpleNamespace(device=torch.device("cuda", 0))


class Ranks:
    """This rank beside others who say what is given."""

    def __init__(self, *others):
        self.others = others

    def gathered(self, said):
        self.said = said
        return [said, *self.others]


@pytest.fixture
def on_gpus(monkeypatch):
    """This rank has GPU a, and NCCL."""
    monkeypatch.setattr(transport, "_gpu", lambda where: "a")
    monkeypatch.setattr(_core, "why_no_nccl", lambda library: "")
    monkeypatch.setattr(transport, "_library", lambda: "/its/libnccl.so.2")


def test_each_with_a_gpu_of_its_own(on_gpus):
    assert transport.choose("auto", Ranks(["auto", "b", ""]), CUDA) == "/its/libnccl.so.2"
    assert transport.choose("nccl", Ranks(["nccl", "b", ""]), CUDA) == "/its/libnccl.so.2"


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (["auto", "a", ""], "ranks 0 and 1 are on one GPU"),
        (["auto", "b", "libnccl.so.2: not found"], "rank 1: libnccl.so.2: not found"),
        (["group", "b", ""], "ranks differ: nccl, group"),
    ],
)
def test_otherwise_the_group_or_a_reason(on_gpus, other, why):
    assert transport.choose("auto", Ranks(other), CUDA) is None
    with pytest.raises(RankError, match=why):
        transport.choose("nccl", Ranks(other), CUDA)
    with pytest.raises(RankError):  # the other one asked for it: this rank must not go on without
        transport.choose(
            "auto", Ranks(["nccl", *other[1:]] if other[0] != "group" else ["nccl", "a", ""]), CUDA
        )


def test_the_group_where_nobody_wants_another(on_gpus):
    assert transport.choose("group", Ranks(["group", "b", ""]), CUDA) is None
    assert transport.choose("auto", None, CUDA) is None


def test_on_the_cpu_it_is_the_group():
    assert transport.choose("auto", Ranks(), place.HOST) is None
    with pytest.raises(RankError, match="rank 0: the model computes on cpu"):
        transport.choose("nccl", Ranks(["nccl", "b", ""]), place.HOST)


def test_a_library_that_is_none_is_named(tmp_path):
    assert "/nowhere/libnccl.so.2" in _core.why_no_nccl("/nowhere/libnccl.so.2")
    (tmp_path / "libnccl.so.2").write_text("no library")
    assert "libnccl.so.2" in _core.why_no_nccl(str(tmp_path / "libnccl.so.2"))


def test_another_word_is_an_error():
    with pytest.raises(ConfigError, match=r"engine\.transport"):
        Config.read({"budget": {"host": "1GiB"}, "engine": {"transport": "mpi"}})
