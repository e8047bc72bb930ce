"""deepspeed.checkpointing: activations that are computed again."""

import copy
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from overspill import ConfigError, deepspeed
from overspill.deepspeed import checkpointing
from overspill.deepspeed.modules import MODULES
from overspill.deepspeed.refused import NotSupported


@pytest.fixture(autouse=True)
def as_it_was():
    checkpointing._asked.is_configured = checkpointing._asked.in_cpu = False
    yield
    checkpointing._asked.is_configured = checkpointing._asked.in_cpu = False
    checkpointing.get_cuda_rng_tracker().reset()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class Counted(nn.Module):
    """Two layers, and how often they ran."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.runs = nn.Linear(8, 8), nn.Linear(8, 8), 0

    def forward(self, x, *, scale=1.0):
        self.runs += 1
        return self.second(torch.relu(self.first(x))) * scale


def test_what_is_computed_again_has_the_same_gradients_in_an_engine():
    torch.manual_seed(0)
    plain, x = Counted(), torch.randn(4, 8)
    again = copy.deepcopy(plain)
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3},
        "overspill": {"budget": {"host": "32MiB"}},
    }

    class Whole(nn.Module):
        def __init__(self, inner, run):
            super().__init__()
            self.inner, self.run = inner, run

        def forward(self, x):
            return self.run(self.inner, x, scale=torch.tensor(2.0)).square().mean()

    losses = {}
    for name, model, run in (
        ("kept", plain, lambda function, *args, **kwargs: function(*args, **kwargs)),
        ("again", again, checkpointing.checkpoint),
    ):
        engine = deepspeed.initialize(model=Whole(model, run), config=config)[0]
        losses[name] = []
        for _ in range(3):
            loss = engine(x)
            engine.backward(loss)
            engine.step()
            losses[name].append(loss.item())
        engine.destroy()
    assert losses["again"] == losses["kept"] and (plain.runs, again.runs) == (3, 6)


def test_tensors_by_keyword_have_gradients_and_torchs_keywords_are_the_functions():
    scale, x = torch.tensor(3.0, requires_grad=True), torch.ones(2, requires_grad=True)
    made = checkpointing.checkpoint(lambda x, *, scale, debug: x * scale + debug, x, scale=scale, debug=1.0)
    made.sum().backward()
    assert made.tolist() == [4.0, 4.0] and scale.grad == 2.0 and x.grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("returned", "becomes"),
    [([1, None], (1, None)), ((1, 2), (1, 2)), ([7], 7), (None, None), ({"a": 1}, {"a": 1})],
)
def test_lists_become_tuples_and_what_is_alone_itself(returned, becomes):
    assert checkpointing.checkpoint(lambda x: returned, torch.ones(1)) == becomes


def test_random_numbers_are_the_same_again_those_of_the_tracker_too():
    checkpointing.model_parallel_cuda_manual_seed(5)
    tracker, drawn = checkpointing.get_cuda_rng_tracker(), []
    assert torch.initial_seed() == 5 and list(tracker.get_states()) == ["model-parallel-rng"]

    def draw(x):
        with tracker.fork():
            drawn.append((torch.rand(1).item(), None))
        drawn[-1] = (drawn[-1][0], torch.rand(1).item())
        return (x * drawn[-1][0]).square()

    x = torch.ones(1, requires_grad=True)
    made = checkpointing.checkpoint(draw, x)
    with tracker.fork():
        between = torch.rand(1).item()
    made.backward()
    after = torch.rand(1).item()
    with tracker.fork():
        following = torch.rand(1).item()
    assert len(drawn) == 2 and drawn[0] == drawn[1]
    torch.manual_seed(5)
    assert [torch.rand(1).item() for _ in range(2)] == [drawn[0][1], after]
    torch.manual_seed(5 + 2718)
    assert [torch.rand(1).item() for _ in range(3)] == [drawn[0][0], between, following]
    for call, said in (
        (lambda: tracker.add("other", 5 + 2718), "seed 2723 already exists"),
        (lambda: tracker.add("model-parallel-rng", 6), "state model-parallel-rng already exists"),
        (lambda: tracker.fork("none").__enter__(), "state none is not added: call add"),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    with pytest.raises(RuntimeError, match="inside"), tracker.fork():
        raise RuntimeError("inside")


def test_what_is_configured_comes_from_the_json_or_the_arguments(monkeypatch):
    kept = []

    class Kept(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self):
            super().__init__(lambda x: kept.append(tuple(x.shape)) or x, lambda x: x)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Kept)
    layer, x = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)), torch.ones(2, 8, requires_grad=True)
    section = {"activation_checkpointing": {"cpu_checkpointing": True, "profile": True}}
    assert not checkpointing.is_configured()
    checkpointing.configure(None, deepspeed_config=section)
    assert checkpointing.is_configured()
    checkpointing.checkpoint(layer, x).sum().backward()
    assert kept == [(2, 8)]  # what went in, and nothing of what is computed again
    checkpointing.configure(None, deepspeed_config=section, checkpoint_in_cpu=False)
    checkpointing.checkpoint(layer, x).sum().backward()
    checkpointing.reset()
    assert len(kept) == 1


def test_what_cannot_be_configured_says_why():
    with pytest.raises(AssertionError, match="only available with partitioned activations: leave it out"):
        checkpointing.configure(None, contiguous_checkpointing=True)
    with pytest.raises(AssertionError, match="Must specify the number of layers"):
        checkpointing.configure(None, partition_activations=True, contiguous_checkpointing=True)
    with pytest.raises(NotSupported, match=r"mpu_ is not supported: give None, and divide the model with"):
        checkpointing.configure(object())
    assert not checkpointing.is_configured()
    for name in ("deepspeed.checkpointing", "deepspeed.runtime.activation_checkpointing.checkpointing"):
        assert MODULES[name]["checkpoint"] is checkpointing.checkpoint
        with pytest.raises(NotSupported, match="CheckpointFunction is not supported: call deepspeed"):
            MODULES[name]["CheckpointFunction"].apply(None)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("deepspeed.autotuning.autotuner", "Autotuner"),
        ("deepspeed.profiling.flops_profiler.profiler", "FlopsProfiler"),
        ("deepspeed.monitor.monitor", "MonitorMaster"),
        ("deepspeed.runtime.fp16.onebit.adam", "OnebitAdam"),
        ("deepspeed.moe.layer", "MoE"),
    ],
)
def test_what_is_documented_and_not_there_is_refused_by_name(module, name):
    with pytest.raises(NotSupported, match=rf"{module}\.{name} is not supported: \S"):
        MODULES[module][name](1, 2)


@pytest.mark.parametrize(
    "name", ["checkpointing.checkpoint", "zero.TiledLinear", "zero.TiledLinearReturnBias", "zero.Init"]
)
def test_documented_names_are_there_before_anything_else_is_imported(name):
    code = f"import overspill.deepspeed as deepspeed; deepspeed.{name}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_kept_in_host_memory_is_kept_there_alone(monkeypatch):
    def copied():  # as save_on_cpu does where tensors are on a GPU
        return torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", copied)
    checkpointing.configure(None, checkpoint_in_cpu=True)
    x, scale = torch.randn(4, 8) + 0, torch.ones(8) * 2
    kept = [StorageWeakRef(each.untyped_storage()) for each in (x, scale)]
    model = Counted()
    out = checkpointing.checkpoint(model, x, scale=scale)
    del x, scale
    assert [each.expired() for each in kept] == [True, True]
    out.sum().backward()
    assert model.runs == 2 and model.first.weight.grad is not None


def test_one_checkpoint_is_computed_again_for_each_backward():
    model, x = Counted(), torch.randn(4, 8, requires_grad=True)
    out = checkpointing.checkpoint(model, x).sum()
    out.backward(retain_graph=True)
    first = model.first.weight.grad.clone()
    out.backward()
    assert model.runs == 3
    assert torch.equal(model.first.weight.grad, first * 2)


@pytest.mark.parametrize(
    "section, message",
    [
        (True, "activation_checkpointing = True: an object is expected"),
        ({"cpu_checkpoint": True}, "cpu_checkpoint: unknown: did you mean cpu_checkpointing"),
        ({"cpu_checkpointing": "false"}, "cpu_checkpointing = 'false': true or false is expected"),
    ],
)
def test_a_section_that_is_wrong_is_named(section, message):
    with pytest.raises(ConfigError, match=message):
        checkpointing.configure(None, {"activation_checkpointing": section})
    assert not checkpointing.is_configured()


def test_auto_is_the_default_and_what_has_no_meaning_is_named():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpointing.configure(
            None, {"activation_checkpointing": {"cpu_checkpointing": "auto", "profile": False}}
        )
    assert not checkpointing._asked.in_cpu
    with pytest.warns(UserWarning, match="without a meaning here: profile"):
        checkpointing.configure(None, profile=True)
