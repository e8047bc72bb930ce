"""Where a model computes, by configuration and machine; GPUs here are only said to be there."""

import types
import warnings

import pytest
import torch

import overspill
from overspill import _core, place


@pytest.fixture
def gpus(monkeypatch):
    """gpus(count, why, current): torch sees so many; the engine cannot use them for that reason."""

    def make(count, why="", current=0):
        chosen = types.SimpleNamespace(ordinal=current)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen.ordinal)
        monkeypatch.setattr(torch.cuda, "set_device", lambda ordinal: setattr(chosen, "ordinal", ordinal))
        monkeypatch.setattr(_core, "why_no_cuda", lambda ordinal: why)
        return chosen

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return make


def test_a_gpu_where_there_is_one(gpus):
    gpus(2)
    assert place.find("auto", None).name == "cuda:0"
    assert place.find("auto", 1 << 30).device == torch.device("cuda", 0)
    assert place.find("cuda:1", None).dlpack == (2, 1)
    assert place.find("host", None) is place.HOST


def test_the_cpu_where_there_is_none(gpus):
    gpus(0)
    assert place.find("auto", None) is place.HOST
    with pytest.raises(ValueError, match=r"budget\.device = 1073741824: .* sees no GPU; leave it out"):
        place.find("auto", 1 << 30)
    with pytest.raises(ValueError, match=r"engine\.device = 'cuda:0': .* sees no GPU"):
        place.find("cuda:0", None)


def test_a_gpu_that_torch_does_not_see_is_told_of(gpus, monkeypatch, tmp_path):
    """A machine with a GPU and a torch without CUDA: the run on the CPU says so before its first hour."""
    gpus(0)
    monkeypatch.setattr(place, "_GPUS", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert place.find("auto", None) is place.HOST  # the driver is there, a GPU is not
        (tmp_path / "0000:01:00.0").mkdir()
        assert place.find("host", None) is place.HOST  # the CPU is meant
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert place.find("auto", None) is place.HOST  # no GPU is meant
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.warns(
        UserWarning, match=r"has an NVIDIA GPU, and torch .* without CUDA, sees none.* install a torch"
    ):
        assert place.find("auto", None) is place.HOST
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.warns(UserWarning, match=r"has CUDA 13\.0, sees none.*driver"):
        place.find("auto", None)


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_one_that_the_engine_cannot_use_is_refused(gpus, name):
    """The engine once trained on the CPU beside it, after one warning."""
    gpus(1, why="compute capability 7.0")
    wanted = (
        rf"engine\.device = '{name}': .*compute capability 7\.0.*engine\.device = \"host\" trains on the CPU"
    )
    with pytest.raises(ValueError, match=wanted):
        place.find(name, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert place.find("host", None) is place.HOST


def test_initialize_refuses_to_take_the_cpu_in_place_of_a_gpu(gpus):
    """In a build without CUDA it says how to have one."""
    why = _core.why_no_cuda(0)
    without = "this build has no CUDA" in why
    gpus(1, why=why if without else "compute capability 7.0")
    way_out = "install the CUDA toolkit, 12 or newer, and build again" if without else r"capability 7\.0"
    with pytest.raises(ValueError, match=f'{way_out}; engine.device = "host"'):
        overspill.initialize(torch.nn.Linear(2, 2), {"budget": {"host": "64MiB"}})


def test_each_rank_of_torchrun_takes_its_own(gpus, monkeypatch):
    chosen = gpus(4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert place.find("auto", None).name == "cuda:3"
    assert chosen.ordinal == 3, "torch computes there too"
    gpus(4, current=2)
    assert place.find("auto", None).name == "cuda:2", "the script has chosen"


@pytest.mark.parametrize("name", ["nowhere", "cuda:one", "cuda:"])
def test_another_word_is_an_error(gpus, name):
    gpus(1)
    if name == "cuda:":
        assert place.find(name, None).name == "cuda:0"
        return
    with pytest.raises(ValueError, match=f"engine.device = '{name}'"):
        place.find(name, None)


def test_torchs_own_device_that_tells_nothing(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda kind: types.SimpleNamespace())
    with pytest.raises(ValueError, match=r"torch\.xpu has no overspill_device\(\)"):
        place.find("xpu", None)


def test_the_default_budget_is_half_of_what_is_free():
    where = types.SimpleNamespace(name="cuda:0", free_bytes=lambda: 10 << 30)
    config = overspill.Config.read({"budget": {"host": "1GiB"}})
    assert config.to_core(_core, place=where).device_budget_bytes == 5 << 30
    config = overspill.Config.read({"budget": {"host": "1GiB", "device": "2GiB"}})
    assert config.to_core(_core, place=where).device_budget_bytes == 2 << 30
    assert config.to_core(_core).device == "cuda", "a plan needs no GPU"


def test_a_plan_for_a_gpu_needs_none():
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    from overspill.cli.plan import plan

    made = plan(model, {"budget": {"host": "1GiB", "device": "4MiB"}}).as_dict()
    assert made["gather_device_bytes"] + made["squares_device_bytes"] == 4 << 20
    assert made["gather_host_bytes"] == 0, "weights go straight from their place"


class Input(torch.Tensor):
    """Says how it was copied, and whether it is pinned."""

    pinned, copies = False, ()

    def is_pinned(self):
        return self.pinned

    def to(self, device, non_blocking=False):
        self.copies = (*self.copies, non_blocking)
        return self


def test_pinned_inputs_are_copied_before_the_call_returns():
    """A script may write the next batch there at once."""
    cuda = place.Cuda(0)
    ordinary, pinned = torch.ones(2).as_subclass(Input), torch.ones(2).as_subclass(Input)
    pinned.pinned = True
    cuda.put([ordinary, {"x": pinned}])
    assert (ordinary.copies, pinned.copies) == ((True,), (False,))


def test_the_current_stream_costs_no_object(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda ordinal: 40 + ordinal, raising=False)
    assert place.Cuda(2).queue() == 42
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream")
    current = types.SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda ordinal: current)
    assert place.Cuda(2).queue() == 7


def test_torch_gives_memory_back_before_the_engine_takes_its_own(monkeypatch, config):
    calls, core = [], _core.Engine
    monkeypatch.setattr(place.Place, "make_room", lambda self: calls.append("room"))
    monkeypatch.setattr(_core, "Engine", lambda *given: (calls.append("core"), core(*given))[1])
    overspill.initialize(torch.nn.Linear(4, 4), config())[0].close()
    assert calls == ["room", "core"]
