"""Habits: several optimizers over parts of one model."""

import torch
from habits import batch, habit, loss_of
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8), nn.GELU(), nn.Linear(8, 4))


def body_and_head(make, body=torch.optim.SGD, head=torch.optim.SGD, **options):
    """A model, and an optimizer for its body and one for its head."""
    model = network()
    optimizers = [
        body([*model[0].parameters(), *model[2].parameters()], **(options or {"lr": 0.1, "momentum": 0.9})),
        head(model[4].parameters(), lr=0.05),
    ]
    return make.hand_over(model, optimizers)


def train(model, optimizers, steps=3, before=lambda: None):
    losses = []
    for i in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(model, i)
        loss.backward()
        before()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


@habit
def two_optimizers(make):
    return train(*body_and_head(make))


@habit(close=True)
def two_of_other_classes(make):
    return train(*body_and_head(make, torch.optim.AdamW, lr=1e-3, weight_decay=0.1))


@habit(close=True)
def muon_for_matrices_and_adamw_for_the_rest(make):
    model = network()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return train(
        *make.hand_over(model, [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-3)]), 4
    )


@habit
def one_for_all_biases(make):
    model = network()
    names = dict(model.named_parameters())
    biases = [p for name, p in names.items() if name.endswith("bias")]
    weights = [p for name, p in names.items() if name.endswith("weight")]
    optimizers = [torch.optim.SGD(biases, lr=0.3), torch.optim.SGD(weights, lr=0.1, momentum=0.5)]
    return train(*make.hand_over(model, optimizers))


@habit
def one_that_runs_over_the_whole_of_its_part(make):
    model, (body, head) = body_and_head(make, head=torch.optim.LBFGS)
    losses = []
    for i in range(2):

        def closure(i=i):
            head.zero_grad()
            loss = loss_of(model, i)
            loss.backward()
            return loss

        body.zero_grad()
        losses.append(head.step(closure).item())
        body.step()
    return losses


@habit
def the_script_keeps_its_own_objects(make):
    model = network()
    body = torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1, momentum=0.9)
    head = torch.optim.RAdam(model[4].parameters(), lr=1e-3)
    make.hand_over(model, [body, head])
    return train(model, [body, head])


@habit
def a_gan_in_one_module(make):
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"g": nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16)), "d": nn.Linear(16, 1)}
    )
    optimizers = [
        torch.optim.SGD(model["d"].parameters(), lr=0.1, momentum=0.5),
        torch.optim.SGD(model["g"].parameters(), lr=0.1, momentum=0.5),
    ]
    model, (of_d, of_g) = make.hand_over(model, optimizers)
    losses = []
    for i in range(4):
        made = model["g"](batch(i)[:, :4])
        of_d.zero_grad()
        loss = model["d"](batch(i)).sigmoid().log().neg().mean() + model["d"](made.detach()).sigmoid().mean()
        loss.backward()
        of_d.step()
        of_g.zero_grad()
        fooled = model["d"](made).sigmoid().log().neg().mean()
        fooled.backward()  # d has gradients of it, too, which the next round clears
        of_g.step()
        losses += [loss.item(), fooled.item()]
    return losses


@habit
def a_gan_that_freezes_one_side(make):
    torch.manual_seed(0)
    model = nn.ModuleDict({"g": nn.Linear(4, 16), "d": nn.Linear(16, 1)})
    optimizers = [torch.optim.SGD(model[name].parameters(), lr=0.1) for name in ("d", "g")]
    model, (of_d, of_g) = make.hand_over(model, optimizers)
    losses = []
    for i in range(3):
        made = model["g"](batch(i)[:, :4])
        loss = model["d"](batch(i)).square().mean() + model["d"](made.detach()).square().mean()
        of_d.zero_grad()
        loss.backward()
        of_d.step()
        model["d"].requires_grad_(False)
        of_g.zero_grad()
        fooled = model["d"](made).square().mean()
        fooled.backward()
        of_g.step()
        model["d"].requires_grad_(True)
        losses += [loss.item(), fooled.item()]
    return losses


@habit
def the_head_steps_every_second_time(make):
    model, (body, head) = body_and_head(make)
    losses = []
    for i in range(5):
        body.zero_grad()
        loss = loss_of(model, i)
        loss.backward()
        body.step()
        if i % 2:
            head.step()
            head.zero_grad()
        losses.append(loss.item())
    return losses


@habit
def gradients_of_the_other_stay(make):
    model, (body, head) = body_and_head(make)
    loss_of(model).backward()
    seen = [p.grad.clone() for p in model.parameters()]
    body.step()
    seen += [p.grad.clone() for p in model.parameters()]
    body.zero_grad()
    seen += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    head.step()
    head.zero_grad(set_to_none=False)
    seen += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    loss_of(model, 1).backward()
    body.step()
    head.step()
    return seen


@habit
def nobody_clears(make):
    model, (body, head) = body_and_head(make)
    losses = []
    for i in range(3):
        loss = loss_of(model, i)
        loss.backward()
        head.step()
        body.step()
        head.step()
        losses.append(loss.item())
    return losses


@habit
def what_is_kept_of_gradients_follows(make):
    model, (body, head) = body_and_head(make)
    loss_of(model).backward()
    kept = model[0].weight.grad, model[4].weight.grad
    head.step()
    kept[1].zero_()
    body.zero_grad()
    loss_of(model, 1).backward()
    body.step()
    head.step()
    return [each.clone() for each in kept]


@habit(close=True)
def all_gradients_are_clipped(make):
    model, optimizers = body_and_head(make)
    return train(model, optimizers, before=lambda: clip_grad_norm_(model.parameters(), 0.1))


@habit
def gradients_of_one_part_are_clipped(make):
    model, optimizers = body_and_head(make)

    def clip():
        clip_grad_norm_(model[4].parameters(), 0.1)
        clip_grad_value_(model[0].parameters(), 0.01)

    return train(model, optimizers, before=clip)


@habit(close=True)
def a_clip_between_two_steps(make):
    model, (body, head) = body_and_head(make)
    losses = []
    for i in range(3):
        loss = loss_of(model, i)
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.1)
        head.step()
        body.step()
        body.zero_grad()
        losses.append(loss.item())
    return losses


@habit
def a_scheduler_of_each(make):
    model, optimizers = body_and_head(make)
    schedulers = [
        torch.optim.lr_scheduler.StepLR(optimizers[0], 1, 0.5),
        torch.optim.lr_scheduler.ExponentialLR(optimizers[1], 0.9),
    ]
    losses = []
    for _ in range(3):
        losses += train(model, optimizers, 1)
        for scheduler in schedulers:
            scheduler.step()
    return losses, [each.param_groups[0]["lr"] for each in optimizers]


@habit
def the_states_of_each(make):
    model, (body, head) = body_and_head(make, head=torch.optim.RAdam)
    train(model, [body, head], 2)
    body.state[model[0].weight]["momentum_buffer"].mul_(0.5)
    seen = [
        body.state[model[0].weight]["momentum_buffer"].clone(),
        head.state[model[4].weight]["exp_avg"].clone(),
        model[4].weight in body.state,
        len(body.state),
        len(head.state),
    ]
    return seen, train(model, [body, head], 2)


@habit
def states_are_written_before_the_other_steps(make):
    model, (body, head) = body_and_head(make)
    train(model, [body, head], 2)
    buffer = body.state[model[0].weight]["momentum_buffer"]
    loss_of(model, 3).backward()
    buffer.mul_(0)
    head.step()
    seen = buffer.clone()
    body.step()
    buffer.add_(1)
    head.zero_grad()
    loss_of(model, 4).backward()
    head.step()
    return seen, buffer.clone(), body.state_dict()["state"][0]["momentum_buffer"].clone()


@habit
def none_has_states_of_the_other(make):
    model = network()
    body = torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1, momentum=0.9)
    head = torch.optim.SGD(model[4].parameters(), lr=0.05, momentum=0.9)
    model, (body, head) = make.hand_over(model, [body, head])
    train(model, [body, head], 2)
    seen = model[4].weight in body.state, model[4].weight in head.state, len(body.state), len(head.state)
    return seen, dict(body.state.get(model[4].weight, {}))


@habit
def a_state_dict_of_each(make):
    model, (body, head) = body_and_head(make, head=torch.optim.RAdam)
    train(model, [body, head], 2)
    weights, saved = {k: v.clone() for k, v in model.state_dict().items()}, []
    saved = [body.state_dict(), head.state_dict()]
    copied = [
        {n: {k: torch.as_tensor(v).clone() for k, v in entry.items()} for n, entry in each["state"].items()}
        for each in saved
    ]
    first = train(model, [body, head], 2)
    model.load_state_dict(weights)
    for optimizer, states, before in zip((body, head), copied, saved):
        optimizer.load_state_dict({"state": states, "param_groups": before["param_groups"]})
    return first, train(model, [body, head], 2)


@habit
def ones_that_have_stepped(make):
    model = network()
    body = torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1, momentum=0.9)
    head = torch.optim.SGD(model[4].parameters(), lr=0.05, momentum=0.8)
    train(model, [body, head], 2)
    model, optimizers = make.hand_over(model, [body, head])
    return train(model, optimizers)


@habit
def hooks_of_one(make):
    model, (body, head) = body_and_head(make)
    seen = []
    head.register_step_pre_hook(lambda o, args, kwargs: seen.append("pre"))
    head.register_step_post_hook(lambda o, args, kwargs: seen.append("post"))
    return train(model, [body, head]), seen


@habit
def a_scaler_of_both(make):
    model, (body, head) = body_and_head(make)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    losses = []
    for i in range(3):
        for optimizer in (body, head):
            optimizer.zero_grad()
        loss = loss_of(model, i)
        scaler.scale(loss).backward()
        scaler.unscale_(head)
        clip_grad_value_(model[4].parameters(), 0.05)
        scaler.step(body)
        scaler.step(head)
        scaler.update()
        losses.append(loss.item())
    return losses


@habit
def an_edit_between_two_steps(make):
    model, (body, head) = body_and_head(make)
    losses = []
    for i in range(3):
        for optimizer in (body, head):
            optimizer.zero_grad()
        loss = loss_of(model, i)
        loss.backward()
        body.step()
        with torch.no_grad():
            model[0].weight.clamp_(-0.1, 0.1)
            model[4].weight.mul_(0.9)
        head.step()
        losses.append(loss.item())
    return losses


@habit
def a_list_of_one(make):
    model = network()
    model, (optimizer,) = make.hand_over(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    return train(model, [optimizer])


@habit(refused=r"0\.weight is in two parameter groups, 0 and 1.*leave it in one")
def two_over_the_same_parameters(make):
    model = network()
    make.hand_over(model, [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)])


@habit(refused="add_param_group: groups are fixed")
def one_is_given_a_group(make):
    _, (body, _) = body_and_head(make)
    body.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
