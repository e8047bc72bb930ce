"""Habits: optimizers of every class, their options, states and schedules."""

import functools
import io
import math
import types

import torch
from habits import batch, closure_of, habit, loss_of, train
from torch import nn


def with_class(kind, steps=4, **options):
    def run(make):
        model, optimizer = make(kind=kind, **options)
        return train(model, optimizer, steps)

    return run


def of_class(name, kind, close=False, **options):
    run = with_class(kind, **options)
    run.__name__ = name
    habit(run, close=close)


of_class("adadelta", torch.optim.Adadelta, close=True, lr=0.5)
of_class("adadelta_with_decay", torch.optim.Adadelta, close=True, lr=0.5, weight_decay=0.1)
of_class("rmsprop", torch.optim.RMSprop, close=True, lr=1e-3)
of_class("rmsprop_with_momentum", torch.optim.RMSprop, close=True, lr=1e-3, momentum=0.9)
of_class("rmsprop_centred_with_momentum", torch.optim.RMSprop, lr=1e-3, centered=True, momentum=0.9)
of_class("nadam", torch.optim.NAdam, close=True, lr=1e-3)
of_class(
    "nadam_like_adamw", torch.optim.NAdam, close=True, lr=1e-3, weight_decay=0.1, decoupled_weight_decay=True
)
of_class("radam", torch.optim.RAdam, lr=1e-3)
of_class("adamax", torch.optim.Adamax, close=True, lr=1e-3)
of_class("averaged_sgd", torch.optim.ASGD, lr=1e-2, t0=2)
of_class("rprop", torch.optim.Rprop, lr=1e-3)
of_class("adafactor", torch.optim.Adafactor, lr=1e-3)
of_class("adamw_amsgrad", torch.optim.AdamW, lr=1e-3, amsgrad=True)
of_class("adam_amsgrad", torch.optim.Adam, lr=1e-3, amsgrad=True, weight_decay=0.1)
of_class("rmsprop_foreach", torch.optim.RMSprop, close=True, lr=1e-3, foreach=True)
of_class("sgd_plain", torch.optim.SGD, lr=0.1)
of_class("sgd_nesterov", torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
of_class("sgd_maximising", torch.optim.SGD, lr=1e-3, maximize=True)
of_class("adagrad", torch.optim.Adagrad, close=True, lr=1e-3)
of_class("adamw", torch.optim.AdamW, close=True, lr=1e-3)
of_class("adam", torch.optim.Adam, close=True, lr=1e-3, weight_decay=0.1)
of_class("adamw_fused", torch.optim.AdamW, close=True, lr=1e-3, fused=True)
of_class("adam_amsgrad_fused", torch.optim.Adam, lr=1e-2, amsgrad=True, fused=True)


class Decayed(torch.optim.SGD):
    """As a script adds something to torch's."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - 0.01 * group["lr"])
        return super().step(closure)


of_class("a_subclass_with_its_own_step", Decayed, lr=0.1, momentum=0.9)
of_class("a_fused_one_with_its_own_step", Decayed, lr=0.1, momentum=0.9, fused=True)


class Lion(torch.optim.Optimizer):
    """As papers print them."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                average, (beta1, beta2) = state["exp_avg"], group["betas"]
                p.add_((average * beta1 + p.grad * (1 - beta1)).sign_(), alpha=-group["lr"])
                average.mul_(beta2).add_(p.grad, alpha=1 - beta2)
        return loss


of_class("one_of_the_scripts_own", Lion)


class Counting(torch.optim.Optimizer):
    """Keeps something of all parameters in its group, as Prodigy and schedule-free ones do."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr, "k": 0, "sum": 0.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            norm = math.sqrt(sum(p.grad.square().sum().item() for p in group["params"]))
            group["sum"] += norm
            group["k"] += 1
            for p in group["params"]:
                p -= group["lr"] / (group["sum"] / group["k"]) * p.grad


of_class("one_that_counts_in_its_group", Counting)


class OldStyle(torch.optim.Optimizer):
    """Before no_grad: through .data everywhere."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                gradient = p.grad.data
                if "buffer" not in self.state[p]:
                    self.state[p]["buffer"] = torch.zeros_like(p.data)
                buffer = self.state[p]["buffer"]
                buffer.mul_(0.9).add_(gradient)
                p.data.add_(buffer, alpha=-group["lr"])


of_class("one_of_old", OldStyle)


@habit
def lbfgs(make):
    model, optimizer = make(kind=torch.optim.LBFGS, lr=0.5, max_iter=4)
    losses = []
    for _ in range(2):
        optimizer.step(closure_of(model, optimizer, losses))
    return losses


@habit
def lbfgs_with_a_line_search(make):
    model, optimizer = make(kind=torch.optim.LBFGS, lr=1.0, max_iter=3, line_search_fn="strong_wolfe")
    return [optimizer.step(closure_of(model, optimizer)).item() for _ in range(2)]


@habit
def a_closure_of_another_class(make):
    model, optimizer = make(kind=torch.optim.RAdam, lr=1e-3)
    return [optimizer.step(closure_of(model, optimizer)).item() for _ in range(3)]


@habit
def another_class_never_clears(make):
    model, optimizer = make(kind=torch.optim.RAdam, lr=1e-3)
    for i in range(3):
        loss_of(model, i).backward()
        optimizer.step()
    return [p.grad.clone() for p in model.parameters()]


@habit
def another_class_clears_to_zeros(make):
    model, optimizer = make(kind=torch.optim.RAdam, lr=1e-3, weight_decay=0.1)
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()


@habit
def another_class_clips(make):
    model, optimizer = make(kind=torch.optim.RAdam, lr=1e-3)
    norms = []
    for i in range(3):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        norms.append(nn.utils.clip_grad_norm_(model[0].parameters(), 0.01).item())
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()
    return norms


@habit
def another_class_of_some_parameters(make):
    model, optimizer = make(kind=torch.optim.RAdam, lr=1e-3)
    model[0](batch()).square().mean().backward()
    optimizer.step()
    return len(optimizer.state_dict()["state"])


@habit
def states_are_saved_and_loaded(make):
    model, optimizer = make(kind=torch.optim.RAdam, lr=1e-3)
    train(model, optimizer, 2)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    first = train(model, optimizer, 2)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return first, train(model, optimizer, 2)


@habit
def states_of_sgd_are_saved_and_loaded(make):
    model, optimizer = make()
    train(model, optimizer, 2)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, states = torch.load(file)
    first = train(model, optimizer, 2)
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    return first, train(model, optimizer, 2)


@habit
def states_by_parameter_of_another_class(make):
    model, optimizer = make(kind=torch.optim.RAdam, lr=1e-3)
    train(model, optimizer, 2)
    return [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]


@habit
def states_that_are_reset(make):
    model, optimizer = make(kind=torch.optim.RAdam, lr=1e-3)
    train(model, optimizer, 2)
    optimizer.state[model[0].weight]["exp_avg"].zero_()
    train(model, optimizer, 1)
    optimizer.state.clear()
    train(model, optimizer, 1)


def taken_over(name, kind, close=False, **options):
    def run(make):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
        optimizer = kind(model.parameters(), **options)
        before = train(model, optimizer, 3)
        optimizer.zero_grad()
        model, optimizer = make.hand_over(model, optimizer)
        return before, train(model, optimizer, 3)

    run.__name__ = name
    habit(run, close=close)


taken_over("an_optimizer_that_has_stepped", torch.optim.SGD, lr=0.1, momentum=0.9)
taken_over("an_adamw_that_has_stepped", torch.optim.AdamW, close=True, lr=1e-3)
taken_over("an_adagrad_that_has_stepped", torch.optim.Adagrad, close=True, lr=1e-2)
taken_over("an_rmsprop_that_has_stepped", torch.optim.RMSprop, close=True, lr=1e-3, momentum=0.9)
taken_over("a_nadam_that_has_stepped", torch.optim.NAdam, close=True, lr=1e-3)
taken_over("one_of_another_class_that_has_stepped", torch.optim.RAdam, lr=1e-3)


@habit
def rates_by_hand(make):
    model, optimizer = make()
    for i in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (i + 1)
        train(model, optimizer, 1)
    return optimizer.param_groups[0]["lr"]


def scheduled(name, scheduler, **options):
    def run(make):
        model, optimizer = make(**options)
        schedule = scheduler(optimizer)
        rates = []
        for i in range(5):
            optimizer.zero_grad()
            loss_of(model, i).backward()
            optimizer.step()
            schedule.step()
            rates.append(schedule.get_last_lr())
        return rates

    run.__name__ = name
    habit(run)


lr = torch.optim.lr_scheduler
scheduled("by_cosine", lambda o: lr.CosineAnnealingLR(o, 5))
scheduled("by_steps", lambda o: lr.StepLR(o, 2))
scheduled("by_warm_up", lambda o: lr.LinearLR(o, 0.1, total_iters=3))
scheduled("by_one_cycle", lambda o: lr.OneCycleLR(o, 0.2, total_steps=6))
scheduled("another_class_by_cosine", lambda o: lr.CosineAnnealingLR(o, 5), kind=torch.optim.RAdam, lr=1e-3)


@habit
def on_a_plateau(make):
    model, optimizer = make()
    schedule = lr.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for i in range(4):
        losses = train(model, optimizer, 1)
        schedule.step(losses[0] + i)
    return optimizer.param_groups[0]["lr"]


@habit
def hooks_of_steps(make):
    model, optimizer = make()
    seen = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append("pre"))
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append("post"))
    train(model, optimizer, 2)
    return seen


def hooks_of_before(name, kind):
    def run(make):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
        user, seen = kind(model.parameters(), lr=1e-2), []
        user.register_step_pre_hook(lambda o, args, kwargs: seen.append("pre"))
        user.register_step_post_hook(lambda o, args, kwargs: seen.append("post"))
        user.register_state_dict_pre_hook(lambda o: seen.append("save"))
        user.register_state_dict_post_hook(lambda o, state: seen.append("saved"))
        user.register_load_state_dict_pre_hook(lambda o, state: seen.append("load"))
        user.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
        model, optimizer = make.hand_over(model, user)
        user.register_step_pre_hook(lambda o, args, kwargs: seen.append("later"))
        for each in (optimizer, user):  # a script may use either
            loss_of(model).backward()
            each.step()
            each.load_state_dict(each.state_dict())
        return seen

    run.__name__ = name
    habit(run)


def replaced(name, call, replace, before=None):
    def run(make):
        torch.manual_seed(0)
        model = nn.Linear(16, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if before is not None:
            before(optimizer)
        own = getattr(optimizer, call)
        setattr(optimizer, call, replace(own))
        if hasattr(optimizer.step, "__func__"):  # else the scheduler refuses it itself
            torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return train(*make.hand_over(model, optimizer))

    run.__name__ = name
    habit(run, refused=f"{call} of this SGD object was replaced.*child of the class")


def twice(own):
    return lambda *args: [own(*args), own(*args)]


def bound(own):
    return types.MethodType(lambda self, *args: [own(*args), own(*args)], own.__self__)


replaced("a_step_that_is_replaced_on_the_object", "step", twice)
replaced("a_step_that_a_scheduler_has_wrapped", "step", bound)
replaced("a_zero_grad_that_is_replaced_on_the_object", "zero_grad", twice)
replaced(
    "a_step_that_is_replaced_by_a_wrapper_of_a_schedulers",
    "step",
    lambda own: functools.wraps(own)(twice(own)),
    lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
)


def halved(step):
    @functools.wraps(step)
    def wrapper(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad.mul_(0.5)
        return step(self, closure)

    return wrapper


class Halved(torch.optim.SGD):
    step = halved(torch.optim.SGD.step)


of_class("a_subclass_with_a_decorated_step", Halved, lr=0.1, momentum=0.9)


@habit
def a_class_of_torchs_whose_step_is_replaced(make):
    own = torch.optim.SGD.step
    torch.optim.SGD.step = halved(own)
    try:
        model, optimizer = make(lr=0.1)
        return train(model, optimizer)
    finally:
        torch.optim.SGD.step = own


def hooks_of_an_attribute(name, kind):
    """As a script's own class counts its steps."""

    def run(make):
        torch.manual_seed(0)
        model = nn.Linear(16, 4)
        user = kind(model.parameters(), lr=1e-2)
        user.count = 0

        def count(optimizer, args, kwargs):
            optimizer.count += 1

        user.register_step_post_hook(count)
        model, optimizer = make.hand_over(model, user)
        train(model, optimizer)
        train(model, user)
        return user.count

    run.__name__ = name
    habit(run)


hooks_of_an_attribute("hooks_are_given_the_scripts_object", torch.optim.SGD)
hooks_of_an_attribute("hooks_are_given_an_object_that_makes_its_own_steps", torch.optim.RAdam)
hooks_of_an_attribute("hooks_are_given_an_object_with_its_own_step", Decayed)

hooks_of_before("hooks_that_were_there_before", torch.optim.SGD)
hooks_of_before("hooks_of_one_that_makes_its_own_steps", torch.optim.RAdam)
hooks_of_before("hooks_of_one_with_its_own_step", Decayed)
