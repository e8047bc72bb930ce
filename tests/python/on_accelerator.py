"""The engine under PyTorch on an accelerator. test_accelerator.py runs this on the one that is made for tests, in
processes of their own; on a GPU, tools/gpu-check does. on_accelerator_plans.py has what a plan puts
there, on_accelerator_fp16.py fp16.

    OVERSPILL_DEVICE=cuda python -m pytest tests/python/on_accelerator*.py
"""

import copy
import itertools
import threading

import pytest
import torch
from accelerator_scene import (
    DEVICE,
    ON_TESTS_OWN,
    ON_THE_DEVICE,
    expect_on_device,
    inputs,
    small_net,
    square_loss,
    train,
)
from scene import is_released
from test_zoo import STEPS, assert_nothing_held, assert_same, bits, compare, step_beside
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.dlpack import to_dlpack
from zoo import ZOO, build

import overspill
from overspill import leases
from plain import Plain

pytest_plugins = "accelerator_scene"
if ON_TESTS_OWN:
    import accelerator


def moved(model, device):
    """`model.to(device)`, which unties weights where torch cannot exchange a parameter's memory for the device's."""
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    model = model.to(device)
    for first, *others in names.values():
        for other in others:
            path, _, local = other.rpartition(".")
            setattr(model.get_submodule(path), local, model.get_parameter(first))
    return model


# ---- every kind of model


@pytest.mark.parametrize("placement", ["host", "nvme", "device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ZOO)
def test_bit_equal_to_plain(name, dtype, placement, on_device):
    try:
        model, batch = build(name, dtype)
    except ModuleNotFoundError as error:  # transformers
        pytest.skip(str(error))
    engine, *_ = overspill.initialize(model, on_device(placement, clipping=0.5))
    plain = Plain(moved(build(name, dtype)[0], engine.device))
    expect_on_device(engine)
    assert is_released(*(p for p in model.parameters() if p.is_floating_point()))
    try:
        for i in range(STEPS):
            step_beside(engine, plain, i, batch(i))
        compare(engine, plain)
        assert_nothing_held(engine)
    finally:
        engine.close()


# ---- memory


def test_weights_pass_through_what_the_budget_gives(on_device):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(12)))  # 12 MiB in fp32
    engine, *_ = overspill.initialize(model, on_device("half", device="4MiB", prefetch_units=2))
    with pytest.raises(overspill.BudgetError, match="device budget too small"):
        overspill.initialize(copy.deepcopy(model), on_device("half", device="2MiB"))
    if ON_TESTS_OWN:
        held = accelerator.core.used_bytes()
        assert held < 4 << 20 + 2 << 20, "the arena, and NaN for the largest weight"
    before = [engine.weight(p) for p in model.parameters()]
    train(engine, 2, width=512)
    assert all(
        not torch.equal(engine.weight(p), old) for p, old in zip(model.parameters(), before, strict=True)
    )
    engine.close()


if ON_TESTS_OWN:

    def test_all_released_parameters_lie_over_one_memory(on_device):
        """As long as the largest, whatever comes first."""
        widths = (256, 512, 1024, 1536)
        layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
        before = accelerator.core.used_bytes()
        engine = overspill.initialize(nn.Sequential(*layers), on_device())[0]
        plan = engine._core.plan.as_dict()
        planned = sum(plan[f"{what}_device_bytes"] for what in ON_THE_DEVICE)
        assert accelerator.core.used_bytes() - before <= planned + 1536 * 1024 * 4 + 4096
        engine.close()


def test_what_is_released_reads_as_nan(on_device):
    engine, *_ = overspill.initialize(small_net(), on_device())
    weight = engine.module[0].weight
    assert weight.device == engine.device and is_released(weight)
    with pytest.raises(RuntimeError, match="was written while its memory was released"), torch.no_grad():
        with torch._C.DisableTorchFunction():
            weight.add_(1)
        engine(inputs(0))
    assert is_released(weight)
    engine.close()


# ---- streams


@pytest.mark.parametrize("placement", ["host", "nvme", "device"])
def test_streams_of_the_script(on_device, placement):
    """Forward and backward on streams that are not torch's default, another one each step."""
    plain = overspill.initialize(small_net(), on_device(placement))[0]
    engine = overspill.initialize(small_net(), on_device(placement))[0]
    for i in range(4):
        stream = torch.Stream(engine.device)
        stream.wait_stream(torch.accelerator.current_stream(engine.device))
        with stream:
            losses = train(engine, 1, i)
        stream.synchronize()
        assert losses == train(plain, 1, i)
    engine.close()
    plain.close()


class OnTwoStreams(nn.Module):
    """A weight that its own module uses on a second stream, too."""

    def __init__(self):
        super().__init__()
        self.weight, self.second = nn.Parameter(torch.randn(32, 32) / 8), nn.Linear(32, 32)
        self.side = None

    def forward(self, x):
        x = torch.tanh(x @ self.weight.t())
        if self.side is None:
            return self.second(x) + x @ self.weight
        self.side.wait_stream(torch.accelerator.current_stream(x.device))
        with self.side:
            beside = x @ self.weight
        out = self.second(x)
        torch.accelerator.current_stream(x.device).wait_stream(self.side)
        return out + beside


@pytest.mark.parametrize("placement", ["nvme", "device"])
def test_a_weight_on_two_streams(on_device, placement):
    engines = []
    for _ in range(2):
        torch.manual_seed(0)
        engines.append(overspill.initialize(OnTwoStreams(), on_device(placement))[0])
    engines[0].module.side = torch.Stream(engines[0].device)
    assert train(engines[0], 4) == train(engines[1], 4)
    for engine in engines:
        engine.close()


def test_every_queue_that_uses_a_lease_is_known_to_it(on_device, monkeypatch):
    torch.manual_seed(0)
    engine = overspill.initialize(OnTwoStreams(), on_device())[0]
    engine.module.side = torch.Stream(engine.device)
    used = {}
    monkeypatch.setattr(
        leases, "use", lambda unit: used.setdefault(unit.name, set()).add(unit.residency.place.queue())
    )
    with engine.module.side:
        beside = engine._place.queue()
    engine(inputs(0))
    assert any(beside in queues for queues in used.values())
    engine.close()


def test_backward_finds_weights_on_autograds_thread(on_device):
    """What a script's own hooks see there: real weights, on a thread that is not the caller's."""
    engine = overspill.initialize(small_net(), on_device())[0]
    seen = []
    weight = engine.module[3].weight
    out = engine(inputs(0))
    out.register_hook(
        lambda gradient: seen.append((threading.current_thread(), weight.data.isnan().any().item()))
    )
    engine.backward(out.sum())
    ((thread, is_nan),) = seen
    assert thread is not threading.main_thread() and not is_nan
    assert_nothing_held(engine)
    engine.close()


# ---- what goes in and out


def test_inputs_are_placed_whatever_holds_them(on_device):
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, pair, named, number):
            assert number == 3
            return self.layer(pair[0] + pair[1][0] + named["x"]).sum()

    engine = overspill.initialize(Takes(), on_device())[0]
    x = torch.ones(2, 4)
    loss = engine((x, [x]), named={"x": x}, number=3)
    assert loss.device == engine.device
    engine.close()


def test_a_model_that_is_there_already(on_device):
    """`model.to(device)` before initialize, as scripts do, and `.to(device)` after it."""
    engine = overspill.initialize(small_net(), on_device())[0]
    moved = overspill.initialize(small_net().to(engine.device), on_device())[0]
    assert moved.module.to(moved.device) is moved.module
    with pytest.raises(RuntimeError, match="cannot become"):
        moved.module.to("cpu")
    assert train(moved, 3) == train(engine, 3)
    engine.close()
    moved.close()


@pytest.mark.parametrize("placement", ["half", "device"])
def test_state_dicts_copies_and_edits(on_device, placement):
    engine = overspill.initialize(small_net(), on_device(placement))[0]
    train(engine, 2)
    state = engine.state_dict()
    assert state["0.weight"].device.type == "cpu" and state["2.running_mean"].device == engine.device
    copied = copy.deepcopy(engine.module)
    assert {p.device for p in copied.parameters()} == {engine.device}
    for name, parameter in copied.named_parameters():
        assert_same(name, parameter, state[name])
    with engine.gathered(engine.module[0].weight), torch.no_grad():
        engine.module[0].weight.fill_(0.125)
    assert torch.equal(engine.weight(engine.module[0].weight), torch.full((32, 32), 0.125))
    engine.load_state_dict(state)
    assert_same("weight", engine.weight(engine.module[0].weight), state["0.weight"])
    engine.close()


@pytest.mark.parametrize("placement", ["host", "device"])
def test_gradients_are_the_engines(on_device, placement):
    engine = overspill.initialize(small_net(), on_device(placement, accumulation=2))[0]
    plain = small_net().to(engine.device)
    for i in range(2):
        engine.backward(engine(inputs(i)).square().mean())
        (plain(inputs(i).to(engine.device)).square().mean() / 2).backward()
    for ours, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(bits(engine.grad(ours)), bits(theirs.grad.float().cpu()))
    norm = engine.clip_grad_norm_(0.5)
    assert norm.item() == pytest.approx(
        nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item(), rel=1e-5
    )
    engine.zero_grad()
    assert engine.grad(engine.module[0].weight) is None
    engine.close()


def test_what_is_no_gradient_is_refused(on_device):
    engine = overspill.initialize(nn.Linear(32, 32, bias=False), on_device())[0]
    where, give = engine._place, engine._core.add_device_gradient
    wrong = torch.zeros(32, 32, dtype=torch.float64, device=engine.device)
    with pytest.raises(ValueError, match="the gradient of weight is"):
        give(0, 0, where.take(wrong), where.queue())
    with pytest.raises(ValueError, match="has 128 bytes, its 1024 elements take 4096"):
        give(0, 0, where.take(wrong[0].float()), where.queue())
    with pytest.raises(ValueError, match="one contiguous dimension"):
        give(0, 0, to_dlpack(wrong.float()), where.queue())
    capsule = where.take(wrong.float())
    give(0, 0, capsule, where.queue())
    with pytest.raises(ValueError, match="not used up"):
        give(0, 0, capsule, where.queue())
    assert torch.equal(engine.grad(engine.module.weight), torch.zeros(32, 32))
    engine.close()


@pytest.mark.parametrize(("first", "then"), [("nvme", "half"), ("device", "nvme"), ("half", "device")])
def test_checkpoints_open_on_either_side(on_device, config, tmp_path, first, then):
    engine = overspill.initialize(small_net(), on_device(first))[0]
    train(engine, 2)
    engine.save_checkpoint(tmp_path / "saved")
    losses = train(engine, 2, 2)
    again = overspill.initialize(small_net(), on_device(then))[0]
    again.load_checkpoint(tmp_path / "saved")
    assert train(again, 2, 2) == losses
    host = config("half")
    host["engine"].device = "host"
    on_host = overspill.initialize(small_net(), host)[0]
    on_host.load_checkpoint(tmp_path / "saved")
    assert train(on_host, 2, 2) == pytest.approx(losses, rel=1e-4)
    for each in (engine, again, on_host):
        each.close()


def test_blocks_that_backward_computes_again(on_device):
    """With the random numbers that the device drew."""

    def run(recompute):
        torch.manual_seed(3)
        blocks = (nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.3), nn.Linear(64, 32)) for _ in range(3))
        model = nn.Sequential(*blocks)
        settings = on_device("half")
        settings["engine"].recompute = recompute
        engine, *_ = overspill.initialize(model, settings)
        torch.manual_seed(4)
        losses = []
        for i in range(3):
            loss = square_loss(engine, inputs(i))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        weights = engine.state_dict()
        again = sum(part.__dict__["forward"].calls_again for part in model if "forward" in part.__dict__)
        engine.close()
        return losses, weights, again

    (kept, weights, none), (losses, ours, again) = run("none"), run("blocks")
    assert none == 0 and again == 8  # the first finds out what a block changes
    assert losses == kept
    for name, weight in weights.items():
        assert_same(name, ours[name], weight)


def test_an_exception_in_forward_leaves_nothing_held(on_device):
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = small_net()
            self.fails = False

        def forward(self, x):
            out = self.net(x)
            if self.fails:
                raise ZeroDivisionError
            return out

    engine = overspill.initialize(Fails(), on_device())[0]
    engine.module.fails = True
    with pytest.raises(ZeroDivisionError):
        engine(inputs(0))
    assert_nothing_held(engine)
    engine.module.fails = False
    train(engine, 1)
    engine.close()


def test_a_scripts_own_saved_tensor_hooks(on_device):
    engine = overspill.initialize(small_net(), on_device("nvme"))[0]
    other = overspill.initialize(small_net(), on_device("nvme"))[0]
    with saved_tensors_hooks(lambda t: t.cpu(), lambda t: t.to(engine.device)):
        losses = train(engine, 3)
    assert losses == train(other, 3)
    engine.close()
    other.close()


@pytest.mark.parametrize("placement", ["host", "nvme", "device"])
@pytest.mark.parametrize("options", [{"speculate": True}, {"prefetch_units": 0}, {"threads": 2}])
def test_how_the_engine_works_changes_no_bit(options, placement, on_device):
    engine = overspill.initialize(small_net(), on_device(placement, **options))[0]
    other = overspill.initialize(small_net(), on_device())[0]
    assert train(engine, 4) == train(other, 4)
    engine.close()
    other.close()


@pytest.mark.parametrize("placement", ["nvme", "device"])
def test_vertical_accumulation(on_device, placement):
    settings = on_device(placement, accumulation=3)
    upright = overspill.initialize(small_net(), settings)[0]
    together = overspill.initialize(small_net(), settings | {"vertical_accumulation": True})[0]

    def loss_of(engine):
        return lambda x: engine(x).square().mean()

    for i in range(3):
        batches = [inputs(10 * i + k) for k in range(3)]
        assert torch.equal(
            upright.train_batch(iter(batches), loss_of(upright)),
            together.train_batch(iter(batches), loss_of(together)),
        )
    upright.close()
    together.close()


def test_a_view_that_is_kept_is_a_lease_that_is_kept(on_device):
    engine = overspill.initialize(small_net(), on_device())[0]
    with engine.gathered(engine.module[0].weight):
        kept = engine.module[0].weight.detach()
    expected = engine.weight(engine.module[0].weight)
    train(engine, 3)
    assert_same("what it was", kept, expected)
    assert leases.lingering() == 1
    engine.close()
    assert_same("after the engine", kept, expected)
    del kept
    assert leases.lingering() == 0


if not ON_TESTS_OWN:  # what torch has for GPUs alone

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
    def test_autocast(on_device, dtype):
        engine = overspill.initialize(small_net(), on_device())[0]
        plain = Plain(small_net().to(engine.device))

        def cast_loss(model, x):
            with torch.autocast(DEVICE, dtype):
                return square_loss(model, x)

        for i in range(3):
            step_beside(engine, plain, i, (inputs(i),), cast_loss)
        compare(engine, plain)
        engine.close()

    @pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
    def test_cudnns_recurrent_nets(on_device, kind):
        """Their weights lie in one piece for cuDNN otherwise; here they come and go one by one."""

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.rnn = kind(32, 24, num_layers=2, bidirectional=True)

            def forward(self, x):
                return self.rnn(x.unflatten(0, (4, 2)))[0]

        nets = []
        for _ in range(2):
            torch.manual_seed(0)
            nets.append(Net())
        engine = overspill.initialize(nets[0], on_device("nvme"))[0]
        plain = Plain(nets[1].to(engine.device))
        for i in range(3):
            step_beside(engine, plain, i, (inputs(i),), square_loss)
        engine.close()
