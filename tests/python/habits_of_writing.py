"""Habits: weights that are written outside forward, and what would take their memory away."""

import copy

import safetensors.torch
import torch
from habits import batch, habit, loss_of, train
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def writing(function):
    """Between steps, before the first, and after the last."""

    def run(make):
        model, optimizer = make()
        function(model)
        losses = train(model, optimizer, 2, after=lambda: function(model))
        function(model)
        seen = [p.detach().clone() for p in model.parameters()]
        return losses, seen, model(batch()).detach()

    run.__name__ = function.__name__
    return habit(run)


@writing
def clamp_data(model):
    for p in model.parameters():
        p.data.clamp_(-0.05, 0.05)


@writing
def clamp_without_grad(model):
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.05, 0.05)


@writing
def initialise_again(model):
    torch.manual_seed(1)
    nn.init.xavier_uniform_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    nn.init.normal_(model[2].weight, std=0.02)
    nn.init.constant_(model[2].bias, 0.1)


@writing
def apply_an_initialiser(model):
    torch.manual_seed(2)

    def fill(module):
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
            module.bias.data.fill_(0.01)

    model.apply(fill)


@writing
def reset_parameters(model):
    torch.manual_seed(3)
    for layer in model:
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()


@writing
def copy_into(model):
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight * 0.5)
        model[2].bias.copy_(torch.ones(4))


@writing
def replace_data(model):
    model[0].weight.data = model[0].weight.data * 0.5
    model[2].bias.data = torch.full((4,), 0.25)


@writing
def index_data(model):
    model[0].weight.data[3] = 0.5
    model[0].weight.data[:, 2] *= 2
    model[2].bias.data[1] += 1


@writing
def index_without_grad(model):
    with torch.no_grad():
        model[0].weight[3] = 0.5
        model[2].weight[:, 1].mul_(3)
        model[2].bias[0] += 1


@writing
def add_noise(model):
    torch.manual_seed(4)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.01)


@writing
def decay_by_hand(model):
    for p in model.parameters():
        p.data.mul_(0.9)


@writing
def mask(model):
    kept = (torch.arange(32 * 16).view(32, 16) % 3 > 0).float()
    model[0].weight.data.mul_(kept)


@writing
def normalise_rows(model):
    with torch.no_grad():
        model[0].weight.div_(model[0].weight.norm(dim=1, keepdim=True))


@writing
def renorm(model):
    model[0].weight.data.renorm_(2, 0, 0.3)


@writing
def fill_numpy(model):
    model[0].weight.data.numpy()[...] *= 0.5
    model[2].bias.detach().numpy()[1] = 3.0


@writing
def through_detach(model):
    model[0].weight.detach().mul_(0.5)
    model[0].bias.detach()[2:4].zero_()


@writing
def through_a_view(model):
    with torch.no_grad():
        model[0].weight.view(-1)[5:9].fill_(0.5)
        model[2].weight.t()[0].zero_()


@writing
def foreach_in_place(model):
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.9)


@writing
def from_a_vector(model):
    vector_to_parameters(parameters_to_vector(model.parameters()) * 0.8, model.parameters())


@writing
def load_state(model):
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


@habit
def through_the_state_dict(make, **options):
    model, optimizer = make(**options)
    view = model[2].weight.data
    seen = []

    def edit():
        state = model.state_dict()
        view.mul_(1.1)
        state["0.weight"].mul_(0.9)
        state["2.bias"][1] = 0.5
        seen.append(model(batch()).detach())
        seen.append(model[2].bias.detach().clone())

    edit()
    return train(model, optimizer, 3, after=edit), seen


@habit
def through_the_state_dict_beside_own_steps(make):
    return through_the_state_dict(make, kind=torch.optim.RAdam, lr=1e-3)


@writing
def in_several_ways_at_once(model):
    view = model[0].weight.data
    model[0].weight.data.add_(0.1)
    view.mul_(2)
    nn.init.zeros_(model[0].bias)
    view[0] = model[0].bias[0].item()


@writing
def random_fills(model):
    torch.manual_seed(5)
    model[0].weight.data.uniform_(-0.1, 0.1)
    with torch.no_grad():
        model[2].weight.normal_(0, 0.1)
        model[2].bias.zero_()
        model[0].bias.fill_(0.2)


@habit
def swap_the_average_in_and_out(make):
    model, optimizer = make()
    shadow = [p.detach().clone() * 0.9 for p in model.parameters()]
    train(model, optimizer, 1)
    kept = [p.data.clone() for p in model.parameters()]
    for p, s in zip(model.parameters(), shadow):
        p.data.copy_(s)
    seen = model(batch()).detach()
    for p, k in zip(model.parameters(), kept):
        p.data.copy_(k)
    return seen, train(model, optimizer, 2)


@habit
def look_ahead(make):
    model, optimizer = make()
    slow = [p.detach().clone() for p in model.parameters()]

    def pull():
        with torch.no_grad():
            for s, p in zip(slow, model.parameters()):
                s.add_(p - s, alpha=0.5)
                p.copy_(s)

    return train(model, optimizer, 3, after=pull)


@habit
def rewind_to_the_start(make):
    model, optimizer = make()
    start = copy.deepcopy(model.state_dict())
    train(model, optimizer, 2)
    model.load_state_dict(start)
    return train(model, optimizer, 2)


@habit
def a_soft_update_between_two_that_train(make):
    (student, optimizer), (teacher, other) = make(seed=0), make(seed=1)

    def follow():
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), student.parameters()):
                t.mul_(0.9).add_(s, alpha=0.1)

    losses = train(student, optimizer, 2, after=follow)
    return losses, train(teacher, other, 2), [p.detach().clone() for p in teacher.parameters()]


@habit
def views_by_one_function(make):
    torch.manual_seed(1)
    model, optimizer = make(nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))))
    with torch.no_grad():
        views = [view.detach() for view in torch.atleast_2d(*[layer.bias for layer in model])]
    losses = train(model, optimizer, 2)
    seen = copy.deepcopy(views)
    for view in views:
        view.numpy()[...] = 0.5
    return losses, seen, train(model, optimizer, 2)


@habit
def weights_as_arguments(make):
    model, optimizer = make()
    b = model[2].bias
    x = torch.ones(4, requires_grad=True)
    (slope,) = torch.autograd.grad((x * 2), x, b)
    (x * 3).backward(b)
    with torch.no_grad():
        made = torch.full_like(x, b[0].item()), x.new_full((2,), float(b[1]))
    return slope, x.grad, made, train(model, optimizer, 1)


@habit
def a_hook_that_reads_another_weight(make):
    model, optimizer = make()
    seen = []

    def loss(m, i):
        x = batch(i).requires_grad_()
        x.register_hook(lambda g: seen.append(m[2].weight.norm().item()))
        y = m(x)
        torch.autograd.grad(y.sum(), list(m.parameters()), retain_graph=True)
        return y.square().mean()

    return train(model, optimizer, 2, loss), seen


@habit
def a_frozen_scalar(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    model.scale = nn.Parameter(torch.tensor(0.7), requires_grad=False)
    model, optimizer = make(model)
    x = torch.ones(3)
    made = x * model.scale, torch.full_like(x, model.scale.item()), float(model.scale)
    model.scale.requires_grad = True
    model.scale.requires_grad = False
    return made, train(model, optimizer, 2)


class Own(nn.Parameter):
    pass


@habit
def a_parameter_of_a_class_of_its_own(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    model[0].weight = Own(model[0].weight.detach().clone())
    model, optimizer = make(model)
    seen = []
    train(model, optimizer, 2, after=lambda: seen.append(model[0].weight.norm().item()))
    return seen, type(model[0].weight).__name__, isinstance(model[0].weight, Own)


@habit
def saved_by_safetensors(make):
    model, optimizer = make()
    train(model, optimizer, 1)
    return safetensors.torch.load(
        safetensors.torch.save({n: p.detach() for n, p in model.named_parameters()})
    ), (safetensors.torch.load(safetensors.torch.save(dict(model.named_parameters()))))


@habit
def views_of_many_layers_write_later(make):
    torch.manual_seed(1)
    model, optimizer = make(nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))))
    views = [p.data for p in model.parameters()]
    arrays = [p.detach().numpy() for p in model.parameters()]

    def shrink():
        for view, array in zip(views, arrays):
            view.mul_(0.9)
            array -= 0.001

    return train(model, optimizer, 3, after=shrink), copy.deepcopy(views)


@habit
def views_that_are_kept_write_later(make):
    model, optimizer = make()
    views = [p.data for p in model.parameters()]

    def shrink():
        for view in views:
            view.mul_(0.9)

    return train(model, optimizer, 3, after=shrink), copy.deepcopy(views)


@habit
def adversarial_weights(make):
    """Perturbed for one forward and backward, then restored, as in sharpness-aware minimisation."""
    model, optimizer = make()

    def loss(m, i):
        with torch.no_grad():
            for p in m.parameters():
                p.add_(0.01)
        value = loss_of(m, i)
        return value

    def restore():
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.01)

    return train(model, optimizer, 3, loss, restore)


@habit
def an_ensemble_of_functional_calls(make):
    models = [make(seed=i)[0] for i in range(2)]
    parameters, buffers = stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    return vmap(lambda p, b, x: functional_call(base, (p, b), (x,)), in_dims=(0, 0, None))(
        parameters, buffers, batch()
    ).detach()


# ---- what takes memory away


@habit(refused=r"share_memory_ of 0\.weight.*state_dict")
def share_memory_of_a_parameter(make):
    model, _ = make()
    model[0].weight.share_memory_()


@habit(refused=r"resize_ of 0\.bias.*before overspill\.initialize")
def resize(make):
    model, _ = make()
    model[0].bias.requires_grad_(False).resize_(3)


@habit(refused=r"transpose_ of 0\.weight.*view")
def transpose_in_place(make):
    model, _ = make()
    with torch.no_grad():
        model[0].weight.transpose_(0, 1)
