"""Habits: the optimizer's states, by parameter and by name."""

import copy
from collections import defaultdict

import torch
from habits import habit, loss_of, train

ADAM = {"kind": torch.optim.AdamW, "lr": 1e-3}
SGD = {"kind": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}
ADAGRAD = {"kind": torch.optim.Adagrad, "lr": 1e-2, "initial_accumulator_value": 0.1}


def with_states(between, name, **options):
    """A habit between steps; it sees model and optimizer."""

    def run(make):
        model, optimizer = make(**options)
        seen = []
        for i in range(4):
            seen += train(model, optimizer, 1)
            seen.append(between(model, optimizer))
            seen += train(model, optimizer, 1, lambda model, _, i=i: loss_of(model, i + 1))
        return seen

    run.__name__ = name
    habit(run, close=options["kind"] is not torch.optim.SGD)


def each(between):
    for kind, options in (("adamw", ADAM), ("sgd", SGD), ("adagrad", ADAGRAD)):
        with_states(between, f"{between.__name__}_of_{kind}", **options)
    return between


@each
def states_are_read(model, optimizer):
    return [{name: value.clone() for name, value in optimizer.state[p].items()} for p in model.parameters()]


@each
def states_are_zeroed(model, optimizer):
    for state in optimizer.state.values():
        for name, value in state.items():
            if name != "step":
                value.zero_()


@each
def states_are_moved_to_a_device(model, optimizer):
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                state[name] = value.to("cpu").clone()


def states_are_thrown_away(model, optimizer):
    optimizer.state = defaultdict(dict)
    return len(optimizer.state)


with_states(states_are_thrown_away, "states_are_thrown_away_of_adamw", **ADAM)
with_states(states_are_thrown_away, "states_are_thrown_away_of_sgd", **SGD)


@each
def states_are_cleared(model, optimizer):
    optimizer.state.clear()


@each
def states_of_one_parameter_are_thrown_away(model, optimizer):
    optimizer.state[model[0].weight] = {}
    optimizer.state.pop(model[2].bias)
    del optimizer.state[model[2].weight]


@each
def states_are_halved_through_numpy(model, optimizer):
    for p in model.parameters():
        for name, value in optimizer.state[p].items():
            if name != "step":
                array = value.numpy()
                array *= 0.5


@each
def states_are_counted(model, optimizer):
    return (
        len(optimizer.state),
        [sorted(optimizer.state[p]) for p in model.parameters()],
        [p in optimizer.state for p in model.parameters()],
        [optimizer.state.get(p, {}).get("max_exp_avg_sq") for p in model.parameters()],
    )


@each
def states_are_taken_out_and_put_back(model, optimizer):
    for p in model.parameters():
        optimizer.state[p] = optimizer.state.pop(p)
    aside = optimizer.state[model[0].weight]
    optimizer.state[model[0].weight] = {}
    optimizer.state[model[0].weight] = aside
    return len(optimizer.state)


def states_are_kept_aside_over_a_step(model, optimizer):
    aside = optimizer.state[model[0].weight]
    copied = copy.deepcopy(optimizer.state[model[2].weight]), copy.copy(optimizer.state[model[2].bias])
    del optimizer.state[model[0].weight]
    losses = train(model, optimizer, 1)
    optimizer.state[model[0].weight] = aside
    optimizer.state[model[2].weight] = copied[0]
    optimizer.state[model[2].bias].update(copied[1])
    return losses


with_states(states_are_kept_aside_over_a_step, "states_are_kept_aside_of_adamw", **ADAM)
with_states(states_are_kept_aside_over_a_step, "states_are_kept_aside_of_sgd", **SGD)


@each
def a_weight_becomes_a_state(model, optimizer):
    for state, p in ((optimizer.state[p], p) for p in model.parameters()):
        name = [name for name in state if name != "step"][-1]
        state[name] = p.data.clone().abs_()
        state |= {name: state[name] * 0.5}
    return [{name: value.clone() for name, value in optimizer.state[p].items()} for p in model.parameters()]


@each
def states_go_to_another_parameter(model, optimizer):
    target, source = optimizer.state[model[0].bias], optimizer.state[model[2].weight]
    for name in target:
        if name != "step":
            target[name] = source[name].flatten()[: target[name].numel()].clone()


def kept(name, **options):
    def run(make):
        model, optimizer = make(**options)
        train(model, optimizer, 1)
        key = [name for name in optimizer.state[model[0].weight] if name != "step"][-1]
        state = optimizer.state[model[0].weight][key]
        seen = []
        for i in range(3):
            seen.append(state.clone())
            train(model, optimizer, 1)
            state[0].mul_(0.5)
            if i == 1:
                seen += train(model, optimizer, 2)
        return seen

    run.__name__ = name
    habit(run, close=options["kind"] is not torch.optim.SGD)


kept("a_state_that_is_kept_of_adamw", **ADAM)
kept("a_state_that_is_kept_of_sgd", **SGD)
kept("a_state_that_is_kept_of_adagrad", **ADAGRAD)


@habit(close=True)
def the_count_of_updates_begins_anew(make):
    model, optimizer = make(**ADAM)
    train(model, optimizer, 3)
    for p in model.parameters():
        optimizer.state[p]["step"] = torch.tensor(0.0)
    train(model, optimizer, 2)
    for p in model.parameters():
        optimizer.state[p]["step"].fill_(7)
    return train(model, optimizer, 2), [optimizer.state[p]["step"] for p in model.parameters()]


@habit(close=True)
def states_before_the_first_step(make):
    model, optimizer = make(**ADAM)
    seen = [len(optimizer.state), dict(optimizer.state), model[0].weight in optimizer.state]
    for p in model.parameters():
        optimizer.state[p]["step"] = torch.tensor(10.0)
        optimizer.state[p]["exp_avg"] = torch.full_like(p, 0.01)
        optimizer.state[p]["exp_avg_sq"] = torch.full_like(p, 0.02)
    return seen, train(model, optimizer, 3)


@habit(close=True)
def states_of_another_optimizer(make):
    model, optimizer = make(**ADAM)
    other, others = make(seed=1, **ADAM)
    train(model, optimizer, 3)
    train(other, others, 1)
    for mine, theirs in zip(model.parameters(), other.parameters()):
        others.state[theirs]["exp_avg"].copy_(optimizer.state[mine]["exp_avg"])
        others.state[theirs] = optimizer.state[mine]
    return train(other, others, 2)


@habit
def states_between_backward_and_step(make):
    model, optimizer = make(**SGD)
    train(model, optimizer, 2)
    for i in range(3):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        for p in model.parameters():
            optimizer.state[p]["momentum_buffer"].mul_(0.5)
        optimizer.step()


@habit(refused="the engine's update has step, exp_avg, exp_avg_sq; keep what is yours")
def a_state_of_ones_own(make):
    model, optimizer = make(**ADAM)
    train(model, optimizer, 1)
    optimizer.state[model[0].weight]["mine"] = torch.zeros(3)


@habit(refused=r"of 0\.weight is \(32, 16\), not \(3,\)")
def a_state_of_another_shape(make):
    model, optimizer = make(**ADAM)
    train(model, optimizer, 1)
    optimizer.state[model[0].weight]["exp_avg"] = torch.zeros(3)


@habit(refused=r"the engine has all states of a parameter, or none: optimizer\.state\[p\]\.clear\(\)")
def a_state_that_is_deleted(make):
    model, optimizer = make(**ADAM)
    train(model, optimizer, 1)
    del optimizer.state[model[0].weight]["exp_avg"]


@habit
def momentum_before_the_first_step(make):
    model, optimizer = make(kind=torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5)
    for p in model.parameters():
        optimizer.state[p]["momentum_buffer"] = torch.ones_like(p)
    seen = [len(optimizer.state), [sorted(state) for state in optimizer.state.values()]]
    return seen, train(model, optimizer, 3)


@habit
def momentum_that_is_dropped(make):
    model, optimizer = make(**SGD)
    train(model, optimizer, 2)
    for p in model.parameters():
        optimizer.state[p]["momentum_buffer"] = None
    return train(model, optimizer, 3)


@habit
def states_of_plain_sgd(make):
    model, optimizer = make(kind=torch.optim.SGD, lr=0.1)
    train(model, optimizer, 2)
    return len(optimizer.state), [p in optimizer.state for p in model.parameters()]


@habit
def a_released_parameter_becomes_a_state(make):
    model, optimizer = make(**SGD)
    train(model, optimizer, 1)
    optimizer.state[model[2].bias]["momentum_buffer"] = model[2].bias
    return optimizer.state[model[2].bias]["momentum_buffer"].clone()


@habit
def a_released_parameter_becomes_a_gradient(make):
    model, optimizer = make(**SGD)
    loss_of(model).backward()
    model[2].bias.grad = model[2].bias.detach().clone()
    model[0].bias.grad = torch.nn.Parameter(model[0].bias.detach().clone(), requires_grad=False)
    optimizer.step()


@habit(close=True)
def states_that_are_not_there_yet(make):
    model, optimizer = make(**ADAM)
    p, q = model[0].weight, model[2].weight
    seen = [optimizer.state.get(p), optimizer.state.pop(p, None), p in optimizer.state]
    ready = {
        "step": torch.tensor(3.0),
        "exp_avg": torch.full_like(p, 0.1),
        "exp_avg_sq": torch.full_like(p, 0.2),
    }
    optimizer.state.setdefault(p, ready)
    optimizer.state[q] = {
        "step": torch.tensor(0.0),
        "exp_avg": torch.zeros_like(q),
        "exp_avg_sq": torch.zeros_like(q),
    }
    seen += [p in optimizer.state, q in optimizer.state, sorted(optimizer.state[q])]
    return seen, train(model, optimizer, 3), optimizer.state[p]["step"].item()


@habit
def states_of_the_first_object(make):
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 4))
    own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = make.hand_over(model, own)
    losses = train(model, optimizer, 2)
    own.state = defaultdict(dict)
    losses += train(model, optimizer, 2)
    return losses, len(own.state)


@each
def a_state_is_changed_in_place_by_an_operator(model, optimizer):
    name = next(name for name in optimizer.state[model[0].weight] if name != "step")
    held = optimizer.state[model[0].weight][name]
    optimizer.state[model[0].weight][name] *= 0.5
    held += 0.25
    return optimizer.state[model[0].weight][name].clone()
