"""Habits: parameter groups, and optimizers of a part of a model or of several."""

import torch
from habits import batch, habit, train
from torch import nn


@habit
def another_list_of_groups(make):
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    user = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = make.hand_over(model, user)
    losses = train(model, user)
    user.param_groups = [{**group, "lr": 0.01} for group in user.param_groups]
    losses += train(model, user)
    optimizer.param_groups = [{**group, "lr": 0.3} for group in optimizer.param_groups]
    return losses + train(model, user), user.param_groups[0]["lr"]


@habit
def groups_with_options_of_their_own(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    groups = [
        {"params": model[0].parameters(), "lr": 0.2},
        {"params": [*model[2].parameters()], "momentum": 0.5},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    model, optimizer = make.hand_over(model, optimizer)
    return train(model, optimizer, 3), [group["lr"] for group in optimizer.param_groups]


@habit
def groups_of_another_class(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    groups = [{"params": model[0].parameters(), "lr": 2e-3}, {"params": [*model[2].parameters()]}]
    model, optimizer = make.hand_over(model, torch.optim.RAdam(groups, lr=1e-3))
    return train(model, optimizer, 3)


@habit(refused="add_param_group: groups are fixed")
def a_group_is_added(make):
    _, optimizer = make()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


@habit(refused="trainable, but in no parameter group")
def an_optimizer_of_a_part(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    make.hand_over(model, torch.optim.SGD(model[0].parameters(), lr=0.1))


@habit(refused=r"parameters that are not the model's.*nn\.ModuleList")
def one_optimizer_of_two_models(make):
    a, b = nn.Linear(16, 16), nn.Linear(16, 4)
    make.hand_over(a, torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1))


@habit
def one_optimizer_of_a_list_of_models(make):
    torch.manual_seed(0)
    a, b = nn.Linear(16, 16), nn.Linear(16, 4)
    _, optimizer = make.hand_over(
        nn.ModuleList([a, b]), torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
    )
    losses = []
    for i in range(3):
        optimizer.zero_grad()
        loss = b(a(batch(i)).tanh()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@habit(refused="differentiable=True")
def a_step_with_a_gradient(make):
    make(lr=0.1, differentiable=True)
