"""Habits: gradients that a script reads, writes and assigns."""

import numpy as np
import torch
from habits import batch, before_step, habit, loss_of, train
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.utils import parameters_to_vector

looking = before_step


# ---- reading


@looking
def norms_of_gradients(model):
    return [p.grad.norm().item() for p in model.parameters()]


@looking
def gradients_by_name(model):
    return {name: p.grad.abs().max().item() for name, p in model.named_parameters() if p.grad is not None}


@looking
def gradients_as_arrays(model):
    return [p.grad.numpy().copy() for p in model.parameters()]


@looking
def gradients_on_the_cpu(model):
    return [p.grad.detach().cpu().numpy() for p in model.parameters()]


@looking
def a_flat_gradient(model):
    return torch.cat([p.grad.view(-1) for p in model.parameters()])


@looking
def a_flat_gradient_by_torch(model):
    return parameters_to_vector([p.grad for p in model.parameters()])


@looking
def histograms_of_gradients(model):
    return [torch.histc(p.grad, bins=10) for p in model.parameters()]


@looking
def the_same_gradient_twice(model):
    return [p.grad is p.grad for p in model.parameters()]


@looking
def what_a_gradient_is(model):
    return [
        (
            p.grad.shape,
            p.grad.dtype,
            p.grad.device,
            p.grad.requires_grad,
            p.grad.is_contiguous(),
            p.grad.grad_fn,
        )
        for p in model.parameters()
    ]


@looking
def gradients_that_are_not_finite(model):
    return any(not torch.isfinite(p.grad).all() for p in model.parameters())


@looking
def a_ratio_of_norms(model):
    return [(p.grad.norm() / p.data.norm()).item() for p in model.parameters()]


@looking
def copies_of_gradients(model):
    return [p.grad.clone() for p in model.parameters()] + [
        p.grad.detach().clone() for p in model.parameters()
    ]


@looking
def noise_scale(model):
    return sum(p.grad.pow(2).sum() for p in model.parameters()).item()


@habit
def gradients_before_backward(make):
    model, optimizer = make()
    seen = [p.grad for p in model.parameters()]
    losses = train(model, optimizer, 1)
    optimizer.zero_grad()
    return seen, losses, [p.grad for p in model.parameters()]


@habit
def gradients_after_the_step(make):
    model, optimizer = make()
    seen = []

    def look():
        seen.append([p.grad.clone() for p in model.parameters()])

    return train(model, optimizer, 3, after=look), seen


@habit
def a_gradient_outlives_zero_grad(make):
    model, optimizer = make()
    kept = []
    for i in range(3):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        kept.append([p.grad for p in model.parameters()])
        optimizer.step()
    return kept


@habit
def a_gradient_that_is_held_grows(make):
    model, optimizer = make()
    loss_of(model, 0).backward()
    held = [p.grad for p in model.parameters()]
    before = [g.clone() for g in held]
    loss_of(model, 1).backward()
    after = [g.clone() for g in held]
    same = [g is p.grad for g, p in zip(held, model.parameters())]
    optimizer.step()
    return before, after, same


@habit
def a_cosine_between_steps(make):
    model, optimizer = make()
    last, seen = None, []
    for i in range(3):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        now = torch.cat([p.grad.flatten() for p in model.parameters()])
        if last is not None:
            seen.append(torch.cosine_similarity(now, last, dim=0))
        last = now
        optimizer.step()
    return seen


@habit
def some_parameters_have_no_gradient(make):
    model, optimizer = make()
    model[0](batch()).sum().backward()
    seen = [p.grad is None for p in model.parameters()]
    optimizer.step()
    return seen


@habit
def gradients_by_autograd_leave_none(make):
    model, optimizer = make()
    found = torch.autograd.grad(loss_of(model), list(model.parameters()))
    return found, [p.grad for p in model.parameters()], train(model, optimizer, 1)


@habit
def a_hook_that_was_there_before(make):
    seen = []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    model, optimizer = make(model)
    for i in range(2):
        for k in range(2):
            loss_of(model, 2 * i + k).backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen


@habit
def a_hook_that_came_later_halves(make):
    model, optimizer = make()

    def halve(p):
        p.grad.mul_(0.5)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(halve)
    for i in range(2):
        loss_of(model, i).backward()
        loss_of(model, i + 5).backward()
        optimizer.step()
        optimizer.zero_grad()


@habit
def hooks_of_tensors(make):
    model, optimizer = make()
    handles = [p.register_hook(lambda g: g.clamp(-1e-3, 1e-3)) for p in model.parameters()]
    losses = train(model, optimizer, 2)
    for handle in handles:
        handle.remove()
    return losses, train(model, optimizer, 1)


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


# ---- no optimizer


def by_hand(update):
    def run(make):
        model, _ = make()
        losses = []
        for i in range(3):
            model.zero_grad()
            loss = loss_of(model, i)
            loss.backward()
            update(model)
            losses.append(loss.item())
        return losses

    run.__name__ = update.__name__
    return habit(run)


@by_hand
def word_language_model(model):
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.1)


@by_hand
def without_grad(model):
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad


@by_hand
def data_minus_gradient(model):
    for p in model.parameters():
        p.data -= 0.1 * p.grad.data


@by_hand
def sub_with_a_zeroed_gradient(model):
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad * 0.1)
            p.grad.zero_()


@by_hand
def an_assigned_weight(model):
    for p in model.parameters():
        p.data = p.data - 0.1 * p.grad


@habit
def gradients_of_before(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of(model, 7).backward()
    model[0].bias.grad = None
    model, optimizer = make.hand_over(model, optimizer)
    seen = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    optimizer.step()
    loss_of(model, 1).backward()
    optimizer.step()
    return seen, train(model, optimizer, 2)


@habit(close=True)  # torch adds its entries one after the other
def a_sparse_gradient_of_before(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 16, sparse=True), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.tensor([1, 2, 2])
    model(ids).square().sum().backward()
    model, optimizer = make.hand_over(model, optimizer)
    optimizer.step()
    return model(ids).detach()
