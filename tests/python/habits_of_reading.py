"""Habits: weights that are read outside forward."""

import copy
import hashlib
import io
import pickle

import numpy as np
import torch
from habits import batch, habit, loss_of, train
from torch import nn
from torch.func import functional_call, stack_module_state
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


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
def averaged_model_with_buffers(make):
    torch.manual_seed(0)
    model, optimizer = make(nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
    average = AveragedModel(model, use_buffers=True)
    train(model, optimizer, 3, after=lambda: average.update_parameters(model))
    return average.state_dict()


@habit
def averaged_model_by_a_function(make):
    model, optimizer = make()
    average = AveragedModel(model, avg_fn=lambda a, p, n: 0.9 * a + 0.1 * p)
    train(model, optimizer, 3, after=lambda: average.update_parameters(model))
    return average.state_dict()


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
