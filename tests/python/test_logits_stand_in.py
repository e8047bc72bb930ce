"""budget.logits: what scripts do with logits that are not there, beside whole ones."""

import warnings
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from test_logits import LENGTH, VOCABULARY, ids_of, made, same, shifted, started, train
from torch.utils.checkpoint import checkpoint


class Own(torch.autograd.Function):
    """A loss of the script's own, to which torch hands the stand-in itself."""

    @staticmethod
    def forward(ctx, y, target):
        ctx.save_for_backward(y, target)
        return F.cross_entropy(y, target)

    @staticmethod
    def backward(ctx, gradient):
        y, target = ctx.saved_tensors
        return gradient * (y.softmax(-1) - F.one_hot(target, VOCABULARY)) / len(y), None


def by_own_function(y, ids):
    return Own.apply(y.view(-1, VOCABULARY), ids.flatten())


def by_checkpoint(y, ids):
    def loss(y):
        return F.cross_entropy(y.view(-1, VOCABULARY), ids.flatten())

    return checkpoint(loss, y, use_reentrant=True)


@pytest.mark.parametrize("loss", [by_own_function, by_checkpoint])
def test_a_function_of_autograd_that_would_lose_their_gradient_is_refused(loss, config):
    engine = started(config, made(loss), "1MiB")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = engine(ids_of(0))
        with pytest.raises(RuntimeError, match=r"was given the logits of head themselves"):
            engine.backward(value)
    engine.close()
    found = []
    for size in (None, "1MiB"):
        engine = started(config, made(lambda y, ids: loss(y + 0, ids)), size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(train(engine))
        engine.close()
    same(found[1], found[0], 0)


def test_logits_that_a_checkpoint_returned_are_refused(config):
    model = made(lambda y, ids: y)
    head = model.head
    model.loss = None
    engine = started(config, model, "1MiB")

    def forward(ids):
        x = model.embedding(ids)
        return checkpoint(head, x, use_reentrant=True).flatten(0, 1)

    model.forward = forward
    with pytest.raises(RuntimeError, match="returned the logits of head"):
        F.cross_entropy(engine(ids_of(0)), ids_of(0).flatten())
    engine.close()


def test_weights_that_have_changed_since_are_an_error(config):
    engine = started(config, made(lambda y, ids: y), "1MiB")
    y = engine(ids_of(0))
    engine.backward(F.cross_entropy(y.flatten(0, 1), ids_of(0).flatten()))
    engine.step()
    with (
        pytest.raises(RuntimeError, match="the weights of head have changed since its call"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        y.argmax(-1)
    engine.close()


def test_changes_in_place_are_seen_by_views_and_not_by_copies(config):
    found = []
    for size in (None, "1MiB"):
        engine = started(config, made(lambda y, ids: y), size)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            y = engine(ids_of(0))
            flat, some, copied = y.view(-1, VOCABULARY), y[:, 1:3], y[:, 1:3].contiguous()
            twice, same_one, last = y * 2, y.float(), y[:, -1].unsqueeze(1)
            flat.argmax(-1), some.argmax(-1)  # whole before the others
            y[..., 5] = -9.0
            flat[0].zero_()
            some[..., 7].fill_(3.0)
            copied /= 2
            flat.select(1, 9).fill_(4.0)
            flat.detach()[:, 11] = 5.0
            some.data[..., 12] = 6.0
            last.zero_()
            F.relu(some, inplace=True)
            found.append([each.clone() + 0 for each in (y, flat, some, copied, twice, same_one, last)])
        engine.close()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_retained_gradients(config):
    found = []
    for size in (None, "1MiB"):
        engine = started(config, made(lambda y, ids: y), size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            y = engine(ids_of(0))
            flat = y.view(-1, VOCABULARY)
            flat.argmax(-1)
            y.retain_grad()
            engine.backward(F.cross_entropy(flat, ids_of(0).flatten()))
            found.append(y.grad.clone())
        engine.close()
    torch.testing.assert_close(found[0], found[1])


def test_a_loss_without_gradients_has_no_graph(config):
    engine = started(config, made(lambda y, ids: y), "1MiB")
    y = engine(ids_of(0)).flatten(0, 1)
    with torch.no_grad():
        assert not F.cross_entropy(y, ids_of(0).flatten()).requires_grad
    engine.close()


def test_a_sum_in_fp16_does_not_overflow(config):
    model = made(lambda y, ids: y, torch.float16)
    engine = started(config, model, "1MiB")
    y = engine(ids_of(0, rows=30)).flatten(0, 1)  # 12,000 losses of about 7.6
    loss = F.cross_entropy(y, ids_of(0, rows=30).flatten())
    assert loss.dtype is torch.float16 and 7 < loss.item() < 9
    engine.close()


@pytest.mark.parametrize("inside", [True, False])
def test_the_loss_has_the_autocast_of_its_own_call(inside, config):
    found = []
    for size in (None, "1MiB"):
        engine = started(config, made(lambda y, ids: y), size)
        with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
            y = engine(ids_of(0)).flatten(0, 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            loss = F.cross_entropy(y, ids_of(0).flatten())
        found.append((y.dtype, loss.dtype, loss.item()))
        engine.close()
    assert found[0][:2] == found[1][:2]
    assert found[1][2] == pytest.approx(found[0][2], rel=1e-2)


def test_they_look_contiguous_where_they_would_be(config):
    engine = started(config, made(lambda y, ids: y), "1MiB")
    y = engine(ids_of(0))
    assert y.is_contiguous() and not y[:, 1:].is_contiguous() and y[:, 1:].contiguous().is_contiguous()
    engine.close()


def test_containers_of_other_classes(config):
    class Pair(NamedTuple):
        one: torch.Tensor
        other: torch.Tensor

    class Kept(list):
        pass

    engine = started(config, made(lambda y, ids: y), "1MiB")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.cat(Pair(engine(ids_of(0)), engine(ids_of(1)))).shape == (4, LENGTH, VOCABULARY)
        with pytest.raises(TypeError, match="inside an object that is no tuple, list or dict"):
            torch.cat(Kept([engine(ids_of(0))]))
    engine.close()


def test_a_compiled_loss_of_them_is_an_error_and_of_a_copy_is_right(config):
    """torch.compile takes the stand-in for the tensor that it looks like, and notices that it is none."""
    loss_of, found = torch.compile(shifted, backend="eager"), []
    for size in (None, "1MiB"):
        engine = started(config, made(lambda y, ids: y), size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if size is not None:
                with pytest.raises(AssertionError, match="Guard failed"):
                    loss_of(engine(ids_of(0)), ids_of(0))
            found.append(train(engine, lambda engine, ids: loss_of(engine(ids) + 0, ids)))
        engine.close()
        torch._dynamo.reset()
    same(found[1], found[0], 0)
