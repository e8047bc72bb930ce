"""What of a model is held between its calls, and what autograd saves of it for backward."""

import copy
import weakref

import pytest
import torch
from scene import batch, held, loss_of, mlp
from torch import nn

from overspill import leases, showing


def test_nothing_of_the_model_is_held_between_forward_and_backward(start_and_restore):
    model = mlp()
    engine = start_and_restore(model, settings={"placement": "nvme"})
    loss = loss_of(engine, batch())
    assert held() == ([], 0)
    loss.backward()
    assert held() == ([], 0)


class Uncalled(nn.Module):
    """Uses the weights of its layers, never the layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.held = []

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(nn.functional.linear(x, layer.weight, layer.bias))
            self.held.append(len(held()[0]))
        return x


def test_weights_used_outside_their_modules_do_not_pile_up(start_and_restore):
    model = Uncalled()
    plain = copy.deepcopy(model)
    engine = start_and_restore(model, settings={"placement": "nvme"})
    loss_of(engine, batch()).backward()
    loss_of(plain, batch()).backward()
    assert held() == ([], 0) and max(model.held) <= 2 * showing.RECENT_UNITS  # a unit has two parameters here
    assert all(torch.equal(engine.grad(a), b.grad) for a, b in zip(model.parameters(), plain.parameters()))


def test_a_state_dict_that_was_kept_over_a_step_is_a_copy(start_and_restore):
    model = mlp()
    engine = start_and_restore(model)
    kept = model.state_dict()
    engine.backward(loss_of(engine, batch()))
    engine.step()
    now = model.state_dict()
    kept["0.weight"].zero_()
    assert torch.equal(engine.weight(model[0].weight), now["0.weight"])
    engine(batch())
    assert torch.equal(engine.weight(model[0].weight), now["0.weight"])


def test_state_dicts_hold_no_copies_of_the_model(start_and_restore):
    model = mlp()
    start_and_restore(model)
    copied = weakref.ref(model[0].state_dict()["weight"])
    assert copied() is None


def test_setting_what_needs_no_weights_gathers_nothing(start_and_restore):
    model = mlp()
    engine = start_and_restore(model, settings={"placement": "nvme"})
    before = engine.stats()["nvme_read_bytes"]
    for p in model.parameters():
        p.grad = None
        p.requires_grad = p.requires_grad
    assert engine.stats()["nvme_read_bytes"] == before and held() == ([], 0)


def test_a_view_that_outlives_its_call_stays_valid_and_is_known(start_and_restore):
    model = mlp()
    weight = model[0].weight.detach().clone()
    engine = start_and_restore(model, settings={"placement": "nvme"})
    views = []
    handle = model[0].register_forward_hook(lambda m, a, o: views.append(m.weight.t()))
    engine(batch())
    handle.remove()
    assert leases.lingering() == 1
    assert torch.equal(views[0].detach(), weight.t())
    with torch.no_grad():
        engine(batch())
    assert torch.equal(views[0].detach(), weight.t())
    views.clear()
    assert held() == ([], 0)


def test_backward_after_an_update_is_an_error_as_in_torch(start_and_restore):
    engine = start_and_restore(mlp())
    loss = loss_of(engine, batch())
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    engine.step()
    with pytest.raises(RuntimeError, match="has been updated since"):
        loss.backward()
    engine.zero_grad()
    engine.backward(loss_of(engine, batch()))
    engine.step()


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_backward_after_an_update_is_an_error_where_a_view_was_saved(start_and_restore, placement):
    model = mlp()
    engine = start_and_restore(model, settings={"placement": placement})
    out = (batch().requires_grad_() @ model[0].weight.T).sum()
    engine.backward(loss_of(engine, batch()))
    engine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_in_place_changes_between_forward_and_backward_raise_as_in_torch(start_and_restore):
    model = nn.Sequential(nn.Linear(16, 16), nn.Sigmoid())
    engine = start_and_restore(model)
    out = engine(batch())
    with torch.no_grad():
        out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    for write in (lambda p: p.mul_(2), lambda p: p.data.mul_(2)):
        out = engine(batch().requires_grad_())
        with engine.gathered(model[0].weight), torch.no_grad():
            write(model[0].weight)
        with pytest.raises(RuntimeError, match="updated since"):
            out.sum().backward()


def test_activations_are_freed_without_backward(start_and_restore):
    """A saved-tensor hook that kept the output itself would be a cycle through its graph."""
    engine = start_and_restore(nn.Sequential(nn.Linear(16, 16), nn.Sigmoid()))
    out = engine(batch())
    alive = weakref.ref(out)
    del out
    assert alive() is None


@pytest.mark.parametrize("where", ["around", "around_everything", "inside"])
def test_saved_tensor_hooks_of_the_user_see_activations_only(start_and_restore, where):
    model = mlp()
    plain = copy.deepcopy(model)
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.detach().clone()

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved)
    x = batch().requires_grad_()
    if where == "around_everything":
        with hooks:
            engine = start_and_restore(model)
            loss = loss_of(engine, x)
    elif where == "around":
        engine = start_and_restore(model)
        with hooks:
            loss = loss_of(engine, x)
    else:
        engine = start_and_restore(model)
        inner = model[2].forward
        model[2].forward = lambda x: call_with(hooks, inner, x)
        loss = loss_of(engine, x)
    loss.backward()
    loss_of(plain, x).backward()
    weights = {shape for p in model.parameters() if p.dim() == 2 for shape in (p.shape, p.t().shape)}
    assert torch.Size([6, 32]) in packed and not weights & set(packed)
    assert all(torch.equal(engine.grad(a), b.grad) for a, b in zip(model.parameters(), plain.parameters()))


def call_with(hooks, function, x):
    with hooks:
        return function(x)
