"""DeepSpeed's schedules of rates and betas."""

import pytest
import torch
from deepspeed_scene import SCHEDULER, step
from torch import nn

from overspill import deepspeed
from overspill.deepspeed import lr_schedules

pytestmark = pytest.mark.usefixtures("no_group")


def test_a_schedule_of_another_optimizer_is_stepped_and_drives_that_one_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    other = torch.optim.SGD(model.parameters(), lr=8.0)
    schedule = torch.optim.lr_scheduler.StepLR(other, 1, gamma=0.5)
    config = {
        "optimizer": {"type": "Adam", "params": {"lr": 0.25}},
        "scheduler": SCHEDULER,
        "overspill": {"budget": {"host": "32MiB"}},
    }
    with pytest.warns(
        UserWarning, match="made on another optimizer than the engine's: as in DeepSpeed it is"
    ):
        engine, optimizer, _, found = deepspeed.initialize(model=model, config=config, lr_scheduler=schedule)
    assert found is schedule is engine.lr_scheduler
    step(engine, 2)
    assert other.param_groups[0]["lr"] == 2.0 and optimizer.param_groups[0]["lr"] == 0.25
    engine.destroy()


def test_an_unknown_warmup_is_log():
    """As there, with a warning."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.warns(UserWarning, match="warmup_type = 'sine': log is taken, as in DeepSpeed"):
        schedule = lr_schedules.WarmupLR(optimizer, warmup_num_steps=9, warmup_type="sine")
    assert schedule.warmup_type == "log"


@pytest.mark.parametrize("warmup_type", ["log", "linear"])
@pytest.mark.parametrize("kind, arguments", [("WarmupLR", {}), ("WarmupDecayLR", {"total_num_steps": 20})])
def test_the_rate_before_the_first_step_is_the_least(kind, arguments, warmup_type):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = lr_schedules.SCHEDULES[kind](
        optimizer, warmup_min_lr=0.1, warmup_max_lr=0.5, warmup_type=warmup_type, **arguments
    )
    assert schedule.get_lr() == schedule.get_last_lr() == [0.1]
    cosine = lr_schedules.WarmupCosineLR(optimizer, 20, warmup_min_ratio=0.1, warmup_type=warmup_type)
    assert cosine.get_lr() == cosine.get_last_lr() == [0.0]


def test_a_cycles_betas_are_pairs():
    weights = [nn.Parameter(torch.zeros(1))]
    arguments = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 4, "cycle_min_mom": 0.5}
    cycle = lr_schedules.OneCycle(torch.optim.Adam(weights), **arguments)
    assert cycle.get_mom() == [(0.9, 0.99)]
    cycle.step()
    assert cycle.get_mom() == [cycle.optimizer.param_groups[0]["betas"]] == [(pytest.approx(0.8), 0.99)]
    with pytest.warns(UserWarning, match="no betas"):
        assert lr_schedules.OneCycle(torch.optim.SGD(weights), **arguments).get_mom() is None


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("kind", lr_schedules.SCHEDULES)
def test_a_rate_that_is_a_tensor_stays_that_tensor(kind, shape):
    rate = torch.full(shape, 0.1, dtype=torch.float64)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
    arguments = {
        "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_momentum": False},
        "WarmupDecayLR": {"total_num_steps": 9},
        "WarmupCosineLR": {"total_num_steps": 9},
    }.get(kind, {})
    schedule = lr_schedules.SCHEDULES[kind](optimizer, **arguments)
    if kind == "WarmupLR":
        assert schedule.max_lrs == [0.1]  # and not the tensor, which changes
    for _ in range(2):
        held = optimizer.param_groups[0]["lr"]
        assert held is rate and rate.item() == pytest.approx(schedule.get_lr()[0])
        schedule.step()


def test_the_ratio_of_a_cosine_is_of_the_optimizers_own_rate():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = lr_schedules.WarmupCosineLR(optimizer, 9, warmup_num_steps=4, warmup_type="linear")
    assert schedule.get_lr_ratio() == 0.0
    schedule.step(2)
    assert schedule.get_lr_ratio() == 0.5 and schedule.get_lr() == [0.25]
