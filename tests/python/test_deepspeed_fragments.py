"""Weights, states and gradients that a script of DeepSpeed reads and sets by hand, whole and in pieces."""

import pytest
import torch
from deepspeed_scene import made, step
from torch import nn

from overspill import deepspeed
from overspill.deepspeed import fragments, zero_params
from overspill.deepspeed.modules import MODULES
from overspill.deepspeed.refused import NotSupported

pytestmark = pytest.mark.usefixtures("no_group")


def test_a_weight_that_is_set_is_seen_where_it_was_used_right_before(tmp_path):
    placed = {"budget": {"host": "32MiB", "nvme": [str(tmp_path)]}, "engine": {"placement": "nvme"}}
    engine = made(overspill=placed)
    weight, bias = engine.module[0].weight, engine.module[0].bias
    assert weight.norm() > 0
    bias.data.fill_(7.0)
    fragments.safe_set_full_fp32_param(weight, torch.full((8, 8), 3.0))
    assert weight.norm() == 24.0
    weight.data.mul_(2.0)
    assert torch.equal(engine.weight(weight), torch.full((8, 8), 6.0))
    assert torch.equal(engine.weight(bias), torch.full((8,), 7.0))


def test_an_exact_weight_that_is_set_is_the_one_that_counts():
    engine = made(bf16={"enabled": True})
    weight = engine.module[0].weight
    value = torch.randn(8, 8) + 1e-4
    fragments.safe_set_full_fp32_param(weight, value)
    assert torch.equal(fragments.safe_get_full_fp32_param(weight), value)
    assert torch.equal(engine.weight(weight), value.bfloat16())
    x = torch.randn(2, 8).bfloat16()
    shown = nn.functional.linear(x, value.bfloat16(), engine.weight(engine.module[0].bias))
    assert torch.equal(engine.module[0](x), shown)
    with pytest.raises(ValueError, match=r"0.weight is \(8, 8\), and the value \(3,\)"):
        fragments.safe_set_full_fp32_param(weight, torch.zeros(3))
    with pytest.raises(ValueError, match="no engine has this parameter"):
        fragments.safe_set_full_fp32_param(nn.Parameter(torch.zeros(3)), torch.zeros(3))
    engine.destroy()


def test_states_and_gradients_that_are_set_make_the_update():
    engine, same = made(), made()
    for each in (engine, same):
        step(each, 2)
    weights = engine.module[0].weight, same.module[0].weight
    for key in ("exp_avg", "exp_avg_sq"):
        state = fragments.safe_get_full_optimizer_state(weights[1], key)
        fragments.safe_set_full_optimizer_state(weights[0], torch.zeros_like(state), key)
        assert not fragments.safe_get_full_optimizer_state(weights[0], key).any()
        fragments.safe_set_full_optimizer_state(weights[0], state, key)
    with pytest.raises(ValueError, match="has no state 'momentum': it has exp_avg, exp_avg_sq"):
        fragments.safe_set_full_optimizer_state(weights[0], torch.zeros(8, 8), "momentum")
    x = torch.full((2, 8), 3.0)
    same.backward(same(x).square().mean())
    engine.backward(engine(x).abs().mean())  # another loss, whose gradients are replaced
    for one, other in zip(engine.module.parameters(), same.module.parameters(), strict=True):
        fragments.safe_set_full_grad(one, fragments.safe_get_full_grad(other))
    for each in (engine, same):
        each.step()
    assert torch.equal(engine.weight(weights[0]), same.weight(weights[1]))
    engine.backward(engine(x).square().mean())
    before = fragments.safe_get_full_grad(weights[0])
    fragments.safe_update_full_grad_vectorized([weights[0]], lambda gradient, _: gradient * 2)
    assert torch.equal(fragments.safe_get_full_grad(weights[0]), before * 2)
    for each in (engine, same):
        each.destroy()


def test_a_parameter_of_stage_3_says_so():
    """Inside zero.Init, in a nested one and in a class that was made there, and in an engine; no other one."""
    plain = nn.Linear(3, 2)
    with deepspeed.zero.Init(), deepspeed.zero.Init():

        class Mine(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.own = nn.utils.skip_init(nn.Linear, 3, 2), nn.Parameter(torch.ones(5))

        model = Mine()
    ours = list(model.parameters())
    assert len({parameter.ds_id for parameter in ours}) == 3
    assert model.own.ds_numel == 5 and model.inner.weight.ds_shape == (2, 3)
    status = zero_params.ZeroParamStatus
    assert model.own.ds_status == status.NOT_AVAILABLE
    with deepspeed.zero.GatheredParameters(ours):
        assert model.own.ds_status == status.AVAILABLE
    assert model.own.ds_status == status.NOT_AVAILABLE
    is_zero_param = MODULES["deepspeed.runtime.zero.utils"]["is_zero_param"]
    for other in (plain.weight, nn.Linear(3, 2).weight):
        assert not is_zero_param(other) and not hasattr(other, "ds_id") and not hasattr(other, "ds_tensor")
    with pytest.raises(AssertionError, match=r"ZeRO-3 partitioned parameters.*call safe_get_full_grad"):
        fragments.safe_get_local_grad(plain.weight)
    engine = made(zero_optimization={"stage": 3})
    assert all(is_zero_param(parameter) for parameter in engine.module.parameters())
    engine.destroy()
    engine = made(zero_optimization={"stage": 2})
    assert not any(is_zero_param(parameter) for parameter in engine.module.parameters())
    engine.destroy()


def test_a_piece_is_read_and_its_data_set():
    """Of one rank the whole, flat."""
    engine = made(zero_optimization={"stage": 3})
    weight = engine.module[0].weight
    before = engine.weight(weight)
    assert weight.ds_tensor.shape == (weight.numel(),) and weight.ds_tensor.dtype == weight.dtype
    assert torch.equal(weight.ds_tensor, before.flatten())
    assert torch.equal(2 * weight.ds_tensor.clone(), 2 * before.flatten())
    of_data = weight.ds_tensor.data
    assert type(2 * of_data) is torch.Tensor
    assert torch.equal(torch.cat([weight.ds_tensor, weight.ds_tensor]), before.flatten().repeat(2))
    for given in (weight.ds_tensor, of_data):
        assert torch.equal(torch.zeros(weight.numel()).copy_(given), before.flatten())
        assert torch.equal(torch.zeros(weight.numel()).add_(given), before.flatten())
    for write in (
        lambda: weight.ds_tensor.fill_(1),
        lambda: weight.ds_tensor.__setitem__(0, 1.0),
        lambda: of_data.fill_(1),
        lambda: of_data.__setitem__(0, 1.0),
        lambda: of_data.view(-1).mul_(2),
        lambda: of_data.detach().fill_(1),
        lambda: weight.ds_tensor.data.narrow(0, 0, 2).zero_(),
        lambda: torch.add(before.flatten(), 1, out=of_data),
    ):
        with pytest.raises(NotSupported, match=r"call deepspeed\.utils\.safe_set_local_fp32_param"):
            write()
    assert torch.equal(engine.weight(weight), before)
    weight.ds_tensor.data = torch.full_like(weight.ds_tensor.data, 3.0)
    assert torch.equal(engine.weight(weight), torch.full_like(before, 3.0))
    with pytest.raises(ValueError, match=f"has {weight.numel()} elements, and the value has 2"):
        fragments.safe_set_local_fp32_param(weight, torch.zeros(2))
    step(engine)
    value = torch.rand(weight.numel())
    fragments.safe_set_local_optimizer_state(weight, value, "exp_avg")
    assert torch.equal(fragments.safe_get_full_optimizer_state(weight, "exp_avg"), value.view_as(before))
    assert torch.equal(fragments.safe_get_local_optimizer_state(weight, "exp_avg"), value)
    engine.destroy()


@pytest.mark.parametrize("is_given", [True, False])
def test_what_no_group_has_is_not_updated(is_given):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    groups = [{"params": [], "weight_decay": 0.5}, {"params": [layer.bias for layer in model]}]
    before = model[0].weight.detach().clone()
    config = {"overspill": {"budget": {"host": "32MiB"}}}
    if is_given:
        given = {"optimizer": torch.optim.AdamW(groups, lr=0.1)}
    else:
        given = {"model_parameters": groups}
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.1}}
    with pytest.warns(UserWarning, match=r"0.weight, 1.weight: in no parameter group: as in DeepSpeed"):
        engine = deepspeed.initialize(model=model, config=config, **given)[0]
    step(engine, 2)
    assert torch.equal(engine.weight(model[0].weight), before)
    assert engine.optimizer.state[model[0].bias]["step"] == 2
    engine.destroy()
