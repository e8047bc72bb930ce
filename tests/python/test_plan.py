"""The plan as an object: what it says of each unit adds up to what the core planned."""

import json

import pytest
import torch
from torch import nn

import overspill


def model():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(nn.Embedding(8192, 64), *layers, nn.Linear(64, 8192)).bfloat16()


@pytest.mark.parametrize("placement", ["host", "half", "nvme"])
def test_units_add_up_to_the_plan(start, placement):
    made = model()
    made[1].requires_grad_(False)
    plan = start(made, placement=placement).plan
    figures = plan.as_dict()
    assert plan.parameters == sum(p.numel() for p in made.parameters())
    for kind in ("weights", "states"):
        for tier in ("host", "nvme"):
            held = sum(getattr(getattr(unit, kind), tier) for unit in plan.units)
            assert held == figures[f"{kind}_{tier}_bytes"], (kind, tier)
    homes = {"host": {"host"}, "nvme": {"nvme"}, "half": {"host", "host+nvme"}}
    assert {unit.home for unit in plan.units} == homes[placement]
    frozen = [unit for unit in plan.units if not unit.trainable]
    assert frozen and all(unit.states.bytes == 0 for unit in frozen)
    assert plan.host_bytes <= plan.host_budget_bytes == 256 << 20
    assert (plan.nvme_written_bytes_per_step > 0) == (placement != "host")
    json.dumps(figures)


def test_a_plan_reads_well(start):
    engine = start(model(), placement="nvme")
    assert str(engine.plan) == engine.plan_text == engine._core.plan.text
    assert repr(engine.plan.units[0]).startswith(
        "<Unit '0': 524,288 parameters, weights on nvme, states on nvme, "
    )
    assert repr(engine.optimizer).startswith("OverspillOptimizer of AdamW, no step yet (\nParameter Group 0")
    engine.optimizer.step()
    assert repr(engine.optimizer).startswith("OverspillOptimizer of AdamW, step 1 (")
    assert repr(engine).startswith("Engine (0 steps, rank 0 of 1, cpu) of Sequential(")
    assert repr(engine.plan).startswith(f"<Plan: {len(engine.plan.units)} units, ")


def test_initialize_returns_a_named_tuple(config):
    rows = [torch.zeros(2, dtype=torch.long)] * 4
    settings = config() | {"train_micro_batch_size_per_gpu": 2}
    made = overspill.initialize(
        model(),
        settings,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer),
        training_data=rows,
    )
    engine, optimizer, dataloader, lr_scheduler = made
    assert made.engine is engine and made.optimizer is optimizer is engine.optimizer
    assert made.dataloader is dataloader and len(dataloader) == 2
    assert made.lr_scheduler is lr_scheduler is engine.lr_scheduler
    engine.close()
    assert made.lr_scheduler is lr_scheduler is engine.lr_scheduler
    engine.close()


def test_units_that_would_live_on_a_gpu():
    from overspill.cli.plan import plan

    config = {"budget": {"host": "1GiB", "device": "64MiB"}, "engine": {"device": "cuda"}}
    made = plan(model(), config)
    assert {unit.home for unit in made.units} == {"device"}
    assert made.device_bytes > sum(unit.weights.device + unit.states.device for unit in made.units) > 0
    assert not sum(unit.weights.host + unit.states.host for unit in made.units)
