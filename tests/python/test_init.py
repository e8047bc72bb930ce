"""Building inside `overspill.Init`: the plain model in every bit and every random number, but not in memory."""

import copy
import errno
import gc
import os
import subprocess
from pathlib import Path

import pytest
import torch
from test_zoo import STEPS, assert_same, compare, step_beside
from torch import nn
from zoo import ZOO, build

import overspill
from overspill import init
from plain import Plain

TRAINED = ["llama", "llama_untied_reentrant", "gpt2", "resnet", "resnet_channels_last", "recurrent", "odd"]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch):
    monkeypatch.setattr(init, "SMALL_BYTES", 256)


def large(module):
    return {n: p for n, p in module.named_parameters() if p.numel() * p.element_size() >= init.SMALL_BYTES}


def in_file(tensor):
    return tensor.untyped_storage().filename is not None


def mappings():
    """Files of Init that this process still maps."""
    return Path("/proc/self/maps").read_text().count("/overspill-init-") + _unnamed()


def _unnamed():
    """O_TMPFILE ones show as '#inode (deleted)'."""
    return sum(
        "/#" in line and "(deleted)" in line for line in Path("/proc/self/maps").read_text().splitlines()
    )


@DTYPES
@pytest.mark.parametrize("name", ZOO)
def test_the_plain_model(name, dtype, config):
    plain, _ = build(name, dtype)
    drawn = torch.get_rng_state()
    with overspill.Init(config("nvme")):
        model, _ = build(name, dtype)
    assert torch.equal(torch.get_rng_state(), drawn)
    ours, theirs = model.state_dict(), plain.state_dict()
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert_same(key, ours[key], value)
        assert ours[key].stride() == value.stride()
    assert list(large(model)) == list(large(plain)) and large(model)
    assert [n for n, p in large(model).items() if not in_file(p)] == []
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in plain.parameters()]


@DTYPES
@pytest.mark.parametrize("name", TRAINED)
def test_trains_like_the_plain_model(name, dtype, config):
    settings = config("nvme", clipping=0.5)
    plain = Plain(build(name, dtype)[0])
    with overspill.Init(settings):
        model, batch = build(name, dtype)
    assert mappings() > 0
    engine, *_ = overspill.initialize(model, settings)
    try:
        gc.collect()
        assert mappings() == 0, "the engine has the weights, their files must be gone"
        for i in range(STEPS):
            step_beside(engine, plain, i, batch(i))
        compare(engine, plain)
    finally:
        engine.close()


def test_no_name_is_ever_left(config, tmp_path):
    with overspill.Init(config("nvme")):
        nn.Linear(64, 64)
        assert list(tmp_path.iterdir()) == []
    gc.collect()
    assert mappings() == 0


class Aliased(nn.Module):
    """Weights written through another name after they were registered, copied, computed, replaced."""

    def __init__(self):
        super().__init__()
        late, early = torch.empty(16, 16), torch.zeros(16, 16)
        self.late, self.early = nn.Parameter(late), nn.Parameter(early)
        late.fill_(3.0)
        early.fill_(4.0)
        self.computed = nn.Parameter(torch.linspace(0, 1, 256).view(16, 16))
        self.replaced = nn.Parameter(torch.zeros(16, 16))
        self.replaced.data = torch.full((16, 16), 5.0)
        self.spread = nn.Parameter(torch.ones(16, 1).expand(16, 16), requires_grad=False)
        self.lazy = nn.LazyLinear(32)
        self.lazy(torch.zeros(1, 32))
        self.copies = nn.ModuleList(copy.deepcopy(nn.Linear(16, 16)) for _ in range(2))
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def test_other_ways_to_a_weight(config):
    torch.manual_seed(0)
    plain = Aliased()
    torch.manual_seed(0)
    with overspill.Init(config("nvme")):
        model = Aliased()
        assert in_file(torch.empty(16, 16)) and not in_file(torch.empty(4)), "no copy is needed"
        assert not in_file(model.replaced), "this test wants one that moves at the end only"
    for key, value in plain.state_dict().items():
        assert_same(key, model.state_dict()[key], value)
    assert [n for n, p in large(model).items() if not in_file(p)] == ["spread"]
    assert model.spread.stride() == (1, 0)


def test_a_weight_that_somebody_else_sees_stays(config):
    memory = torch.zeros(16, 16)
    with overspill.Init(config("nvme")):
        module = nn.Module()
        module.weight = nn.Parameter(memory)
    memory.fill_(2.0)
    assert (module.weight == 2).all() and not in_file(module.weight)


def test_a_change_of_dtype_needs_no_memory(config):
    with overspill.Init(config("nvme")):
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).bfloat16()
        assert all(in_file(layer.weight) for layer in model), "all of them would pile up until the end"


def test_torch_is_as_it_was(config):
    before = nn.Module.register_parameter, nn.Module._apply, nn.Parameter.__deepcopy__
    for kind in (overspill.Init(config("nvme")), overspill.Init(empty=True)):
        with pytest.raises(KeyError), kind, overspill.Init(config("nvme")):
            assert nn.Module.register_parameter is not before[0]
            raise KeyError
        assert (nn.Module.register_parameter, nn.Module._apply, nn.Parameter.__deepcopy__) == before
    assert not in_file(torch.empty(64, 64)) and not in_file(nn.Linear(64, 64).weight)


def test_beside_a_living_engine(config):
    """An engine changes the same attributes of torch; whoever ends first must not undo the other's."""
    other, *_ = overspill.initialize(nn.Linear(4, 4), config())
    with overspill.Init(config("nvme")):
        student = nn.Linear(32, 32).bfloat16()
    assert in_file(student.weight) and not torch.isnan(copy.deepcopy(other.module).weight).any()
    with overspill.Init(config("nvme")):
        engine, *_ = overspill.initialize(nn.Linear(32, 32), config())
        other.close()
    assert not torch.isnan(copy.deepcopy(engine.module).weight).any()
    engine.close()
    plain = nn.Parameter.__deepcopy__
    with overspill.Init(config("nvme")):
        engine, *_ = overspill.initialize(nn.Linear(32, 32), config())
    assert not torch.isnan(copy.deepcopy(engine.module).weight).any()
    with overspill.Init(config("nvme")):
        engine.close()
    assert nn.Parameter.__deepcopy__ is plain


def test_without_a_folder(config):
    with pytest.raises(overspill.ConfigError, match=r"budget\.nvme names no folder"):
        overspill.Init(config("host"))


def test_a_folder_that_is_missing(config, tmp_path):
    """One that goes after `Init` has looked; one that was never there: test_paths.py."""
    settings = config("nvme")
    folder = tmp_path / "nowhere"
    folder.mkdir()
    settings["budget"]["nvme"] = [str(folder)]
    init = overspill.Init(settings)
    folder.rmdir()
    with pytest.raises(FileNotFoundError, match="nowhere"), init:
        nn.Linear(64, 64)


def test_full_disk(config, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs root to mount a small disk")
    try:
        settings = config("nvme")
        settings["budget"]["nvme"] = [str(disk)]
        full = pytest.raises(
            OSError, match=r"a parameter of 1.0 MiB has no place: No space left.*budget\.nvme"
        )
        with full as error, overspill.Init(settings):
            nn.Linear(512, 512)
        assert error.value.errno == errno.ENOSPC and str(disk) in str(error.value)
        settings["budget"]["nvme"].append(str(tmp_path))  # the one with room is taken
        with overspill.Init(settings):
            assert in_file(nn.Linear(512, 512).weight)
        assert os.listdir(disk) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_pretrained_by_transformers_lies_in_files(config, tmp_path):
    """from_pretrained as it is: transformers converts names and values (experts here), nothing stays in memory."""
    from transformers import AutoModelForCausalLM

    plain, _ = build("mixtral")
    plain.model.save_pretrained(tmp_path / "model")
    with overspill.Init(config("nvme")):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert [n for n, p in large(model).items() if not in_file(p)] == []
    for key, value in plain.model.state_dict().items():
        assert_same(key, model.state_dict()[key], value)
