"""Habits: gradients that a script writes and assigns."""

import numpy as np
import torch
from habits import before_step, habit, loss_of, train
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

looking = before_step


# ---- writing


@looking
def halved(model):
    for p in model.parameters():
        p.grad.mul_(0.5)


@looking
def halved_by_an_operator(model):
    for p in model.parameters():
        p.grad *= 0.5


@looking
def halved_through_data(model):
    for p in model.parameters():
        p.grad.data.mul_(0.5)


@looking
def divided_by_world_size(model):
    for p in model.parameters():
        if p.requires_grad and p.grad is not None:
            p.grad.data.div_(2)


@looking
def noise_is_added(model):
    torch.manual_seed(5)
    for p in model.parameters():
        p.grad.add_(torch.randn_like(p.grad), alpha=0.01)


@looking
def noise_like_the_parameter(model):
    torch.manual_seed(5)
    for p in model.parameters():
        p.grad += 0.01 * torch.randn(p.shape)


@looking
def clamped(model):
    for p in model.parameters():
        p.grad.data.clamp_(-1e-3, 1e-3)


@looking
def signs(model):
    for p in model.parameters():
        p.grad.sign_().mul_(1e-2)


@looking
def rows_are_zeroed(model):
    model[0].weight.grad[3] = 0
    model[0].weight.grad.data[:, 5] = 0
    model[2].bias.grad[1:] *= 2


@looking
def masked(model):
    for p in model.parameters():
        p.grad.mul_((torch.arange(p.numel()).view(p.shape) % 2).to(p.dtype))


@looking
def centralised(model):
    for p in model.parameters():
        if p.dim() > 1:
            p.grad.sub_(p.grad.mean(dim=1, keepdim=True))


@looking
def not_finite_ones_become_zero(model):
    for p in model.parameters():
        torch.nan_to_num(p.grad, nan=0.0, posinf=1.0, neginf=-1.0, out=p.grad)


@looking
def written_by_numpy(model):
    array = model[0].weight.grad.numpy()
    array[:, 1] = 0.25
    np.multiply(array, 0.5, out=array)


@looking
def all_at_once(model):
    gradients = [p.grad for p in model.parameters()]
    torch._foreach_mul_(gradients, 0.5)
    torch._foreach_add_(gradients, 1e-3)


@looking
def flattened_and_back(model):
    gradients = [p.grad for p in model.parameters()]
    flat = _flatten_dense_tensors(gradients)
    flat /= 4
    for gradient, new in zip(gradients, _unflatten_dense_tensors(flat, gradients)):
        gradient.copy_(new)


@looking
def weight_decay_by_hand(model):
    for p in model.parameters():
        p.grad.add_(p.data, alpha=0.01)


@looking
def weight_decay_without_data(model):
    with torch.no_grad():
        for p in model.parameters():
            p.grad.add_(p, alpha=0.01)


@looking
def a_view_of_a_gradient(model):
    flat = model[0].weight.grad.view(-1)
    model[2].weight.grad.mul_(3)
    model[2].bias.grad.mul_(3)
    model[0].bias.grad.mul_(3)
    flat[:7] = 0


# ---- assigning


@looking
def dropped(model):
    model[0].weight.grad = None
    return [p.grad is None for p in model.parameters()]


@looking
def replaced(model):
    for p in model.parameters():
        p.grad = p.grad * 0.25
    return [p.grad for p in model.parameters()]


@looking
def replaced_by_clones(model):
    for p in model.parameters():
        p.grad = p.grad.clone()
        p.grad.mul_(2)


@looking
def replaced_and_then_written(model):
    new = torch.full_like(model[2].weight, 0.01)
    model[2].weight.grad = new
    new.mul_(3)
    return model[2].weight.grad is new


@looking
def zeros_and_a_sum(model):
    for p in model.parameters():
        gradient = p.grad
        p.grad = torch.zeros_like(p)
        p.grad.add_(gradient, alpha=0.1)


@habit
def gradients_from_autograd(make):
    model, optimizer = make()
    for i in range(3):
        found = torch.autograd.grad(loss_of(model, i), list(model.parameters()))
        for p, g in zip(model.parameters(), found):
            p.grad = g
        optimizer.step()
        optimizer.zero_grad()


@habit
def gradients_without_backward(make):
    model, optimizer = make()
    torch.manual_seed(7)
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.randn(p.shape)
        optimizer.step()


@habit
def of_another_layout(make):
    model, optimizer = make()
    torch.manual_seed(8)
    model[0].weight.grad = torch.randn(16, 32).t()
    model[2].weight.grad = torch.ones(1, 1).expand(4, 32)
    optimizer.step()
    return model[0].weight.grad.stride()


@habit
def wrong_ones(make):
    model, _ = make()
    errors = []
    for wrong in (torch.zeros(3), torch.zeros(32, 16).double(), 3.0):
        try:
            model[0].weight.grad = wrong
        except (RuntimeError, TypeError) as error:
            errors.append(type(error).__name__)
    return errors, model[0].weight.grad


@habit
def two_tasks_by_hand(make):
    """Gradient surgery: conflicting ones are projected."""
    model, optimizer = make()
    for i in range(2):
        tasks = []
        for k in range(2):
            optimizer.zero_grad()
            (loss_of(model, 2 * i + k) * (-1) ** k).backward()
            tasks.append([p.grad.clone() for p in model.parameters()])
        optimizer.zero_grad()
        for p, a, b in zip(model.parameters(), *tasks):
            dot = (a * b).sum()
            p.grad = a + b if dot >= 0 else a - dot / b.pow(2).sum() * b + b
        optimizer.step()


@habit
def sharpness_aware(make):
    model, optimizer = make()
    losses = []
    for i in range(2):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        norm = torch.norm(torch.stack([p.grad.norm() for p in model.parameters()]))
        moved = []
        with torch.no_grad():
            for p in model.parameters():
                step = p.grad * (0.05 / norm)
                p.add_(step)
                moved.append(step)
        optimizer.zero_grad()
        second = loss_of(model, i)
        second.backward()
        with torch.no_grad():
            for p, step in zip(model.parameters(), moved):
                p.sub_(step)
        optimizer.step()
        losses.append(second.item())
    return losses


@habit
def lookahead(make):
    model, optimizer = make()
    slow = [p.detach().clone() for p in model.parameters()]

    def pull():
        with torch.no_grad():
            for p, s in zip(model.parameters(), slow):
                s.add_(p - s, alpha=0.5)
                p.copy_(s)

    return train(model, optimizer, 3, after=pull)
