"""engine.compile: the blocks of a model are compiled once for all that are alike, and train as without it."""

import copy
import json
import re
import warnings

import launch
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import overspill
from overspill.layers import compiled

STEPS = 4
WIDTH = 16


@pytest.fixture(autouse=True)
def by_autograd_alone(monkeypatch):
    """All that torch.compile does but the generation of code, which takes long."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Layer(nn.Module):
    def __init__(self, number=0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.number, self.factor = number, 1.0

    def forward(self, x, mask=None, *, add=None):
        y = self.down(F.gelu(self.up(self.norm(x))))
        y = y if mask is None else y * mask
        return x + y * self.factor if add is None else x + y + add[0]


class Net(nn.Module):
    def __init__(self, layer=Layer, count=3):
        super().__init__()
        self.embedding = nn.Embedding(13, WIDTH)
        self.layers = nn.ModuleList(layer(i) for i in range(count))
        self.head = nn.Linear(WIDTH, 13)

    def forward(self, x, **more):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, **more)
        return self.head(x)


def batch(i, length=8):
    return torch.randint(0, 13, (2, length), generator=torch.Generator().manual_seed(i))


def made(layer=Layer, **options):
    torch.manual_seed(0)
    return Net(layer, **options)


def train(engine, steps=STEPS, **more):
    losses = []
    for i in range(steps):
        loss = F.cross_entropy(engine(batch(i), **more).flatten(0, 1), batch(i).flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(engine(batch(9), **more).square().mean().item())
    return losses, {name: value.clone() for name, value in engine.state_dict().items()}


@pytest.fixture
def run(config):
    """run(model, compile, **settings) -> losses, weights and what was compiled."""

    def one(model, compile, placement="nvme", more=None, **settings):
        said = config(placement, job=f"compile{compile}", **settings)
        said["engine"].compile = compile
        engine, *_ = overspill.initialize(model, said)
        try:
            return *train(engine, **(more or {})), engine.compiled, engine.plan_text
        finally:
            engine.close()

    return one


def same(one, other):
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    for name, value in one[1].items():
        torch.testing.assert_close(value, other[1][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("placement", ["host", "half", "nvme"])
@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_it_trains_as_without_it(placement, recompute, run):
    expected = run(made(), False, placement)
    found = run(made(), True, placement, recompute=recompute)
    same(found, expected)
    said = found[2]
    # With gradients, and for the forward without.
    assert (said["blocks"], said["kinds"], said["graphs"], said["graph_breaks"]) == (3, 1, 2, 0)
    assert said["plain_calls"] == 0
    # The first call of the first block looks at what it changes, and is not made again.
    assert said["calls"] == 3 * (STEPS + 1) + (3 * STEPS - 1 if recompute == "blocks" else 0)
    assert "torch.compile: 3 blocks of 1 kind, 2 graphs and 0 graph breaks so far\n" in found[3]
    assert expected[2] is None and "torch.compile" not in expected[3]


def test_arguments_of_all_kinds(run):
    more = {"mask": torch.rand(2, 8, 1), "add": (torch.rand(WIDTH), 3)}
    same(run(made(), True, more=more), run(made(), False, more=more))


class Dropping(Layer):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.3, self.training)


class Counting(Layer):
    """BatchNorm's means change, and attributes that the script reads."""

    def __init__(self, number=0):
        super().__init__(number)
        self.normed = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.seen = x.detach().mean()
        self.calls = self.calls + 1
        return self.normed(super().forward(x).flatten(0, 1)).view_as(x)


class Numbered(Layer):
    """Reads what differs between the blocks."""

    def forward(self, x):
        return super().forward(x) * (1 + self.number / 10)


class Broken(Layer):
    def forward(self, x):
        x = super().forward(x)
        torch._dynamo.graph_break()
        return x * 2


def test_random_numbers_are_those_of_the_blocks_themselves(run):
    found = []
    for compile in (False, True):
        torch.manual_seed(3)
        model = made(Dropping)
        torch.manual_seed(4)
        found.append(run(model, compile))
    same(found[1], found[0])


def test_buffers_and_attributes_are_the_blocks_own(run):
    models = [made(Counting) for _ in range(2)]
    expected, found = run(models[0], False), run(models[1], True)
    same(found, expected)
    assert found[2]["plain_calls"] == 0
    for plain, layer in zip(models[0].layers, models[1].layers, strict=True):
        assert layer.calls == plain.calls == STEPS + 1
        torch.testing.assert_close(layer.seen, plain.seen)
        torch.testing.assert_close(layer.normed.running_mean, plain.normed.running_mean)


def test_attributes_that_differ_are_those_of_each_block(run):
    found = run(made(Numbered), True)
    same(found, run(made(Numbered), False))
    assert found[2]["graphs"] == 2 * 3  # one for each number


def test_attributes_may_change(config):
    losses = []
    for compile in (False, True):
        model, said = made(), config(job=f"c{compile}")
        said["engine"].compile = compile
        engine, *_ = overspill.initialize(model, said)
        first = train(engine)[0]
        for layer in model.layers:
            layer.factor = 0.5
        model.layers[1].eval()
        losses.append((first, train(engine)[0]))
        engine.close()
    assert losses[0][0] == pytest.approx(losses[1][0]) and losses[0][1] == pytest.approx(losses[1][1])
    assert losses[0][0] != losses[0][1]


def test_breaks_are_counted(run):
    found = run(made(Broken), True)
    same(found, run(made(Broken), False))
    assert found[2]["graph_breaks"] > 0 and "0 graph breaks" not in found[3]


def test_too_many_graphs_are_told(run):
    told = pytest.warns(UserWarning, match=r"engine\.compile: torch\.compile has made 2 graphs of Numbered")
    with torch._dynamo.config.patch(recompile_limit=2), told:
        found = run(made(Numbered), True)
    same(found, run(made(Numbered), False))
    assert found[2]["plain_calls"] > 0 and "calls run without it" in found[3]


class Cache:
    pass


class Cached(Layer):
    def forward(self, x, mask=None, *, add=None):
        return super().forward(x)


def hooked(model):
    seen = []
    model.layers[1].up.register_forward_hook(lambda *_: seen.append(1))
    return seen


def replaced(model):
    layer = model.layers[1]
    layer.up.forward = lambda x: nn.Linear.forward(layer.up, x) * 1.0


def compiled_inside(model):
    model.layers[1].up.compile(backend="eager")


@pytest.mark.parametrize(
    "change, said",
    [
        (hooked, r"the script has put a hook on a Linear in a block of class Layer"),
        (replaced, r"the script has replaced, or compiled, the call of a Linear in a block of class Layer"),
        (
            compiled_inside,
            r"the script has replaced, or compiled, the call of a Linear in a block of class Layer",
        ),
    ],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_cannot_be_compiled_is_told_once_and_right(change, said, when, config):
    found = []
    for compile in (False, True):
        model, settings = made(), config(job=f"c{compile}")
        settings["engine"].compile = compile
        seen = change(model) if when == "before" else None
        engine, *_ = overspill.initialize(model, settings)
        seen = change(model) if when == "after" else seen
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found.append((*train(engine), len(seen or [])))
        told = [w for w in told if "engine.compile" in str(w.message)]
        assert len(told) == compile
        if compile:
            assert re.search(said, str(told[0].message))
            assert engine.compiled["plain_calls"] == STEPS + 1
        engine.close()
    same(found[1], found[0])
    assert found[0][2] == found[1][2]


def test_an_argument_that_could_be_anything_is_told(run):
    more = {"add": Cache()}
    with pytest.warns(UserWarning, match=r"a block of class Cached gets an argument of class Cache"):
        found = run(made(Cached), True, more=more)
    same(found, run(made(Cached), False, more=more))
    assert found[2]["graphs"] == 0


def test_a_model_without_blocks_is_refused(config):
    said = config()
    said["engine"].compile = True
    with pytest.raises(
        overspill.ConfigError, match=r"engine\.compile: Sequential has no blocks.*Leave engine\.compile out"
    ):
        overspill.initialize(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), said)


def test_a_block_that_torch_compile_cannot_compile_is_an_error_that_says_so(config, monkeypatch):
    def broken(*_):
        raise ValueError("no such backend")

    monkeypatch.setattr(compiled, "_backend_of", lambda region: broken)
    said = config()
    said["engine"].compile = True
    engine, *_ = overspill.initialize(made(), said)
    with pytest.raises(RuntimeError, match=r"engine\.compile: torch\.compile failed at the block layers\.0"):
        engine(batch(0))
    engine.close()


def test_large_blocks_are_held_whole(config):
    """Their layers have units of their own, of which a plan without the key holds three."""

    class Large(Layer):
        def __init__(self, number=0):
            super().__init__(number)
            self.up, self.down = nn.Linear(WIDTH, 1 << 17), nn.Linear(1 << 17, WIDTH)
            self.third, self.fourth = nn.Linear(WIDTH, 1 << 17), nn.Linear(1 << 17, WIDTH)

        def forward(self, x):
            return self.fourth(self.third(super().forward(x)))

    planned, losses = [], []
    for compile in (False, True):
        said = config("nvme", prefetch_units=0, job=f"c{compile}")
        said["engine"].compile, said["budget"]["host"] = compile, "2GiB"
        engine, *_ = overspill.initialize(made(Large, count=2), said)
        losses.append(train(engine, 1)[0])
        planned.append(engine._core.plan.as_dict()["gather_host_bytes"])
        engine.close()
    assert planned[1] > planned[0] + (4 << 20)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_the_model_given_back_and_a_copy_have_no_stand_ins(config):
    said = config("host")
    said["engine"].compile, said["engine"].recompute = True, "blocks"
    model = made()
    engine, *_ = overspill.initialize(model, said)
    train(engine, 1)
    other = copy.deepcopy(model)
    engine.give_back()
    for each in (model, other):
        assert all("forward" not in module.__dict__ for module in each.modules())
        assert torch.isfinite(each(batch(0))).all()


def test_two_ranks(tmp_path):
    for process in launch.run(2, "compiled_job.py", tmp_path):
        for plain, compiled_too in json.loads(process.out).values():
            assert compiled_too["losses"] == pytest.approx(plain["losses"], rel=1e-5)
            said = compiled_too["compiled"]
            # The first block gets what needs no gradient.
            assert said["graphs"] == 2 and said["graph_breaks"] == said["plain_calls"] == 0


def test_micro_batches_that_pass_layers_together(config):
    losses = []
    for compile in (False, True):
        said = config(accumulation=2, job=f"c{compile}") | {"vertical_accumulation": True}
        said["engine"].compile = compile
        model = made()
        engine, *_ = overspill.initialize(model, said)

        def loss_of(x, model=model):
            return F.cross_entropy(model(x).flatten(0, 1), x.flatten())

        losses.append(
            [engine.train_batch([batch(2 * i), batch(2 * i + 1)], loss_of).item() for i in range(3)]
        )
        if compile:
            assert engine.compiled["plain_calls"] == 0 and engine.compiled["calls"] == 3 * 2 * 3
        engine.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_moved_activations_and_recomputation_by_plan(run, config, tmp_path):
    def settings(compile):
        said = config("nvme", job=f"c{compile}", recompute="auto")
        said["engine"].compile, said["budget"]["activations"] = compile, "1MiB"
        return said

    found = []
    for compile in (False, True):
        engine, *_ = overspill.initialize(made(), settings(compile))
        found.append(train(engine))
        engine.close()
    same(found[1], found[0])


def test_generated_code_gives_the_same_losses(config, monkeypatch):
    """By torch.compile's own backend, which the other tests leave out."""
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    found = []
    for compile in (False, True):
        torch.manual_seed(3)
        model = made(Dropping, count=2)
        said = config("nvme", job=f"c{compile}")
        said["engine"].compile = compile
        engine, *_ = overspill.initialize(model, said)
        torch.manual_seed(4)
        found.append(train(engine, 2))
        engine.close()
    same(found[1], found[0])


def test_ctrl_c_in_a_compiled_call_leaves_the_engine_as_it_was(config):
    struck = []

    class Struck(Layer):
        def forward(self, x):
            if struck:
                struck.clear()
                raise KeyboardInterrupt
            return super().forward(x)

    said = config()
    said["engine"].compile = True
    engine, *_ = overspill.initialize(made(Struck), said)
    expected = engine(batch(0))
    struck.append(True)  # torch.compile looks at it while it compiles
    torch._dynamo.reset()
    with pytest.raises(KeyboardInterrupt):
        engine(batch(0))
    struck.clear()
    torch.testing.assert_close(engine(batch(0)), expected)
    train(engine, 1)
    engine.close()
