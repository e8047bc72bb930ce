"""Vertical accumulation: the same bits as one micro-batch after another, with weights moved once a step."""

import contextlib
import gc
import itertools
import random
import signal
import threading
import time

import pytest
import torch
from interrupts import Interrupter
from torch import nn
from zoo import ZOO, build

import overspill
from overspill import calls, leases, patches, vertical

MICRO_BATCHES = 3
STEPS = 3


def bits(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def make(name, config, together, dtype=torch.bfloat16, placement="nvme", **options):
    model, batch = build(name, dtype)
    settings = config(placement, clipping=0.5, accumulation=MICRO_BATCHES, **options)
    engine, *_ = overspill.initialize(model, settings | {"vertical_accumulation": together})
    return engine, batch


def steps(engine, batch, count=STEPS):
    """Losses of whole steps; every micro-batch draws the same random numbers in each way."""

    def loss(number):
        torch.manual_seed(number)
        random.seed(number)
        return engine(*batch(number))

    return [
        engine.train_batch(range(step * MICRO_BATCHES, (step + 1) * MICRO_BATCHES), loss)
        for step in range(count)
    ]


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("name", ZOO)
def test_bit_equal_to_one_after_another(name, placement, config):
    found = []
    for together in (False, True):
        engine, batch = make(name, config, together, placement=placement)
        losses = steps(engine, batch)
        found.append((torch.stack(losses), engine.last_step.norm, engine.state_dict()))
        assert not patches.guard.frames
        assert not [u.name for u in engine._residency.units if u.flat is not None or u.pins or u.shown]
        engine.close()
    (losses, norm, weights), (ours, our_norm, our_weights) = found
    assert torch.equal(bits(losses), bits(ours)) and norm == our_norm
    for key, value in weights.items():
        assert torch.equal(bits(value), bits(our_weights[key])), key


class Ways(nn.Module):
    """Each micro-batch passes the layers in an order of its own, given with its vectors."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))

    def forward(self, x, way):
        for number in way:
            x = torch.tanh(self.layers[number](x))
        return x.square().mean()


@pytest.mark.parametrize(
    ("ways", "together"),
    [
        (["01234"] * 3, "0 1 2 3 4"),
        (["0234", "01234", "0124"], "0 1 2 3 4"),  # layers left out
        (["034", "01234", "014"], "0 1 2 3 4"),
        (["01230"] * 3, "0 1 2 3 0"),  # tied, as an embedding and a head are
        (["0120", "01230", "01230"], "0 1 2 3 0"),
        (["031240"] * 3, "0 3 1 2 4 0"),  # not in the model's order
        (["0124", "0134", "0123"], "0 1 2 3 4"),  # experts
    ],
)
def test_micro_batches_pass_each_layer_together(ways, together, config, monkeypatch):
    engine = wrap(Ways(), config)
    layer = {unit.index: unit.name.split(".")[1][0] for unit in engine._residency.units}
    passed, come_to = [], vertical._Turns.come_to

    def noted(turns, runner, unit):
        come_to(turns, runner, unit)
        passed.append((layer[unit.index], runner.number))

    monkeypatch.setattr(vertical._Turns, "come_to", noted)
    engine.train_batch([(torch.rand(4, 16), [int(n) for n in way]) for way in ways])
    last = [together.split()[: i + 1].count(n) for i, n in enumerate(together.split())]  # the how-many-th use
    order = [
        (number, micro_batch)
        for number, use in zip(together.split(), last)
        for micro_batch, way in enumerate(ways)
        if way.count(number) >= use
    ]
    assert passed[: len(order)] == order
    # Backward needs the weights in the opposite order, but for the first layer's, whose input has no gradient.
    visits = [
        (k, list(group)) for k, group in itertools.groupby(passed[len(order) :], key=lambda visit: visit[0])
    ]
    assert [number for number, _ in visits] == together.split()[:0:-1]
    assert all(group == sorted(group) for _, group in visits)
    assert_nothing_left(engine)


class Edits(nn.Module):
    """Changes a weight in each forward that backward needs: a later micro-batch spoils it for an earlier one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        with torch.no_grad():
            self.second.weight.mul_(0.9)
        return self.second(torch.tanh(self.first(x))).square().mean()


class Fails(nn.Module):
    """The micro-batch whose vectors are not finite raises half-way."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if number == 2 and not x.isfinite().all():
                raise ValueError("a bad batch")
            x = torch.tanh(layer(x))
        return x.square().mean()


def test_a_weight_edited_in_forward_is_refused_as_torch_refuses_it(config):
    engine = wrap(Edits(), config)
    with pytest.raises(RuntimeError, match=r"second.weight.*(modified|updated since)"):
        engine.train_batch([torch.randn(4, 16) for _ in range(MICRO_BATCHES)])
    assert_nothing_left(engine)


@pytest.mark.parametrize("bad", range(MICRO_BATCHES))
def test_an_exception_ends_all_micro_batches_and_leaves_no_gradient(bad, config):
    engine = wrap(Fails(), config)
    batches = [torch.randn(4, 16) for _ in range(MICRO_BATCHES)]
    before = engine.state_dict()
    broken = list(batches)
    broken[bad] = batches[bad] / 0
    threads = threading.active_count()
    with pytest.raises(ValueError, match="a bad batch"):
        engine.train_batch(broken)
    assert threading.active_count() == threads
    assert engine.micro_steps == engine.global_steps == 0
    for name, value in engine.state_dict().items():
        assert torch.equal(bits(value), bits(before[name]))
    engine.train_batch(batches)  # goes on as if nothing had happened
    fresh = wrap(Fails(), config)
    fresh.load_state_dict(before)
    fresh.train_batch(batches)
    assert engine.last_step.norm == fresh.last_step.norm
    assert_nothing_left(engine)
    assert_nothing_left(fresh)


def test_interrupted(config):
    engine = wrap(Fails(), config)
    main = threading.main_thread().ident

    def loss(x):
        found = engine(x)
        signal.pthread_kill(main, signal.SIGINT)
        return found

    with pytest.raises(KeyboardInterrupt):
        engine.train_batch([torch.randn(4, 16) for _ in range(MICRO_BATCHES)], loss)
    assert_nothing_left(engine)


class Slow(torch.autograd.Function):
    """Its backward calls what it is given."""

    @staticmethod
    def forward(ctx, x, meanwhile):
        ctx.meanwhile = meanwhile
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.meanwhile()
        return gradient, None


@pytest.mark.parametrize("by", ["a signal", "a second one"])
def test_an_interrupt_waits_for_the_backward_that_it_meets(config, monkeypatch, by):
    """Else its gradient would come after the others were cleared, and count in the next step."""
    model = nn.Linear(16, 16)
    engine = wrap(model, config)
    begun, cleared, main = threading.Event(), threading.Event(), threading.main_thread().ident
    strikes, too_early = [], []

    def strike(wait):
        def struck(*arguments):
            if threading.get_ident() != main or len(strikes) == 2:
                return wait(*arguments)
            assert begun.wait(60)
            strikes.append(wait)
            raise KeyboardInterrupt

        return struck

    def meanwhile():
        begun.set()
        if by == "a signal":
            signal.pthread_kill(main, signal.SIGINT)
        too_early.append(cleared.wait(0.5))  # comes only where nobody waits for this

    def clear(owner):
        spoiled = owner.spoiled
        clear_spoiled(owner)
        if spoiled and not owner.spoiled:
            cleared.set()

    clear_spoiled = calls.clear_spoiled
    monkeypatch.setattr(calls, "clear_spoiled", clear)
    if by == "a second one":
        monkeypatch.setattr(threading.Thread, "join", strike(threading.Thread.join))
        monkeypatch.setattr(time, "sleep", strike(time.sleep))
    with pytest.raises(KeyboardInterrupt):
        engine.train_batch(
            [torch.randn(4, 16)] * MICRO_BATCHES,
            lambda x: Slow.apply(model(x), meanwhile).square().mean(),
        )
    monkeypatch.undo()
    assert too_early == [False]
    assert len(strikes) == (2 if by == "a second one" else 0)
    assert engine.grad(model.weight) is None
    assert_nothing_left(engine)


@contextlib.contextmanager
def hang_limit(seconds):
    """A main thread that waits longer gets TimeoutError."""

    def expired(*_):
        raise TimeoutError(f"it took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a generator that ends
def test_a_second_interrupt_anywhere_in_stopping_the_micro_batches_keeps_no_lock(config, monkeypatch):
    """Ctrl-C may strike between the taking of a condition's lock and the body of its `with`."""
    model = nn.Linear(16, 16)
    engine = wrap(model, config)
    main, join, stop = threading.main_thread(), threading.Thread.join, vertical._stop
    turns = []

    def first_strike(thread, *arguments):
        if threading.current_thread() is main and thread.name.startswith("micro-batch"):
            raise KeyboardInterrupt("the first")
        join(thread, *arguments)

    def places(at=None):
        """In files of which `_stop` enters functions; the second interrupt strikes at the place `at`."""
        found = Interrupter(at, (vertical.__file__, threading.__file__))

        def stopping(*arguments):
            turns.append(arguments[0])
            if found.count:  # it is called again, after the strike
                return stop(*arguments)
            with found.armed():
                return stop(*arguments)

        monkeypatch.setattr(vertical, "_stop", stopping)
        with pytest.raises(KeyboardInterrupt, match="the first"), hang_limit(20):
            engine.train_batch([torch.ones(4, 16)] * MICRO_BATCHES, lambda x: model(x).square().mean())
        return found

    monkeypatch.setattr(threading.Thread, "join", first_strike)
    try:
        count = places().count
        assert count > 10
        struck = [places(at).place for at in range(count)]
    finally:  # else the micro-batches would wait when Python ends
        for each in turns:
            with contextlib.suppress(RuntimeError):
                while True:
                    each.changed.release()
    monkeypatch.undo()
    assert any(place and place.endswith("__enter__") for place in struck), struck
    assert_nothing_left(engine)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a generator that ends
def test_a_third_interrupt_anywhere_after_the_second_waits_for_the_micro_batches_too(config, monkeypatch):
    """Also where the loop that stops them jumps back."""
    model = nn.Linear(16, 16)
    engine = wrap(model, config)
    main, join, stop = threading.main_thread(), threading.Thread.join, vertical._stop

    def places(at):
        third, turns, from_here = Interrupter(at, (vertical.__file__,)), [], []
        begun = threading.Event()

        def first_strike(thread, *arguments):
            if threading.current_thread() is main and thread.name.startswith("micro-batch"):
                assert begun.wait(60)
                raise KeyboardInterrupt("the first")
            join(thread, *arguments)

        def second_strike(*arguments):
            turns.append(arguments[0])
            if len(turns) == 1:
                from_here.append(third.count)
                raise KeyboardInterrupt("the second")
            stop(*arguments)

        def loss(x):
            begun.set()
            time.sleep(0.05)
            return model(x).square().mean()

        monkeypatch.setattr(threading.Thread, "join", first_strike)
        monkeypatch.setattr(vertical, "_stop", second_strike)
        monkeypatch.setattr(vertical, "_LOOK_SECONDS", 0.02)  # fewer places
        with pytest.raises(KeyboardInterrupt), hang_limit(20), third.armed():
            engine.train_batch([torch.ones(4, 16)] * MICRO_BATCHES, loss)
        left = [runner.number for runner in turns[0].runners if runner.at_work]
        monkeypatch.undo()
        stop(turns[0], KeyboardInterrupt())
        assert not left, f"struck {third.place}: micro-batches {left} were at work"
        return from_here[0], third

    first, _ = places(None)
    struck = []
    for at in itertools.count(first):
        place = places(at)[1].place
        if place is None or not place.endswith((" run", "_stop", "take_back", "fail", "<genexpr>")):
            break  # they are stopped
        struck.append(place)
    assert any(place.endswith(" run") for place in struck), struck
    engine.train_batch([torch.ones(4, 16)] * MICRO_BATCHES, lambda x: model(x).square().mean())
    assert_nothing_left(engine)


def test_micro_batches_that_are_missing_or_too_late(config):
    engine = wrap(Fails(), config)
    with pytest.raises(
        ValueError, match=f"gradient_accumulation_steps = {MICRO_BATCHES} micro-batches, there are 1"
    ):
        engine.train_batch([torch.randn(4, 16)])
    engine.backward(engine(torch.randn(4, 16)))
    engine.step()
    with pytest.raises(RuntimeError, match="middle of a step: 1 of 3"):
        engine.train_batch([torch.randn(4, 16)] * MICRO_BATCHES)
    engine.close()


def test_a_model_without_a_loss(config):
    engine = wrap(nn.Linear(16, 16), config)
    with pytest.raises(TypeError, match="no loss of one element"):
        engine.train_batch([torch.randn(4, 16)] * MICRO_BATCHES)
    assert_nothing_left(engine)


def test_each_micro_batch_draws_from_its_own_state_and_torch_goes_on_from_where_it_was(config):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16), nn.Dropout(0.5))
    engine = wrap(model, config)
    drawn = []

    def loss(x):
        out = engine(x)
        drawn.append((out == 0).sum().item())
        return out.square().mean()

    torch.manual_seed(5)
    random.seed(5)
    losses = [engine.train_batch([torch.ones(4, 16)] * MICRO_BATCHES, loss) for _ in range(2)]
    following = torch.rand(()), random.random()
    torch.manual_seed(5)
    random.seed(5)
    torch.randint(2**62, (MICRO_BATCHES,))
    torch.randint(2**62, (MICRO_BATCHES,))
    assert following == (torch.rand(()), random.random())
    assert len(set(drawn)) > 1 and losses[0] != losses[1]
    engine.close()


class Deep(nn.Module):
    """Many layers of one size, so that the arena, which holds the three largest units, has few of them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(24))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def test_weights_are_read_once_a_pass_and_not_once_a_micro_batch(config):
    read = {}
    for together in (False, True):
        torch.manual_seed(0)
        engine = wrap(Deep(), config, together, prefetch_units=0)
        batches = [torch.randn(4, 64) for _ in range(MICRO_BATCHES)]
        for _ in range(STEPS):
            before = engine.stats()["nvme_read_bytes"]
            engine.train_batch(batches)
            engine.synchronize()
            read[together] = engine.stats()["nvme_read_bytes"] - before
        weights = sum(s.bytes for s in engine._residency.segments)
        assert_nothing_left(engine)
    print(f"read in a step: {read[False]} bytes one after another, {read[True]} together; weights {weights}")
    # Each further micro-batch reads the weights again, twice, but for the few that the arena keeps at the turns.
    assert read[False] - read[True] > 1.5 * (MICRO_BATCHES - 1) * weights


def wrap(model, config, together=True, **options):
    settings = config("nvme", accumulation=MICRO_BATCHES, **options)
    engine, *_ = overspill.initialize(model, settings | {"vertical_accumulation": together})
    return engine


def assert_nothing_left(engine):
    segments = engine._residency.segments
    assert not [s.name for s in segments if engine._core.has_gradient(s.unit.index, s.index)]
    assert not patches.guard.frames
    gc.collect()
    assert not [u.name for u in engine._residency.units if u.flat is not None or u.pins or u.shown]
    assert leases.lingering() == 0
    engine.close()
