"""overspill.optim, the update alone: against torch's own optimizers, its state_dict both ways, formats, threads."""

import copy
import io

import pytest
import torch
from torch import nn

from overspill import optim

STEPS = 100

# ours, torch's, arguments of both
PAIRS = {
    "adamw": (optim.AdamW, torch.optim.AdamW, {"lr": 1e-2}),
    "adamw_decay": (
        optim.AdamW,
        torch.optim.AdamW,
        {"lr": 1e-2, "weight_decay": 0.3, "betas": (0.8, 0.95), "eps": 1e-5},
    ),
    "adamw_maximize": (optim.AdamW, torch.optim.AdamW, {"lr": 1e-2, "maximize": True}),
    "adam": (optim.Adam, torch.optim.Adam, {"lr": 1e-2}),
    "adam_l2": (optim.Adam, torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "adagrad": (optim.Adagrad, torch.optim.Adagrad, {}),
    "adagrad_all": (
        optim.Adagrad,
        torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.1, "initial_accumulator_value": 0.5, "eps": 1e-6},
    ),
    "adagrad_maximize": (optim.Adagrad, torch.optim.Adagrad, {"maximize": True}),
    "sgd": (optim.SGD, torch.optim.SGD, {"lr": 1e-2}),
    "sgd_l2": (optim.SGD, torch.optim.SGD, {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    "momentum": (optim.SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "dampened": (
        optim.SGD,
        torch.optim.SGD,
        {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    ),
    "rmsprop": (optim.RMSprop, torch.optim.RMSprop, {"lr": 1e-3}),
    "rmsprop_l2": (optim.RMSprop, torch.optim.RMSprop, {"lr": 1e-3, "weight_decay": 0.1, "maximize": True}),
    "rmsprop_momentum": (optim.RMSprop, torch.optim.RMSprop, {"lr": 1e-3, "alpha": 0.9, "momentum": 0.9}),
    "nadam": (optim.NAdam, torch.optim.NAdam, {}),
    "nadam_l2": (optim.NAdam, torch.optim.NAdam, {"weight_decay": 0.1, "momentum_decay": 0.1}),
    "nadam_decoupled": (
        optim.NAdam,
        torch.optim.NAdam,
        {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True},
    ),
    "adamax": (optim.Adamax, torch.optim.Adamax, {}),
    "adamax_l2": (optim.Adamax, torch.optim.Adamax, {"weight_decay": 0.1, "maximize": True}),
    "adadelta": (optim.Adadelta, torch.optim.Adadelta, {}),
    "adadelta_l2": (
        optim.Adadelta,
        torch.optim.Adadelta,
        {"lr": 0.5, "weight_decay": 0.1, "maximize": True},
    ),
    "nesterov": (optim.SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
}
FORMATS = [
    (torch.float32, "fp32"),
    (torch.bfloat16, "exact"),
    (torch.bfloat16, "compact"),
    (torch.bfloat16, "8bit"),
    (torch.float16, "fp16"),
]
FAMILY = [
    (optim.AdamW, {"lr": 1e-2}),
    (optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    (optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    (optim.Lion, {"lr": 1e-3, "weight_decay": 0.1}),
    (optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    (optim.SGD, {"lr": 1e-2}),
    (optim.RMSprop, {"lr": 1e-3, "momentum": 0.9}),
    (optim.NAdam, {"weight_decay": 0.1}),
    (optim.Adamax, {}),
    (optim.Adadelta, {"lr": 0.5}),
]


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    make = lambda *shape: nn.Parameter(torch.randn(*shape, generator=generator).to(dtype))  # noqa: E731
    return [
        make(37, 53),
        make(1),
        nn.Parameter(make(8, 3, 5, 5).to(memory_format=torch.channels_last)),
        make(300_001),
    ]


def give_gradients(parameters, step, skip=()):
    generator = torch.Generator().manual_seed(step + 1)
    for i, p in enumerate(parameters):
        drawn = (0.1 * torch.randn(p.shape, generator=generator) + 0.05 * p.detach().float()).to(p.dtype)
        p.grad = None if i in skip else drawn


def distance(a, b):
    """The largest difference, relative to the largest value of the tensor."""
    return ((a - b).abs().max() / b.abs().max()).item()


@pytest.mark.parametrize("name", PAIRS)
def test_fp32_follows_torch_for_100_steps(name):
    ours_type, theirs_type, arguments = PAIRS[name]
    ours, theirs = parameters(), parameters()
    optimizer, reference = ours_type(ours, **arguments), theirs_type(theirs, **arguments)
    for step in range(STEPS):
        skip = (
            (1,) if step % 3 == 1 else ()
        )  # a gradient that is absent leaves parameter and step count alone
        give_gradients(theirs, step, skip)
        for a, b in zip(ours, theirs):
            a.grad = None if b.grad is None else b.grad.clone()
        optimizer.step()
        reference.step()
    worst = max(distance(a.detach(), b.detach()) for a, b in zip(ours, theirs))
    print(f"{name}: {worst:.2e}")
    assert worst <= 1e-6


@pytest.mark.parametrize("name", PAIRS)
def test_state_dict_goes_to_torch_and_back(name):
    ours_type, theirs_type, arguments = PAIRS[name]
    ours, theirs = parameters(), parameters()
    optimizer, reference = ours_type(ours, **arguments), theirs_type(theirs, **arguments)
    for step in range(3):
        give_gradients(ours, step)
        optimizer.step()
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with torch.no_grad():
        for a, b in zip(ours, theirs):
            b.copy_(a)
    for step in range(3, 6):
        give_gradients(theirs, step)
        reference.step()
        give_gradients(ours, step)
        optimizer.step()
    back = ours_type(parameters(), **arguments)
    back.load_state_dict(reference.state_dict())
    with torch.no_grad():
        for a, b in zip(back.param_groups[0]["params"], theirs):
            a.copy_(b)
    for step in range(6, 9):
        for params, o in ((ours, optimizer), (back.param_groups[0]["params"], back)):
            give_gradients(params, step)
            o.step()
    for a, b in zip(ours, back.param_groups[0]["params"]):
        assert distance(a.detach(), b.detach()) <= 1e-6


@pytest.mark.parametrize(
    "kind, arguments, dtype, form",
    [
        (*member, *held)
        for member in FAMILY
        for held in FORMATS
        if (member[0], held[1]) != (optim.Adamax, "8bit")  # which is refused: test_rmsprop.py
    ],
)
def test_going_on_from_a_state_dict_changes_no_bit(kind, arguments, dtype, form):
    straight, first = parameters(dtype), parameters(dtype)
    one = kind(straight, format=form, threads=1, seed=3, **arguments)
    two = kind(first, format=form, threads=2, seed=3, **arguments)
    for step in range(4):
        for params, o in ((straight, one), (first, two)):
            give_gradients(params, step)
            o.step()
        if step == 1:
            file = io.BytesIO()
            torch.save({"model": [p.detach() for p in first], "optimizer": two.state_dict()}, file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            first = [nn.Parameter(p) for p in saved["model"]]
            two = kind(first, format=form, threads=2, seed=3, **arguments)
            two.load_state_dict(saved["optimizer"])
    for a, b in zip(straight, first):
        assert torch.equal(a, b)
    for p, q in zip(straight, first):
        for name, value in one.state[p].items():
            assert torch.equal(value, two.state[q][name]), name


def test_exact_is_fp32_followed_by_the_split():
    narrow = parameters(torch.bfloat16)
    wide = [nn.Parameter(p.detach().float()) for p in narrow]
    exact, reference = optim.AdamW(narrow, lr=1e-2), optim.AdamW(wide, lr=1e-2)
    for step in range(10):
        give_gradients(narrow, step)
        for a, b in zip(narrow, wide):
            b.grad = a.grad.float()
        exact.step(grad_scale=0.5)
        reference.step(grad_scale=0.5)
    for a, b in zip(narrow, wide):
        lo = exact.state[a]["lo"]
        high = a.detach().view(torch.int16).to(torch.int32) & 0xFFFF
        joined = ((high << 16) + lo.to(torch.int32)).view(torch.float32)
        assert torch.equal(joined, b)


@pytest.mark.parametrize("form", ["exact", "compact", "8bit"])
def test_narrow_formats_learn(form):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)).to(torch.bfloat16)
    x = torch.randn(256, 32).to(torch.bfloat16)
    y = x[:, :1] * x[:, 1:2]
    optimizer = optim.AdamW(model.parameters(), lr=3e-3, format=form)
    losses = []
    for _ in range(150):
        loss = (model(x) - y).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_schedulers_groups_closures_and_versions():
    a, b = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    optimizer = optim.SGD([{"params": [a], "lr": 1.0}, {"params": [b]}], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def closure():
        optimizer.zero_grad()
        loss = a.sum() + b.sum()
        loss.backward()
        return loss

    version = a._version
    assert optimizer.step(closure).item() == 10
    scheduler.step()
    optimizer.step(closure)
    assert torch.allclose(a, torch.full((5,), -0.5)) and torch.allclose(b, torch.full((5,), 0.85))
    assert a._version > version


def test_norm_and_scale():
    params = parameters()
    optimizer = optim.AdamW(params)
    give_gradients(params, 0)
    expected = torch.nn.utils.get_total_norm([p.grad.double() for p in params])
    assert torch.allclose(optimizer.grad_norm(), expected, rtol=1e-12)
    params[0].grad[3, 3] = float("nan")
    assert optimizer.grad_norm() == float("inf")


def test_what_is_refused():
    with pytest.raises(ValueError, match="float64 on cpu"):
        optim.AdamW([nn.Parameter(torch.zeros(3, dtype=torch.float64))])
    with pytest.raises(ValueError, match="strides"):
        optim.AdamW([torch.zeros(4, 4)[:, :2].requires_grad_()])
    with pytest.raises(ValueError, match="'8bit' does not hold"):
        optim.AdamW([nn.Parameter(torch.zeros(3))], format="8bit")
    with pytest.raises(ValueError, match="lr = -1"):
        optim.AdamW([nn.Parameter(torch.zeros(3))], lr=-1)
    with pytest.raises(ValueError, match="betas"):
        optim.Lion([nn.Parameter(torch.zeros(3))], betas=(0.9, 1.0))
    with pytest.raises(ValueError, match=r"rho = 1.0 must be in \[0, 1\)"):
        optim.Adadelta([nn.Parameter(torch.zeros(3))], rho=1.0)
    with pytest.raises(ValueError, match="momentum_decay = -1 must be at least 0"):
        optim.NAdam([nn.Parameter(torch.zeros(3))], momentum_decay=-1)
    with pytest.raises(ValueError, match="nesterov"):
        optim.SGD([nn.Parameter(torch.zeros(3))], nesterov=True)
    p = nn.Parameter(torch.zeros(3))
    reference = torch.optim.AdamW([p], amsgrad=True)
    p.grad = torch.ones(3)
    reference.step()
    with pytest.raises(ValueError, match="amsgrad"):
        optim.AdamW([nn.Parameter(torch.zeros(3))]).load_state_dict(reference.state_dict())
    plain = optim.AdamW([p])
    plain.step()
    broken = copy.deepcopy(plain.state_dict())
    broken["state"][0]["exp_avg"] = torch.zeros(2)
    with pytest.raises(ValueError, match="exp_avg in the state has 8 bytes"):
        optim.AdamW([nn.Parameter(torch.zeros(3))]).load_state_dict(broken)
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        optim.AdamW(embedding.parameters()).step()


@pytest.mark.parametrize("kind", sorted({kind.__name__ for kind, _ in FAMILY}))
def test_options_of_torch_that_change_no_result_are_taken_and_others_named(kind):
    def stepped(**options):
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 40))
        optimizer = getattr(optim, kind)([parameter], lr=0.1, **options)
        parameter.grad = torch.linspace(2, -1, 40)
        optimizer.step()
        assert not {"foreach", "fused", "capturable"} & set(optimizer.param_groups[0])
        return parameter.detach()

    plain = stepped()
    taken = {"foreach": True, "fused": None, "capturable": False, "amsgrad": False, "centered": False}
    assert torch.equal(stepped(**taken), plain)
    for option in ("amsgrad", "centered", "differentiable"):
        with pytest.raises(ValueError, match=rf"{kind}\({option}=True\) is not supported: .*torch\.optim"):
            stepped(**{option: True})
    with pytest.raises(TypeError, match=rf"{kind}\(\) has no argument 'momentun'"):
        stepped(momentun=0.9)
