"""The calls of the engine: groups, schedulers, accumulation, skipped steps, checkpoints, and what is
refused."""

import copy
import json
import random
import time

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR, OneCycleLR, ReduceLROnPlateau

import overspill
from plain import ADAMW, Plain


class Net(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.2)).to(dtype)
        self.head = nn.Linear(32, 4).to(dtype)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x))).float().square().mean()


def batch(i, dtype=torch.float32):
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(i)).to(dtype)


def same(engine, plain):
    theirs = plain.model.state_dict()
    return all(torch.equal(value, theirs[key]) for key, value in engine.state_dict().items())


def step_both(engine, plain, i, dtype=torch.float32):
    torch.manual_seed(i)
    engine.backward(engine(batch(i, dtype)))
    engine.step()
    torch.manual_seed(i)
    plain.backward(plain.model(batch(i, dtype)))


@pytest.fixture
def start(config):
    engines = []

    def make(model, optimizer=None, lr_scheduler=None, model_parameters=None, **settings):
        engine, *_ = overspill.initialize(
            model, config(**settings), optimizer, lr_scheduler, model_parameters=model_parameters
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


# ---- optimizers, groups, schedulers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_groups_and_a_scheduler_on_the_returned_optimizer(start, dtype):
    model = Net(dtype)
    plain_model = copy.deepcopy(model)
    groups = [
        {"params": list(model.body.parameters()), "lr": 1e-3, "weight_decay": 0.0},
        {"params": model.head.parameters()},
    ]
    plain = Plain(
        plain_model,
        [
            {"params": list(plain_model.body.parameters()), **ADAMW, "lr": 1e-3, "weight_decay": 0.0},
            {"params": list(plain_model.head.parameters()), **ADAMW},
        ],
    )
    rates = [[s.group["lr"] for s in plain.states]]
    engine = start(model, model_parameters=groups, lr_scheduler=lambda o: LambdaLR(o, lambda n: 1 / (n + 1)))
    for i in range(4):
        step_both(engine, plain, i, dtype)
        for state, rate in zip(plain.states, rates[0]):
            state.group = {**state.group, "lr": rate * (1 / (i + 1))}
        plain.step(1.0)
    assert engine.optimizer.param_groups[0]["lr"] == 1e-3 / 5 and same(engine, plain)


@pytest.mark.parametrize("clipping", [0.0, 1e-3], ids=["taken", "dropped"])
def test_updates_guessed_in_backward_change_nothing(start, clipping):
    """A scheduler changes the rate after each step; the guess is told in time."""
    model = Net(torch.bfloat16)
    plain = Plain(copy.deepcopy(model))
    engine = start(
        model,
        placement="nvme",
        speculate=True,
        clipping=clipping,
        lr_scheduler=lambda o: LambdaLR(o, lambda n: 1 / (n + 1)),
    )
    for i in range(6):
        torch.manual_seed(i)
        engine.backward(engine(batch(i, torch.bfloat16)))
        while engine.stats()["guesses_unfinished"]:
            pass
        engine.step()
        torch.manual_seed(i)
        plain.backward(plain.model(batch(i, torch.bfloat16)))
        for state in plain.states:
            state.group = {**state.group, "lr": 1e-2 / (i + 1)}
        plain.step(engine.last_step.clip)
    stats = engine.stats()
    assert (stats["guesses_taken"] > 0, stats["guesses_dropped"] > 0) == (clipping == 0, clipping > 0)
    assert same(engine, plain)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_an_optimizer_and_a_scheduler_of_the_users_own(start, kind):
    model = Net(torch.float32)
    plain_model = copy.deepcopy(model)
    optimizer = kind(
        model.parameters(), lr=3e-3, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.05, foreach=True
    )
    scheduler = MultiStepLR(optimizer, [2], gamma=0.5)
    hyper = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.05}
    plain = Plain(
        plain_model,
        [{"params": list(plain_model.parameters()), **hyper, "decoupled": kind is torch.optim.AdamW}],
    )
    engine = start(model, optimizer, scheduler)
    for i in range(4):
        step_both(engine, plain, i)
        for state in plain.states:
            state.group = {**state.group, "lr": 3e-3 * (0.5 if i >= 2 else 1)}
        plain.step(1.0)
    assert same(engine, plain) and optimizer.param_groups[0]["lr"] == 1.5e-3


def test_what_an_optimizer_may_not_be(start):
    model = Net(torch.float32)
    parameters = list(model.parameters())
    with pytest.raises(ValueError, match=r"torch\.optim\.SGD\(differentiable=True\)"):
        start(model, torch.optim.SGD(parameters, differentiable=True))
    with pytest.raises(ValueError, match="format 'compact' holds bf16 weights, and none"):
        start(model, format="compact")
    with pytest.raises(ValueError, match=r"body\.0\.weight.*in no parameter group"):
        start(model, torch.optim.AdamW(parameters[1:]))
    with pytest.raises(ValueError, match="not the model's"):
        start(model, torch.optim.AdamW([*parameters, nn.Parameter(torch.ones(1))]))
    with pytest.raises(ValueError, match="unknown keys"):
        start(model, model_parameters=[{"params": parameters, "learning_rate": 1}])
    with pytest.raises(ValueError, match="ReduceLROnPlateau"):
        start(model, lr_scheduler=ReduceLROnPlateau)
    model = Net(torch.float32)
    model(batch(0)).backward()
    model.head.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"head\.weight is frozen, and has a gradient already"):
        start(model)
    model = Net(torch.bfloat16)
    own = overspill.optim.AdamW(model.parameters(), format="8bit")
    with pytest.raises(ValueError, match="format is 'compact' in the configuration, '8bit' in the optimizer"):
        start(model, own, format="compact")
    own.param_groups[0]["format"] = "exact"
    own.add_param_group({"params": [nn.Parameter(torch.ones(1).bfloat16())], "format": "8bit"})
    with pytest.raises(ValueError, match="differ in format"):
        start(model, own)


def test_momentum_that_comes_late_is_refused(start):
    model = Net(torch.float32)
    engine = start(model, torch.optim.SGD(model.parameters(), lr=0.1))
    engine.backward(engine(batch(0)))
    engine.step()
    engine.optimizer.param_groups[0]["momentum"] = 0.9
    engine.backward(engine(batch(1)))
    with pytest.raises(ValueError, match=r"momentum = 0\.9 came after overspill\.initialize"):
        engine.step()


# ---- formats


def trained(start, kind, placement="host", threads=1, steps=4, saved=None, opened=None, **settings):
    """Weights, masters and states after some steps; saved after half of them, or opened there."""
    model = Net(torch.bfloat16)
    section = {"type": kind, "lr": 1e-2} | ({"momentum": 0.9} if kind == "SGD" else {})
    engine = start(model, section=section, placement=placement, threads=threads, **settings)
    if opened is not None:
        engine.load_checkpoint(opened)
    for i in range(steps // 2 if opened is not None else 0, steps):
        if saved is not None and i == steps // 2:
            engine.save_checkpoint(saved)
        torch.manual_seed(i)
        engine.backward(engine(batch(i, torch.bfloat16)))
        engine.step()
    parameters = dict(model.named_parameters())
    return {
        **{name: engine.weight(p, torch.float32) for name, p in parameters.items()},
        **{f"{n}.{k}": v for n, p in parameters.items() for k, v in engine.optimizer_state(p).items()},
    }


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize(
    "kind, form",
    [
        (kind, form)
        for kind in ("AdamW", "Adagrad", "Lion", "SGD", "RMSprop", "NAdam", "Adamax", "Adadelta")
        for form in ("exact", "compact", "8bit")
        if (kind, form) != ("Adamax", "8bit")  # which is refused
    ],
)
def test_formats_by_the_configuration(start, kind, form, tmp_path):
    """Placement and threads change no bit, the seed does where something is rounded; checkpoints go on."""
    first = trained(start, kind, format=form, clipping=0.5, saved=str(tmp_path / "two"))
    assert all(value.dtype is torch.float32 and value.isfinite().all() for value in first.values())
    assert equal(first, trained(start, kind, format=form, clipping=0.5, placement="nvme", threads=2))
    assert equal(first, trained(start, kind, "half", format=form, clipping=0.5, opened=str(tmp_path / "two")))
    assert equal(first, trained(start, kind, format=form, clipping=0.5, seed=7)) == (form == "exact")
    if form != "exact":
        exact = trained(start, kind, clipping=0.5)
        worst = max((first[key] - exact[key]).abs().max() for key in first)
        assert 0 < worst < 0.5
        with pytest.raises(overspill.CheckpointError, match=f"format .* is {form} there, exact here"):
            trained(start, kind, opened=str(tmp_path / "two"))


def test_a_format_of_an_own_optimizer_is_taken_over(start):
    def run(make, **settings):
        model = Net(torch.bfloat16)
        engine = start(model, make(model), **settings)
        for i in range(3):
            torch.manual_seed(i)
            engine.backward(engine(batch(i, torch.bfloat16)))
            engine.step()
        return {name: engine.weight(p, torch.float32) for name, p in model.named_parameters()}

    own = run(lambda m: overspill.optim.Lion(m.parameters(), lr=1e-3, format="8bit", seed=3))
    section = {"type": "Lion", "lr": 1e-3, "weight_decay": 0.0}
    assert equal(own, run(lambda m: None, section=section, format="8bit", seed=3))
    assert not equal(own, run(lambda m: None, section=section, format="8bit"))


# ---- accumulation, skipped steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_accumulation_adds_in_fp32(start, dtype):
    model = Net(dtype)
    plain = Plain(copy.deepcopy(model), accumulation=3)
    engine = start(model, accumulation=3, clipping=0.1)
    for i in range(9):
        step_both(engine, plain, i, dtype)
        if i % 3 == 2:
            assert engine.last_step.norm == pytest.approx(plain.norm(), rel=1e-6)
            plain.step(engine.last_step.clip)
    assert engine.global_steps == 3 and engine.micro_steps == 9 and same(engine, plain)


def test_a_step_with_a_non_finite_gradient_is_skipped_and_counted(start):
    model = Net(torch.float32)
    plain = Plain(copy.deepcopy(model))
    engine = start(model, lr_scheduler=lambda o: LambdaLR(o, lambda n: 1.0))
    for i in range(3):
        step_both(engine, plain, i)
        if i == 1:
            skip_one(engine)
        plain.step(1.0)
    assert same_but_buffers(engine, plain)
    assert engine.stats()["skipped_steps"] == 1 and engine.last_step.step == 3 and engine.global_steps == 4
    assert engine.lr_scheduler.last_epoch == 3


def skip_one(engine):
    bad = batch(7)
    bad[0, 0] = float("inf")
    engine.backward(engine.module.head(bad @ torch.ones(16, 32)).sum())
    engine.step()
    assert engine.last_step.skipped
    assert engine.grad(engine.module.head.weight) is None


def same_but_buffers(engine, plain):
    return all(
        torch.equal(engine.weight(p), q) for p, q in zip(engine.module.parameters(), plain.model.parameters())
    )


# ---- checkpoints


def run(engine, steps):
    for i in steps:
        engine.backward(engine(batch(i) + torch.rand(1) + random.random()))
        engine.step()


@pytest.mark.parametrize("placement", ["host", "half", "nvme"])
def test_resuming_gives_the_same_bits(start, tmp_path, placement):
    def fresh(job):
        return start(
            Net(torch.bfloat16).float() if placement == "host" else Net(torch.float32),
            placement=placement,
            lr_scheduler=lambda o: OneCycleLR(o, 1e-2, total_steps=10),
            job=job,
        )

    torch.manual_seed(5)
    random.seed(5)
    engine = fresh("first")
    run(engine, range(3))
    engine.save_checkpoint(
        tmp_path / "checkpoint", {"epoch": 2, "best": float("inf"), "pair": (1, "x"), 3: None}
    )
    run(engine, range(3, 6))
    other = fresh("second")
    run(other, range(1))
    client = other.load_checkpoint(tmp_path / "checkpoint")
    assert client == {"epoch": 2, "best": float("inf"), "pair": (1, "x"), 3: None}
    assert other.global_steps == 3 and other.lr_scheduler.last_epoch == 3
    run(other, range(3, 6))
    ours, theirs = engine.state_dict(), other.state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert engine.optimizer.param_groups[0]["lr"] == other.optimizer.param_groups[0]["lr"]


def test_a_checkpoint_holds_plain_values_only(start, tmp_path):
    engine = start(Net(torch.float32))
    with pytest.raises(TypeError, match=r"client_state\.a\[1\] is a tensor \(1025,\).* 4096 bytes at most"):
        engine.save_checkpoint(tmp_path / "checkpoint", {"a": [1, torch.ones(1025)]})
    assert not (tmp_path / "checkpoint").exists()
    small = {"a": (torch.arange(3), torch.tensor(0.5, dtype=torch.bfloat16)), "b": torch.empty(0, 2)}
    engine.save_checkpoint(tmp_path / "small", small)
    found = engine.load_checkpoint(tmp_path / "small")
    for mine, given in zip((*found["a"], found["b"]), (*small["a"], small["b"]), strict=True):
        assert mine.dtype is given.dtype and torch.equal(mine, given)
    engine.save_checkpoint(tmp_path / "checkpoint")
    extra = json.loads(overspill._core.manifest(str(tmp_path / "checkpoint"))["extra_json"])
    assert extra["client_state"] == {} and "body.1.running_mean" in extra["buffers"]


class Held(torch.optim.lr_scheduler.LambdaLR):
    """A schedule that holds what is given."""

    def __init__(self, optimizer, held):
        super().__init__(optimizer, lambda step: 1 / (step + 1))
        self.held = held


class Bare:
    """A schedule without a state_dict."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        pass


def test_a_scheduler_that_no_checkpoint_can_have_is_named_when_the_engine_is_made(start, tmp_path):
    with pytest.warns(UserWarning, match=r"lr_scheduler\.held is a .*engine\.save_checkpoint is refused"):
        engine = start(Net(torch.float32), lr_scheduler=lambda optimizer: Held(optimizer, print))
    with pytest.raises(TypeError, match=r"lr_scheduler\.held is a builtins\."):
        engine.save_checkpoint(tmp_path / "checkpoint")
    with pytest.warns(UserWarning, match="lr_scheduler is a test_engine.Bare, which has no state_dict"):
        start(Net(torch.float32), lr_scheduler=Bare)
    rates = torch.tensor([0.5, 2.0])
    engine = start(Net(torch.float32), lr_scheduler=lambda optimizer: Held(optimizer, rates))
    engine.save_checkpoint(tmp_path / "checkpoint")
    other = start(Net(torch.float32), lr_scheduler=lambda optimizer: Held(optimizer, torch.zeros(2)))
    other.load_checkpoint(tmp_path / "checkpoint")
    assert torch.equal(other.lr_scheduler.held, rates)


def test_a_checkpoint_of_another_model_is_refused_before_anything_changes(start, tmp_path):
    engine = start(Net(torch.float32), job="a")
    engine.save_checkpoint(tmp_path / "checkpoint")
    model = Net(torch.float32)
    model.body[1] = nn.BatchNorm1d(32, track_running_stats=False)
    model.head = nn.Linear(32, 5)
    other = start(model, job="b")
    before = other.state_dict()
    with pytest.raises((ValueError, overspill.CheckpointError)):
        other.load_checkpoint(tmp_path / "checkpoint")
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())


# ---- what the engine refuses or passes on


@pytest.mark.parametrize("dtype", [torch.complex64])
def test_trainable_dtypes_that_are_not_supported(start, dtype):
    with pytest.raises(
        ValueError, match=r"body\.0\.weight is trainable in torch\.\w+, which is not supported yet: use model"
    ):
        start(Net(dtype))


def test_frozen_parameters_may_have_any_dtype(start):
    model = Net(torch.float32)
    for dtype in (torch.float16, torch.float64, torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn):
        value = torch.ones(5).to(dtype)
        model.register_parameter(str(dtype)[6:], nn.Parameter(value, requires_grad=False))
    engine = start(model)
    run(engine, range(2))
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert (engine.weight(parameter).float() == 1).all(), name


def test_a_loader_is_made_of_training_data(config):
    settings = config() | {"train_micro_batch_size_per_gpu": 3}
    engine, _, loader, _ = overspill.initialize(
        Net(torch.float32), settings, training_data=torch.randn(6, 16)
    )
    assert [x.shape for x in loader] == [(3, 16), (3, 16)]
    engine.close()


def test_attributes_of_the_model_and_of_the_engine(start):
    engine = start(Net(torch.float32))
    assert engine.head is engine.module.head and engine.plan_text and engine.stats()["step"] == 0
    assert engine.eval().module.training is False and engine.train().training
    assert engine.last_step is None
    engine.synchronize()
    with pytest.raises(AttributeError, match="nothing_like_it"):
        engine.nothing_like_it  # noqa: B018
    with pytest.raises(ValueError, match="no parameter of this engine"):
        engine.grad(nn.Parameter(torch.ones(1)))


def test_report_adds_up(tmp_path):
    """Every second of a step is in one of three parts, and its bytes are those that the plan says."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).bfloat16()
    config = {"budget": {"host": "16MiB", "nvme": [str(tmp_path)]}, "engine": {"placement": "nvme"}}
    engine = overspill.initialize(model, config)[0]
    assert engine.report() is None
    for _ in range(3):
        loss = engine(torch.ones(4, 64, dtype=torch.bfloat16)).float().pow(2).mean()
        time.sleep(0.05)
        engine.backward(loss)
        engine.step()
        engine.synchronize()
    report = engine.report()
    parts = ("compute_seconds", "call_seconds", "wait_seconds")
    assert report["total_seconds"] == pytest.approx(sum(report[part] for part in parts))
    assert report["forward_seconds"] >= 0.05  # the sleep came before backward
    assert report["backward_seconds"] > 0
    plan = engine._core.plan.as_dict()
    assert report["written_bytes"] == plan["nvme_written_bytes_per_step"]
    assert 0 < report["read_bytes"] <= 2 * plan["nvme_read_bytes_per_step"]
    found = engine.predict([16 << 20, 1])
    assert found["measured"]["steps"] == 1  # the third
    assert found["measured"]["forward_seconds"] == pytest.approx(report["forward_seconds"])
    assert found["limit"] in ("compute", "disk")
    assert found["step_seconds"] >= found["bound_seconds"] > 0.05
    same, too_small = found["budgets"]
    assert same["step_seconds"] == found["step_seconds"]
    assert not too_small["possible"]
    assert f"predicted {found['step_seconds']:.2f} s" in found["text"]
    engine.close()
