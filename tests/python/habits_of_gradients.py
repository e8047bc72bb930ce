"""Habits: gradients that a script reads, has from before, or takes its own steps by."""

import torch
from habits import batch, before_step, habit, loss_of, train
from torch import nn
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
