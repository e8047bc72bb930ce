"""What scripts do with parameters, their gradients and states, each as a script that knows nothing of an engine.

A habit is a function of `make`, which gives a model and its optimizer, plain or under an engine. It returns what it
saw; the model's state_dict at the end is compared too. `refused`: what the error says where the engine does not let
it."""

import copy
import hashlib
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


@dataclass
class Habit:
    name: str
    run: Callable[[Callable], Any]
    refused: str | None


HABITS: list[Habit] = []


def habit(run=None, *, refused=None):
    if run is None:
        return lambda run: habit(run, refused=refused)
    HABITS.append(Habit(run.__name__, run, refused))
    return run


def batch(i=0):
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(i))


def loss_of(model, i=0):
    return model(batch(i)).square().mean()


def train(model, optimizer, steps=2, loss=loss_of, after=lambda: None):
    """The usual loop; the losses."""
    losses = []
    for i in range(steps):
        optimizer.zero_grad()
        value = loss(model, i)
        value.backward()
        optimizer.step()
        after()
        losses.append(value.item())
    return losses


class Scaled(nn.Module):
    """Has weights that a script uses outside forward."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(12, 16)
        self.body = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, ids):
        return torch.tanh(self.body(self.emb(ids)))


# ---- a term of the loss


def penalised(term):
    def run(make):
        model, optimizer = make()
        return train(model, optimizer, 3, lambda m, i: loss_of(m, i) + 0.01 * term(m))

    return run


def term(function):
    run = penalised(function)
    run.__name__ = function.__name__
    return habit(run)


@term
def l2_term(model):
    return sum(p.pow(2).sum() for p in model.parameters())


@term
def l1_term(model):
    return sum(p.abs().sum() for p in model.parameters())


@term
def norm_term(model):
    return sum(p.norm() for p in model.parameters())


@term
def norm_by_torch_norm(model):
    return sum(torch.norm(p, 2) for p in model.parameters())


@term
def term_over_a_vector_of_all(model):
    return parameters_to_vector(model.parameters()).square().mean()


@term
def term_over_a_cat_of_views(model):
    return torch.cat([p.view(-1) for p in model.parameters()]).abs().max()


@term
def orthogonality(model):
    w = model[0].weight
    return (w.T @ w - torch.eye(16)).square().sum()


@term
def spectral_term(model):
    return torch.linalg.matrix_norm(model[2].weight, 2)


@term
def relu_of_weights(model):
    return F.relu(model[0].weight).sum() + model[0].bias.clamp(min=0).sum()


@term
def stacked_means(model):
    return torch.stack([p.mean() for p in model.parameters()]).square().sum()


@term
def foreach_norm(model):
    return torch.stack(torch._foreach_norm(list(model.parameters()))).sum()


@term
def term_through_indexing(model):
    return model[0].weight[3].sum() + model[2].weight[:, 2:5].square().sum() + model[0].bias[7]


@term
def term_through_iteration(model):
    return sum(row.square().sum() for row in model[2].weight)


@term
def a_weight_cosine(model):
    return F.cosine_similarity(model[0].weight[0], model[0].weight[1], dim=0)


@habit
def distance_to_the_start(make):
    model, optimizer = make()
    start = [p.detach().clone() for p in model.parameters()]
    return train(
        model,
        optimizer,
        3,
        lambda m, i: loss_of(m, i) + sum((p - q).square().sum() for p, q in zip(m.parameters(), start)),
    )


@habit
def a_weight_that_forward_does_not_use(make):
    model, optimizer = make(Scaled())
    ids = torch.arange(6)
    return train(model, optimizer, 3, lambda m, i: (m(ids + i) * m.scale.exp()).square().mean())


@habit
def a_tied_head_outside_forward(make):
    model, optimizer = make(Scaled())
    ids = torch.arange(6)

    def loss(m, i):
        return F.cross_entropy(F.linear(m(ids + i), m.emb.weight), ids)

    return train(model, optimizer, 3, loss)


@habit
def a_layer_by_its_function(make):
    model, optimizer = make()

    def loss(m, i):
        hidden = F.gelu(F.linear(batch(i), m[0].weight, m[0].bias))
        return m[2](hidden).square().mean()

    return train(model, optimizer, 3, loss)


@habit
def a_layers_forward_called_directly(make):
    model, optimizer = make()
    return train(
        model, optimizer, 3, lambda m, i: m[2].forward(F.gelu(m[0].forward(batch(i)))).square().mean()
    )


# ---- reading


def reading(function):
    """Read before, between and after steps."""

    def run(make):
        model, optimizer = make()
        seen = [function(model)]
        train(model, optimizer, 2, after=lambda: seen.append(function(model)))
        return seen

    run.__name__ = function.__name__
    return habit(run)


@reading
def sum_of_all(model):
    return sum(p.sum().item() for p in model.parameters())


@reading
def detach(model):
    return [p.detach().clone() for p in model.parameters()]


@reading
def data(model):
    return [p.data.mean() for p in model.parameters()]


@reading
def numpy_of_detach(model):
    return [p.detach().numpy().copy() for p in model.parameters()]


@reading
def numpy_asarray(model):
    return [np.asarray(p.detach()).sum() for p in model.parameters()]


@reading
def numpy_array_of_data(model):
    return [np.array(p.data) for p in model.parameters()]


@reading
def numpy_by_force(model):
    return model[0].weight.numpy(force=True).copy()


@reading
def cpu_detach_numpy_histogram(model):
    return [np.histogram(p.detach().cpu().numpy(), bins=8)[0] for p in model.parameters()]


@reading
def histc(model):
    return [torch.histc(p.detach(), 10) for p in model.parameters()]


@reading
def printed(model):
    return repr(model[2].bias) + str(model[0].weight) + f"{model[0].weight}"


@reading
def printed_state(model):
    return repr(dict(model.named_parameters()))


@reading
def formatted_scalar(model):
    return f"{model[2].bias.mean():.3f} {model[2].bias[0]:.2e}"


@reading
def items(model):
    return model[0].weight[0, 0].item(), float(model[2].bias[1]), model[2].bias.tolist()


@reading
def to_vector(model):
    return parameters_to_vector(model.parameters()).detach()


@reading
def statistics(model):
    return [(p.mean(), p.std(), p.min(), p.max(), p.abs().max(), p.norm(p=1)) for p in model.parameters()]


@reading
def singular_values(model):
    return torch.linalg.svdvals(model[0].weight), torch.linalg.matrix_rank(model[2].weight)


@reading
def finite(model):
    return all(torch.isfinite(p).all() for p in model.parameters())


@reading
def zeros_counted(model):
    return sum((p == 0).sum().item() for p in model.parameters())


@reading
def top_weights(model):
    return torch.topk(model[0].weight.abs().flatten(), 5)


@reading
def conversions(model):
    w = model[0].weight
    return (
        w.double().sum(),
        w.to(torch.float64),
        w.half(),
        w.to("cpu"),
        w.cpu().detach().clone(),
        w.bfloat16(),
    )


@reading
def clones_by_name(model):
    return {name: p.clone().detach() for name, p in model.named_parameters()}


@reading
def products(model):
    w = model[2].weight
    with torch.no_grad():
        return w @ w.T, torch.mm(w, w.t()), w.matmul(torch.ones(32)), torch.einsum("ij,kj->ik", w, w)


@reading
def arithmetic(model):
    b = model[2].bias
    with torch.no_grad():
        return b + 1, 1 - b, b * 2, 2 / (b + 3), -b, b**2, b > 0, b == b, torch.where(b > 0, b, 0)


@reading
def memory_of_numpy(model):
    return bytes(memoryview(model[2].bias.detach().numpy()).cast("B"))


@reading
def digests(model):
    return hashlib.sha256(model[0].weight.detach().numpy().tobytes()).hexdigest()


@reading
def dlpack(model):
    return torch.from_dlpack(model[0].weight.detach()).clone(), np.from_dlpack(model[2].bias.detach()).copy()


@reading
def pickled(model):
    return pickle.loads(pickle.dumps(model[0].weight)).detach()


@reading
def saved_parameters(model):
    buffer = io.BytesIO()
    torch.save(list(model.parameters()), buffer)
    buffer.seek(0)
    return [p.detach() for p in torch.load(buffer, weights_only=True)]


@reading
def saved_state(model):
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@reading
def deep_copies(model):
    return [p.detach() for p in copy.deepcopy(model).parameters()], copy.deepcopy(model[0].weight).detach()


@reading
def metadata(model):
    w = model[0].weight
    return (
        [w.shape, w.dtype, w.device, w.ndim, w.numel(), w.stride(), w.is_leaf, w.requires_grad, len(w)],
        [w.is_contiguous(), w.element_size(), w.nbytes, w.storage_offset(), w.dim(), w.size(0)],
        [isinstance(w, nn.Parameter), isinstance(w, torch.Tensor), torch.is_tensor(w)],
        sum(p.numel() for p in model.parameters() if p.requires_grad),
    )


@reading
def addresses_are_distinct(model):
    return len({p.data_ptr() for p in model.parameters()}), len(set(model.parameters()))


@reading
def likes(model):
    w = model[0].weight
    return (
        torch.zeros_like(w),
        torch.ones_like(w),
        torch.full_like(w, 2.0),
        w.new_zeros(3),
        w.new_tensor([1.0]),
    )


@reading
def splits(model):
    w = model[0].weight
    with torch.no_grad():
        return w.chunk(2), w.split(8, dim=1), torch.unbind(w)[1], w.unfold(0, 2, 2).sum(), w.T[0], w.mT[1]


@reading
def comparisons(model):
    w = model[0].weight
    return torch.equal(w, w.clone()), torch.allclose(w, w + 1e-9), (w == w).all().item(), w is model[0].weight


@reading
def cast_to_python(model):
    return bool((model[2].bias > -9).all()), int(model[2].bias.argmax()), list(map(float, model[2].bias))


@habit
def averaged_by_data(make):
    model, optimizer = make()
    shadow = {name: p.data.clone() for name, p in model.named_parameters()}

    def average():
        for name, p in model.named_parameters():
            shadow[name] = 0.9 * shadow[name] + 0.1 * p.data

    train(model, optimizer, 3, after=average)
    return shadow


@habit
def averaged_in_place(make):
    model, optimizer = make()
    averages = [p.clone().detach() for p in model.parameters()]

    def average():
        with torch.no_grad():
            for a, p in zip(averages, model.parameters()):
                a.lerp_(p, 0.1)

    train(model, optimizer, 3, after=average)
    return averages


@habit
def averaged_model(make):
    model, optimizer = make()
    average = AveragedModel(model)
    train(model, optimizer, 3, after=lambda: average.update_parameters(model))
    return [p.detach() for p in average.module.parameters()], average(batch()).detach()


@habit
def averaged_model_by_decay(make):
    model, optimizer = make()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    train(model, optimizer, 3, after=lambda: average.update_parameters(model))
    return [p.detach() for p in average.module.parameters()]


@habit
def a_target_network_that_follows(make):
    model, optimizer = make()
    target = copy.deepcopy(model)

    def follow():
        for t, p in zip(target.parameters(), model.parameters()):
            t.data.copy_(0.05 * p.data + 0.95 * t.data)

    train(model, optimizer, 3, after=follow)
    return [p.detach() for p in target.parameters()]


@habit
def an_ensemble(make):
    models = [make(seed=i)[0] for i in range(2)]
    parameters, _ = stack_module_state(models)
    return {name: p.detach() for name, p in parameters.items()}


@habit
def functional_call_with_copies(make):
    model, optimizer = make()
    train(model, optimizer, 1)
    weights = {name: 2 * p.detach() for name, p in model.named_parameters()}
    return functional_call(model, weights, batch())


@habit
def a_view_that_is_kept_over_steps(make):
    """What it shows is the weight, at any time."""
    model, optimizer = make()
    views = [p.data for p in model.parameters()] + [model[0].weight.detach().numpy()]
    seen = []
    train(model, optimizer, 3, after=lambda: seen.extend(copy.deepcopy(views)))
    return seen


@habit
def gradient_penalty(make):
    model, optimizer = make()

    def loss(m, i):
        x = batch(i).requires_grad_()
        (slope,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        return loss_of(m, i) + slope.square().mean()

    return train(model, optimizer, 3, loss)


# ---- writing


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
def through_the_state_dict(make):
    model, optimizer = make()
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
