"""Several optimizers of one engine: what is refused, checkpoints, formats, steps that are left out. What scripts do
with them is compared in test_habits.py."""

from contextlib import closing

import pytest
import torch
from torch import nn

import overspill


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8), nn.GELU(), nn.Linear(8, 4)).to(dtype)


def optimizers_of(model, body=torch.optim.AdamW, head=torch.optim.SGD):
    return [
        body([*model[0].parameters(), *model[2].parameters()], lr=1e-2),
        head(model[4].parameters(), lr=0.05),
    ]


def settings(config, placement="host", **options):
    return {k: v for k, v in config(placement, **options).items() if k != "optimizer"}


def train(model, optimizers, steps):
    for i in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        x = torch.randn(6, 16, generator=torch.Generator().manual_seed(i)).to(next(model.parameters()).dtype)
        model(x).float().square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def weights_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(a, b):
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"clipping": 0.5}, "gradient_clipping = 0.5 works with one optimizer.*clip_grad_norm_"),
        ({"accumulation": 2}, "gradient_accumulation_steps = 2 works with one optimizer.*divide the loss"),
    ],
)
def test_options_that_mean_one_optimizer_are_refused(config, options, says):
    model = network()
    with pytest.raises(ValueError, match=says):
        overspill.initialize(model, settings(config, **options), optimizers_of(model))
    assert not torch.isnan(model[0].weight).any(), "nothing is changed"


def test_lists_that_cannot_be_trained_are_refused(config):
    model = network()
    with pytest.raises(ValueError, match="empty list"):
        overspill.initialize(model, settings(config), [])
    one = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="the same optimizer twice"):
        overspill.initialize(model, settings(config), [one, one])
    with pytest.raises(TypeError, match="is not supported: give an optimizer of torch"):
        overspill.initialize(model, settings(config), [one, "Muon"])
    with pytest.raises(ValueError, match=r"lr_scheduler.*make one on each optimizer"):
        scheduler = torch.optim.lr_scheduler.StepLR(one, 1)
        overspill.initialize(model, settings(config), [one], lr_scheduler=scheduler)
    with pytest.raises(ValueError, match=r"2.weight.*give initialize a list of optimizers"):
        overspill.initialize(model, settings(config), [torch.optim.SGD(model[0].parameters(), lr=0.1)])
    model = network(torch.bfloat16)
    seeds = [
        overspill.optim.AdamW(model[:3].parameters(), format="compact", seed=1),
        overspill.optim.AdamW(model[4].parameters(), format="compact", seed=2),
    ]
    with pytest.raises(ValueError, match=r"differ in seed: \[1, 2\]"):
        overspill.initialize(model, settings(config), seeds)


def test_calls_that_mean_one_optimizer_are_refused(config):
    model = network()
    engine, optimizers, *_ = overspill.initialize(model, settings(config), optimizers_of(model))
    with closing(engine):
        engine.backward(engine(torch.randn(3, 16)).square().mean())
        with pytest.raises(
            RuntimeError, match=r"engine.step steps one optimizer, and this engine has 2: call"
        ):
            engine.step()
        with pytest.raises(RuntimeError, match=r"engine.train_batch steps one optimizer"):
            engine.train_batch([torch.randn(3, 16)], lambda x: engine(x).sum())
        assert len(optimizers) == 2 and optimizers[1] is list(optimizers)[1]
        assert [len(group["params"]) for group in optimizers.param_groups] == [4, 2]
        before = weights_of(model)
        optimizers.step()
        assert engine.last_step.step == 2 and engine.last_step is optimizers[0].last_step
        optimizers.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        after = weights_of(model)
        assert not any(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("placement", ["host", "half", "nvme"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_has_the_states_of_all(config, tmp_path, placement, dtype):
    model = network(dtype)
    engine, optimizers, *_ = overspill.initialize(model, settings(config, placement), optimizers_of(model))
    with closing(engine):
        train(model, optimizers, range(3))
        optimizers[0].param_groups[0]["lr"], optimizers[1].param_groups[0]["lr"] = 5e-3, 0.02
        engine.save_checkpoint(tmp_path / "saved")
        train(model, optimizers, range(3, 6))
        expected = weights_of(model)
        state = {k: v.clone() for k, v in engine.optimizer_state(model[0].weight).items()}
    model = network(dtype)
    engine, optimizers, *_ = overspill.initialize(model, settings(config, placement), optimizers_of(model))
    with closing(engine):
        engine.load_checkpoint(tmp_path / "saved")
        assert [group["lr"] for group in optimizers.param_groups] == [5e-3, 0.02]
        train(model, optimizers, range(3, 6))
        assert_same(weights_of(model), expected)
        assert_same(dict(engine.optimizer_state(model[0].weight)), state)
        assert not engine.optimizer_state(model[4].weight)  # SGD without momentum


def test_a_checkpoint_of_other_parts_is_refused(config, tmp_path):
    model = network()
    engine, *_ = overspill.initialize(model, settings(config), optimizers_of(model))
    with closing(engine):
        engine.save_checkpoint(tmp_path / "saved")
    model = network()
    engine, *_ = overspill.initialize(model, settings(config), optimizers_of(model)[::-1])
    with closing(engine), pytest.raises((overspill.CheckpointError, ValueError)):
        engine.load_checkpoint(tmp_path / "saved")


@pytest.mark.filterwarnings("ignore:overspill. the engine has no update of torch.optim.Muon")
def test_a_checkpoint_of_two_kinds_in_another_order_is_refused(config, tmp_path):
    def made(order):
        model = network()
        matrices, rest = ([p for p in model.parameters() if (p.ndim == 2) == wide] for wide in (True, False))
        pair = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-3)]
        return overspill.initialize(model, settings(config), pair[::order])[0]

    with closing(made(1)) as engine:
        engine.save_checkpoint(tmp_path / "saved")
    words = (
        r"the states of torch\.optim\.Muon, whose own code makes the steps, and here the engine updates AdamW"
    )
    with closing(made(-1)) as engine, pytest.raises(overspill.CheckpointError, match=words):
        engine.load_checkpoint(tmp_path / "saved")


def test_formats_are_those_of_each(config):
    """As without an engine."""

    def pair(model):
        body = [*model[0].parameters(), *model[2].parameters()]
        return [
            overspill.optim.AdamW(body, lr=1e-2, format="compact"),
            overspill.optim.SGD(model[4].parameters(), lr=0.05, momentum=0.9, format="exact"),
        ]

    plain, model = network(torch.bfloat16), network(torch.bfloat16)
    train(plain, pair(plain), range(1))
    engine, optimizers, *_ = overspill.initialize(model, settings(config), pair(model))
    with closing(engine):
        train(model, optimizers, range(1))
        assert_same(weights_of(model[4]), weights_of(plain[4]))
        for name, value in weights_of(
            model
        ).items():  # compact rounds at random, by a weight's place in its unit
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("head", [torch.optim.SGD, torch.optim.RAdam])
@pytest.mark.filterwarnings("ignore:overspill. the engine has no update")
def test_a_nan_leaves_out_the_step_of_its_part(config, placement, head):
    model = network()
    engine, (body, head), *_ = overspill.initialize(
        model, settings(config, placement), optimizers_of(model, head=head)
    )
    with closing(engine):
        engine(torch.randn(3, 16)).square().mean().backward()
        kept = model[4].bias.grad
        kept.fill_(torch.nan)
        before = weights_of(model)
        body.step()
        assert not engine.last_step.skipped
        with pytest.warns(
            UserWarning, match="a step is skipped, because the gradient of 4.bias has an inf or a NaN"
        ):
            head.step()
        after = weights_of(model)
        assert engine.last_step.skipped and engine.last_step.not_finite == "4.bias"
        assert all(torch.equal(before[name], after[name]) == name.startswith("4") for name in before)
        assert model[4].bias.grad is None and model[0].bias.grad is not None


@pytest.mark.parametrize("head", [torch.optim.SGD, torch.optim.RAdam])
@pytest.mark.filterwarnings("ignore:overspill. the engine has no update")
def test_a_nan_of_another_part_leaves_out_nothing(config, head):
    model = network()
    engine, (body, head), *_ = overspill.initialize(model, settings(config), optimizers_of(model, head=head))
    with closing(engine):
        engine(torch.randn(3, 16)).square().mean().backward()
        kept = model[0].bias.grad
        kept.fill_(torch.nan)
        before = weights_of(model)
        head.step()
        after = weights_of(model)
        assert not engine.last_step.skipped
        assert all(torch.equal(before[name], after[name]) != name.startswith("4") for name in before)
        with pytest.warns(UserWarning, match=r"0\.bias has an inf or a NaN"):
            body.step()


def test_of_several_ranks_they_are_refused(config):
    from overspill import handover

    model = network()
    with pytest.raises(overspill.RankError, match="several optimizers over one model train on one rank"):
        handover.groups(
            model, overspill.Config.read(settings(config)), optimizers_of(model), None, alone=False
        )


def test_of_several_ranks_one_that_has_stepped_is_refused(config):
    """Each rank would take its part of its own states, and those may differ."""
    from overspill import handover

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settled = overspill.Config.read(settings(config))
    assert len(handover.groups(model, settled, optimizer, None, alone=False)) == 1
    train(model, [optimizer], range(1))
    with pytest.raises(overspill.RankError, match=r"the SGD has made steps already.*load_checkpoint"):
        handover.groups(model, settled, optimizer, None, alone=False)
