"""Habits: gradients that a script clips, and how long they live."""

from functools import partial

import torch
from habits import batch, before_step, closure_of, habit, loss_of, train
from torch import nn
from torch.nn.utils import clip_grad_norm_ as imported_before

looking = before_step
clipping = partial(before_step, close=True)  # the limit is scaled in another precision there


# ---- clipping


@clipping
def all_by_norm(model):
    return nn.utils.clip_grad_norm_(model.parameters(), 0.05).item()


@clipping
def all_by_an_import_of_before(model):
    return imported_before(model.parameters(), 0.05).item()


@clipping
def all_by_norm_and_seen(model):
    held = model[0].weight.grad
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    return held.clone(), [p.grad.clone() for p in model.parameters()]


@clipping
def all_as_generators_and_lists(model):
    a = nn.utils.clip_grad_norm_(list(model.parameters()), max_norm=0.5, norm_type=2)
    return a, nn.utils.clip_grad_norm_((p for p in model.parameters() if p.requires_grad), 0.05)


@clipping
def a_part_by_norm(model):
    return nn.utils.clip_grad_norm_(model[0].parameters(), 0.01).item()


@clipping
def each_by_norm(model):
    return [nn.utils.clip_grad_norm_(p, 0.01).item() for p in model.parameters()]


@clipping
def each_layer_by_norm(model):
    return [nn.utils.clip_grad_norm_(layer.parameters(), 0.01) for layer in (model[0], model[2])]


@clipping
def by_the_largest(model):
    return nn.utils.clip_grad_norm_(model.parameters(), 1e-3, norm_type=float("inf"))


@clipping
def by_the_sum(model):
    return nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=1)


@looking
def by_value(model):
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)


@looking
def a_part_by_value(model):
    nn.utils.clip_grad_value_(model[2].weight, 1e-3)


@clipping
def the_norm_alone(model):
    return nn.utils.clip_grad_norm_(model.parameters(), float("inf"))


@clipping
def a_total_norm_and_its_use(model):
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, norm)
    return norm


@clipping
def twice(model):
    a = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return a, nn.utils.clip_grad_norm_(model.parameters(), 0.05)


@clipping
def by_norm_and_then_scaled(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    for p in model.parameters():
        p.grad.mul_(2)


@clipping
def adaptive(model):
    for p in model.parameters():
        limit = p.detach().norm().clamp_(min=1e-3) * 0.01
        if (norm := p.grad.norm()) > limit:
            p.grad.mul_(limit / norm)


@habit(close=True)
def clipped_between_two_backwards(make):
    model, optimizer = make()
    loss_of(model, 0).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    loss_of(model, 1).backward()
    seen = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    return seen


@habit(close=True)
def clipped_and_not_cleared(make):
    model, optimizer = make()
    norms = []
    for i in range(3):
        loss_of(model, i).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        optimizer.step()
    return norms, [p.grad.clone() for p in model.parameters()]


@habit
def a_norm_that_is_not_finite(make):
    model, optimizer = make()
    (loss_of(model) * float("inf")).backward()
    try:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        told = "non-finite" in str(error)
    optimizer.zero_grad()
    return told, train(model, optimizer, 1)


# ---- the life of gradients


@habit
def never_cleared(make):
    model, optimizer = make()
    losses = []
    for i in range(4):
        loss = loss_of(model, i)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@habit
def never_cleared_with_nesterov(make):
    model, optimizer = make(kind=torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=True)
    for i in range(4):
        loss_of(model, i).backward()
        optimizer.step()


@habit
def cleared_every_second_step(make):
    model, optimizer = make()
    for i in range(6):
        if i % 2 == 0:
            optimizer.zero_grad()
        loss_of(model, i).backward()
        optimizer.step()


@habit
def stepped_twice(make):
    model, optimizer = make()
    for i in range(3):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        optimizer.step()
        optimizer.step()


@habit
def stepped_without_gradients(make):
    model, optimizer = make()
    optimizer.step()
    losses = train(model, optimizer, 1)
    optimizer.zero_grad()
    optimizer.step()
    return losses


@habit
def cleared_to_zeros(make):
    model, optimizer = make(lr=0.1, momentum=0.9, weight_decay=0.1)
    seen = []
    for i in range(3):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, i).backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    seen += [p.grad.clone() for p in model.parameters()]
    optimizer.step()  # decays
    return seen


@habit
def zeros_where_nothing_comes(make):
    model, optimizer = make(lr=0.1, momentum=0.9, weight_decay=0.1)
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    model[0](batch(1)).square().mean().backward()  # nothing comes to the last layer
    optimizer.step()
    optimizer.zero_grad()
    model[0](batch(2)).square().mean().backward()
    optimizer.step()


@habit
def cleared_by_hand(make):
    model, optimizer = make(lr=0.1, momentum=0.9, weight_decay=0.1)
    for i in range(3):
        for p in model.parameters():
            if p.grad is not None:
                p.grad.detach_()
                p.grad.zero_()
        loss_of(model, i).backward()
        optimizer.step()


@habit
def cleared_by_none(make):
    model, optimizer = make()
    for i in range(3):
        for p in model.parameters():
            p.grad = None
        loss_of(model, i).backward()
        optimizer.step()


@habit
def cleared_by_the_model(make):
    model, optimizer = make()
    for i in range(3):
        model.zero_grad(set_to_none=i % 2 == 0)
        loss_of(model, i).backward()
        optimizer.step()


@habit
def a_part_is_cleared(make):
    model, optimizer = make()
    for i in range(3):
        loss_of(model, i).backward()
        optimizer.step()
        model[0].zero_grad()
    return [p.grad is None for p in model.parameters()]


@habit
def accumulated(make):
    model, optimizer = make()
    for i in range(6):
        (loss_of(model, i) / 3).backward()
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


@habit
def averaged_at_the_end(make):
    model, optimizer = make()
    for i in range(6):
        loss_of(model, i).backward()
        if i % 3 == 2:
            for p in model.parameters():
                p.grad /= 3
            optimizer.step()
            optimizer.zero_grad()


@habit
def backward_twice(make):
    model, optimizer = make()
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    second = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    return first, second


@habit
def a_closure(make):
    model, optimizer = make()
    return [optimizer.step(closure_of(model, optimizer)).item() for _ in range(3)]


@habit
def two_losses_one_step(make):
    model, optimizer = make()
    loss_of(model, 0).backward()
    norms = [p.grad.norm() for p in model.parameters()]
    loss_of(model, 1).backward()
    optimizer.step()
    return norms


@habit
def generator_and_critic(make):
    """What the critic's weights are given by the generator's loss is thrown away."""
    torch.manual_seed(0)
    g, go = make(nn.Sequential(nn.Linear(16, 16), nn.Tanh()))
    c, co = make(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)), seed=1)
    seen = []
    for i in range(3):
        co.zero_grad()
        loss = c(batch(i)).mean() - c(g(batch(i)).detach()).mean()
        loss.backward()
        co.step()
        go.zero_grad()
        (-c(g(batch(i))).mean()).backward()
        seen.append([p.grad.norm().item() for p in g.parameters()])
        seen.append([p.grad.norm().item() for p in c.parameters()])
        go.step()
    return seen


@habit
def a_penalty_of_the_gradient(make):
    """Of the gradients of a first backward, held until the second."""
    model, optimizer = make()
    for i in range(2):
        optimizer.zero_grad()
        found = torch.autograd.grad(loss_of(model, i), list(model.parameters()), create_graph=True)
        penalty = sum(g.square().sum() for g in found)
        (loss_of(model, i) + penalty).backward()
        optimizer.step()


@habit
def scaled_by_a_scaler(make):
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    seen = []
    for i in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, i)).backward()
        scaler.unscale_(optimizer)
        seen.append([p.grad.norm().item() for p in model.parameters()])
        scaler.step(optimizer)
        scaler.update()
    return seen, scaler.get_scale()
