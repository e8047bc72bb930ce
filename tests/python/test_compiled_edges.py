"""engine.compile: blocks and scripts of many kinds train as without it, or are told."""

import functools
import gc
import warnings
import weakref

import pytest
import torch
from test_compiled_blocks import (
    STEPS,
    WIDTH,
    Layer,
    Numbered,
    batch,
    by_autograd_alone,
    made,
    run,
    same,
    train,
)
from torch import nn
from torch.utils import checkpoint as checkpoints

import overspill

assert by_autograd_alone and run  # fixtures


class Masked(Layer):
    """A buffer that is None at first, one that begins as None and is set by the first call."""

    def __init__(self, number=0):
        super().__init__(number)
        self.register_buffer("mask", None)
        self.register_buffer("ema", None)

    def forward(self, x):
        y = super().forward(x)
        self.ema = y.detach().mean() if self.ema is None else 0.5 * self.ema + y.detach().mean()
        return y if self.mask is None else y * self.mask


def test_buffers_may_come_later(config):
    found = []
    for compile in (False, True):
        model, said = made(Masked), config(job=f"c{compile}")
        said["engine"].compile = compile
        engine, *_ = overspill.initialize(model, said)
        first = train(engine)
        model.layers[1].mask = torch.full((WIDTH,), 0.5)
        model.layers[2].register_buffer("extra", torch.ones(2))
        found.append((first[0] + train(engine)[0], [layer.ema for layer in model.layers]))
        if compile:
            assert engine.compiled["plain_calls"] == 0
        engine.close()
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    torch.testing.assert_close(found[1][1], found[0][1])


def test_blocks_of_which_some_have_a_buffer(run):
    class Some(Layer):
        def __init__(self, number=0):
            super().__init__(number)
            self.register_buffer("mask", None if number % 2 else torch.full((WIDTH,), 0.5))

        def forward(self, x):
            y = super().forward(x)
            return y if self.mask is None else y * self.mask

    same(run(made(Some), True), run(made(Some), False))


def test_a_call_of_the_class_is_made_once(run):
    class Halved(Layer):
        def __call__(self, *args, **kwargs):
            return super().__call__(*args, **kwargs) * 0.5

    same(run(made(Halved), True), run(made(Halved), False))


def test_a_forward_that_is_replaced_after_the_first_call_is_called(config):
    model, said = made(), config()
    said["engine"].compile = True
    engine, *_ = overspill.initialize(model, said)
    train(engine, 1)
    calls, up = [], model.layers[1].up
    up.forward = lambda x: calls.append(1) or nn.Linear.forward(up, x)
    with pytest.warns(UserWarning, match="the script has replaced, or compiled, the call of a Linear"):
        engine(batch(0))
    assert calls == [1]
    engine.close()


@pytest.mark.parametrize("hold", [lambda m: m, lambda m: [m], lambda m: {"m": functools.partial(m)}])
def test_attributes_that_hold_methods_of_the_block_are_told(hold, run):
    class Bound(Layer):
        def __init__(self, number=0):
            super().__init__(number)
            self.count = 0
            self.run = hold(self.own)

        def own(self, x):
            self.count += 1
            return super().forward(x)

        def forward(self, x):
            run = self.run[0] if isinstance(self.run, list) else self.run
            return (run["m"] if isinstance(run, dict) else run)(x)

    models = [made(Bound) for _ in range(2)]
    with pytest.warns(UserWarning, match="an attribute that holds a method"):
        same(run(models[1], True), run(models[0], False))
    assert models[0].layers[1].count == models[1].layers[1].count == STEPS + 1


def test_an_engine_that_nobody_has_any_more_ends(config):
    class Seen(Layer):
        def forward(self, x):
            self.last = super().forward(x)
            return self.last

    said = config()
    said["engine"].compile = True
    engine = overspill.initialize(made(Seen), said)[0]
    train(engine, 1)
    life = weakref.ref(engine._life)
    del engine
    gc.collect()
    assert life() is None


def test_what_forward_compiled_is_computed_again_compiled(run):
    """Also where the kind of block was given up meanwhile."""
    with torch._dynamo.config.patch(recompile_limit=2), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run(made(Numbered), True, recompute="blocks")
    same(found, run(made(Numbered), False, recompute="blocks"))
    assert found[2]["plain_calls"] > 0


def test_passes_of_two_lengths_before_one_backward(config):
    found = []
    for compile in (False, True):
        said = config(job=f"c{compile}", recompute="blocks")
        said["engine"].compile = compile
        engine, *_ = overspill.initialize(made(), said)
        losses = []
        for i in range(3):
            parts = [engine(batch(i, length)).square().mean() for length in (8, 5, 11 + i)]
            engine.backward(sum(parts))
            engine.step()
            losses += [part.item() for part in parts]
        found.append(losses)
        engine.close()
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_a_graph_may_be_kept(config):
    found = []
    for compile in (False, True):
        said = config(job=f"c{compile}")
        said["engine"].compile = compile
        engine, *_ = overspill.initialize(made(), said)
        loss = engine(batch(0)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append({name: engine.grad(p).clone() for name, p in engine.module.named_parameters()})
        engine.close()
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value)


def test_a_block_whose_class_makes_its_objects_itself(run):
    class Made(Layer):
        def __new__(cls, number):
            return super().__new__(cls)

    same(run(made(Made), True), run(made(Made), False))


def test_a_module_that_blocks_share(config):
    """More is held at once than the units of one block: what all have, too."""

    class Sharing(nn.Module):
        def __init__(self, shared):
            super().__init__()
            self.shared, self.own = shared, nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return x + self.shared(self.own(x))

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            shared = nn.Sequential(
                *(nn.Linear(a, b) for a, b in [(WIDTH, 1 << 15), (1 << 15, WIDTH)] * 5)
            )  # each has a unit of its own
            self.layers = nn.ModuleList(Sharing(shared) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    losses = []
    for compile in (False, True):
        said = config("nvme", prefetch_units=0, job=f"c{compile}")
        said["engine"].compile, said["budget"]["host"] = compile, "1GiB"
        torch.manual_seed(0)
        engine, *_ = overspill.initialize(Whole(), said)
        loss = engine(torch.ones(2, WIDTH)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        engine.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_torchs_own_checkpoint_around_the_engine_is_no_compilation(config):
    engine, *_ = overspill.initialize(made(), config())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoints.checkpoint(engine, batch(0), use_reentrant=False)
    engine.close()
