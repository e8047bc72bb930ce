"""Blocks that backward computes again (`engine.recompute`): gradients, buffers and random numbers are plain torch's to
the bit, or there is an error with a name."""

import gc
import random

import numpy
import pytest
import torch
from recompute_scene import (
    ARENA,
    COMPUTES_AGAIN,
    HAVE_BLOCKS,
    Part,
    Repeats,
    blocks,
    built,
    calls_again,
    plainly,
)
from test_zoo import assert_same, bits, compare, step_beside
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import ZOO, build

import overspill
from overspill import units
from overspill.activations import moving, recompute
from plain import Plain

pytest_plugins = "recompute_scene"


@pytest.mark.parametrize("name", sorted(set(ZOO) - set(HAVE_BLOCKS)))
def test_a_model_that_repeats_nothing_is_refused(name, again):
    with pytest.raises(overspill.ConfigError, match="has no blocks"):
        again(build(name)[0])


@pytest.mark.parametrize("arena", [None, ARENA], ids=["kept", "moved"])
@pytest.mark.parametrize("name", HAVE_BLOCKS)
def test_bit_equal_to_plain(name, arena, again, monkeypatch):
    monkeypatch.setattr(moving, "FROM", 1)
    model, batch = built(name)
    plain = Plain(built(name)[0])
    engine = again(model, arena=arena, clipping=0.5)
    for i in range(3):
        step_beside(engine, plain, i, batch(i))
    compare(engine, plain)
    assert (calls_again(engine) > 0) == (name in COMPUTES_AGAIN), (
        "else the script checkpoints, or a block changes buffers"
    )


@pytest.mark.parametrize(
    "options", [{"speculate": True, "clipping": 4.0}, {"accumulation": 2}], ids=["guesses", "sums"]
)
def test_updates_beside_it(options, again):
    """Weights that updates change between passes are no edits."""
    model, batch = built("llama")
    plain = Plain(built("llama")[0])
    options = {"clipping": 0.5} | options
    engine = again(model, placement="nvme", **options)
    if "accumulation" in options:
        for i in range(6):
            engine.backward(engine(*batch(i)))
            engine.step()
    else:
        for i in range(4):
            step_beside(engine, plain, i, batch(i))
        compare(engine, plain)
    assert calls_again(engine) == (17 if "accumulation" in options else 11)


def gradients_of(work, again=None, passes=1, arena=None, expect_again=True, **options):
    model = Repeats(work)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = None if again is None else again(model, arena=arena, optimizer=optimizer)
    torch.manual_seed(4), random.seed(4), numpy.random.seed(4)
    x = torch.randn(64, 32)
    for _ in range(2):
        loss = (engine or model)(x, **options)
        for left in reversed(range(passes)):
            loss.backward(retain_graph=left > 0)
    drawn = torch.rand(1).item(), random.random(), numpy.random.rand()
    if engine is not None:
        assert (calls_again(engine) > 0) == expect_again
    return [p.grad for p in model.parameters()], [b.clone() for b in model.buffers()], drawn


def reassigns_a_buffer(part, x):
    part.seen = part.seen + x.detach().mean(0)
    return x * (1 + part.seen)


def adds_by_data(part, x):
    with torch.no_grad():
        part.second.weight.data.mul_(0.9)
    return x.tanh()


def clamps_a_weight(part, x):
    with torch.no_grad():
        part.second.weight.clamp_(-0.1, 0.1)
    return x.tanh()


def differentiates(part, x):
    """A backward inside of forward."""
    y = x.detach().requires_grad_()
    return x + torch.autograd.grad(part.first(y).square().sum(), y, create_graph=True)[0]


def check(work, again, passes=1, arena=None, expect_again=True, **options):
    wanted, kept, drawn = gradients_of(work, None, passes, **options)
    found, now, then = gradients_of(work, again, passes, arena, expect_again, **options)
    assert drawn == then, "random numbers went another way"
    for one, other in [*zip(wanted, found, strict=True), *zip(kept, now, strict=True)]:
        assert torch.equal(bits(one), bits(other))


def draws_from_all(part, x):
    x = torch.nn.functional.dropout(x, 0.3) * random.random()
    return x * float(numpy.random.rand())


def counts_in_a_buffer(part, x):
    part.seen += x.detach().mean(0)
    return x * (1 + part.seen)


def writes_by_data(part, x):
    part.seen.data.add_(1)
    return x * part.seen


def in_place(part, x):
    return (x + 1).mul_(2).exp()


def fills_what_it_saves(part, x):
    return nn.functional.rrelu(x, training=True)


@pytest.mark.parametrize("passes", [1, 3], ids=["once", "three_times"])
@pytest.mark.parametrize(
    "work",
    [plainly, draws_from_all, in_place, fills_what_it_saves, differentiates],
    ids=lambda work: work.__name__,
)
def test_same_gradients_and_random_numbers(work, passes, again):
    check(work, again, passes)


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (counts_in_a_buffer, "its buffer seen"),
        (reassigns_a_buffer, "its buffer seen"),
        (writes_by_data, "its buffer seen"),
        (adds_by_data, "its weights"),
        (clamps_a_weight, "its weights"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_blocks_that_change_what_they_have_are_left_alone_and_told_once(work, said, again):
    with pytest.warns(UserWarning, match=rf"a call of the block parts\.0 changes {said}, so") as told:
        check(work, again, expect_again=False)
    assert len([each for each in told if "overspill" in str(each.message)]) == 1


def test_what_is_left_moves(again):
    check(plainly, again, arena=1 << 20)


def test_a_function_that_fills_what_it_saves_may_be_a_blocks_last(again):
    def make():
        torch.manual_seed(3)
        return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.RReLU()) for _ in range(3)))

    plain, model = make(), make()
    engine = again(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    for net in plain, engine:
        torch.manual_seed(4)
        net(torch.randn(512, 32)).square().mean().backward()
    assert calls_again(engine) == 2
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(bits(one.grad), bits(other.grad))


def test_what_a_block_changes_after_it_was_saved_is_refused_as_torch_does(again):
    def work(part, x):
        y = x.sigmoid()
        y.mul_(2)
        return y.exp()

    engine = again(Repeats(work))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine(torch.randn(4, 32)).backward()


def test_a_graph_that_is_kept_does_not_keep_the_engine(config):
    class Keeps(Part):
        def forward(self, x):
            self.last = super().forward(x)
            return self.last

    model = Repeats(plainly)
    model.parts = nn.ModuleList(Keeps(plainly) for _ in range(2))
    engine = overspill.initialize(model, config("half", recompute="blocks"))[0]
    engine(torch.randn(4, 32))
    owner = engine._residency
    del engine, model
    gc.collect()
    assert owner.closed


def test_a_buffer_of_another_kind(again):
    class Graph(Part):
        def __init__(self):
            super().__init__(plainly)
            self.register_buffer("edges", torch.eye(16).to_sparse())
            self.register_buffer("mask", torch.ones(1, 32).expand(16, 32))

        def forward(self, x):
            return self.second((self.edges @ self.first(x)).tanh() * self.mask)

    model = Repeats(plainly)
    model.parts = nn.ModuleList(Graph() for _ in range(3))
    engine = again(model)
    engine(torch.randn(16, 32)).backward()
    assert calls_again(engine) == 2


def test_generators_that_nobody_draws_from_are_left_alone(again):
    """Threads of a loader may draw from them meanwhile."""
    drawn = []

    def work(part, x):
        if torch._C._current_graph_task_id() != -1:
            drawn.append((random.random(), float(numpy.random.rand())))
        return x.tanh()

    engine = again(Repeats(work))
    loss = engine(torch.randn(4, 32))
    random.seed(9), numpy.random.seed(9)
    loss.backward()
    assert len(set(drawn)) == 2, "each goes on from the one before"


class Cache:
    def __init__(self):
        self.keys = []


def extends(part, x, cache):
    cache.keys.append(x.detach())
    return x * sum(key.mean() for key in cache.keys)


def test_a_cache_is_left_alone_and_told_once(again):
    wanted, *_ = gradients_of(lambda part, x, cache: extends(part, x, Cache()), cache=None)
    with pytest.warns(UserWarning, match=r"the block parts\.0 gets an argument of class Cache") as told:
        found, *_ = gradients_of(
            lambda part, x, cache: extends(part, x, Cache()), again, expect_again=False, cache=Cache()
        )
    assert len([each for each in told if "overspill" in str(each.message)]) == 1
    for one, other in zip(wanted, found, strict=True):
        assert torch.equal(bits(one), bits(other))


def test_a_list_that_grows_is_as_it_was(again):
    def work(part, x, seen):
        seen.append(x.detach().mean())
        return x * torch.stack(seen).sum()

    model, plain = Repeats(work), Repeats(work)
    engine = again(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    x = torch.ones(4, 32)
    for net in plain, engine:
        seen = []
        net(x, seen=seen).backward()
        assert len(seen) == 3, "the script's list has one entry of each call"
    assert calls_again(engine) == 2
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(bits(one.grad), bits(other.grad))


def test_less_is_saved(again):
    """What is alive between forward and backward."""

    def work(part, x):
        for _ in range(20):
            x = x.tanh()
        return x

    def saved_by(engine):
        before = moved = engine.stats()["activations_kept_bytes"]
        loss = engine(torch.randn(4096, 32))
        moved = engine.stats()["activations_kept_bytes"] - before
        loss.backward()
        return moved

    settings = {"arena": 64 << 20}
    engine = again(Repeats(work), **settings)
    saved_by(engine)
    with_it = saved_by(engine)
    for block in blocks(engine):
        block.changes = {recompute._modes(block.module()): True}  # as if it could not be
    assert saved_by(engine) > 10 * with_it


def test_the_scripts_own_checkpoints_are_respected(again):
    class Own(Repeats):
        def forward(self, x):
            for part in self.parts:
                x = checkpoint(part, x, use_reentrant=False)
            return x.square().mean()

    engine = again(Own(plainly))
    engine(torch.randn(4, 32)).backward()
    assert calls_again(engine) == 0


def test_llama_as_transformers_makes_it(again):
    model, batch = build("llama", torch.float32)
    engine = again(model)
    with pytest.warns(UserWarning, match="use_cache = False"):
        engine(*batch(0)).backward()
    assert calls_again(engine) == 0
    model.model.config.use_cache = False
    engine(*batch(0)).backward()
    assert calls_again(engine) == 2, "all but the first"


def test_hooks_of_the_script_run_once(again):
    model, seen = Repeats(plainly), []
    engine = again(model)
    model.parts[1].register_forward_hook(lambda *_: seen.append(1))
    engine(torch.randn(4, 32)).backward()
    assert len(seen) == 1 and calls_again(engine) == 2


def test_an_error_inside_leaves_the_engine_usable(again):
    broken = []

    def work(part, x):
        if broken and torch._C._current_graph_task_id() != -1:
            raise ZeroDivisionError("in backward")
        return x.tanh()

    model, plain = Repeats(work), Repeats(plainly)
    engine = again(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    x = torch.randn(4, 32)
    broken.append(True)
    with pytest.raises(ZeroDivisionError):
        engine(x).backward()
    broken.clear()
    model.zero_grad()
    for net in plain, engine:
        net(x).backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(bits(one.grad), bits(other.grad))


def test_a_model_without_blocks_is_refused(again):
    with pytest.raises(overspill.ConfigError, match="Sequential has no blocks"):
        again(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))


def test_blocks_are_the_outermost_repetition():
    stage = [nn.ModuleList(Part(plainly, width) for _ in range(2)) for width in (8, 16)]
    stages = nn.ModuleList(nn.ModuleDict({"parts": parts}) for parts in stage)
    assert list(recompute.blocks_of(stages).values()) == ["0.parts.0", "0.parts.1", "1.parts.0", "1.parts.1"]
    model, _ = build("t5", torch.float32)
    assert "model.encoder.block.0" in recompute.blocks_of(model).values(), "with a bias that the others lack"
    model, _ = build("llama", torch.float32)
    assert list(recompute.blocks_of(model).values()) == [f"model.model.layers.{i}" for i in range(3)]


def test_autocast_is_that_of_forward(again):
    model, plain = Repeats(plainly), Repeats(plainly)
    engine = again(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    x = torch.randn(4, 32)
    for net in plain, engine:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(x)
        loss.backward()
    assert calls_again(engine) == 2
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(bits(one.grad), bits(other.grad))


@pytest.mark.parametrize("counts", [False, True], ids=["plainly", "counting"])
def test_micro_batches_that_pass_units_together(counts, config, monkeypatch):
    monkeypatch.setattr(units, "BLOCK_ELEMENTS", 1)  # so that they take turns inside a block
    monkeypatch.setattr(units, "MODULE_ELEMENTS", 1)

    def work(part, x):
        if counts:
            part.seen += x.detach().mean(0)
        return nn.functional.dropout(x.tanh(), 0.3) * (1 + part.seen)

    def run(recompute):
        torch.manual_seed(3)
        model = Repeats(work)
        settings = config("nvme", accumulation=3, recompute=recompute) | {"vertical_accumulation": True}
        engine, *_ = overspill.initialize(model, settings)
        torch.manual_seed(4)
        losses = [engine.train_batch(iter(torch.randn(3, 8, 32)), lambda x: engine(x)) for _ in range(2)]
        found = torch.stack(losses), engine.state_dict(), calls_again(engine)
        engine.close()
        return found

    (losses, weights, _), (ours, our_weights, again) = run("none"), run("blocks")
    assert (again > 0) != counts
    assert torch.equal(bits(losses), bits(ours))
    for name, weight in weights.items():
        assert_same(name, our_weights[name], weight)


def test_without_gradients_nothing_is_noted(again):
    engine = again(Repeats(plainly))
    with torch.no_grad():
        engine(torch.randn(4, 32))
    assert all(not block.changes for block in blocks(engine))
