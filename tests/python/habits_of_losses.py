"""Habits: weights in a term of the loss."""

import torch
import torch.nn.functional as F
from habits import Scaled, batch, habit, loss_of, train
from torch.nn.utils import parameters_to_vector


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
