"""Calls of an engine in several threads: one works at a time, and another one meanwhile is refused by name."""

import copy
import gc
import pickle
import sys
import threading
import time
import weakref

import pytest
import torch
from scene import Meanwhile, Strike, batch, follows, in_thread, loss_of, mlp, refused
from torch import nn

import overspill
from overspill import calls, guard, residency, segments, showing
from plain import Plain


def test_a_second_thread_inside_the_first_ones_call_is_refused_by_name(start):
    model, other, bystander = mlp(), mlp(), mlp()
    plain, plain_other = Plain(copy.deepcopy(model)), Plain(copy.deepcopy(other))
    engine, second = start(model), start(other)
    raised = []

    def meanwhile(*_):
        raised.append(in_thread(lambda: engine(batch())))
        raised.append(in_thread(lambda: other(batch())))
        raised.append(in_thread(lambda: engine.optimizer.step()))
        assert in_thread(lambda: loss_of(bystander, batch()).backward()) is None

    handle = model[1].register_forward_hook(meanwhile)
    engine(batch())
    handle.remove()
    assert len(raised) == 3
    assert all("MainThread" in str(error) and "one thread at a time" in str(error) for error in raised), (
        raised
    )
    assert bystander[0].weight.grad is not None
    follows(engine, plain)
    follows(second, plain_other)


def test_threads_may_take_turns(start):
    model = mlp()
    plain = Plain(copy.deepcopy(model))
    engine = start(model)
    for _ in range(3):
        assert in_thread(lambda: follows(engine, plain, 1)) is None
        follows(engine, plain, 1)


def test_a_thread_that_dies_in_forward_holds_nothing_up(start):
    model = mlp()
    plain = Plain(copy.deepcopy(model))
    engine = start(model)
    handle = model[2].register_forward_pre_hook(Strike(SystemExit))
    assert isinstance(in_thread(lambda: model(batch())), SystemExit)
    handle.remove()
    follows(engine, plain)


def once(monkeypatch, owner, name, action):
    """`action` runs before the next call of that function."""
    original = getattr(owner, name)

    def instead(*arguments, **named):
        monkeypatch.setattr(owner, name, original)
        action()
        return original(*arguments, **named)

    monkeypatch.setattr(owner, name, instead)


def test_a_thread_that_puts_right_what_was_broken_off_keeps_others_out_before_its_own_call(
    start, monkeypatch
):
    model = mlp()
    plain = Plain(copy.deepcopy(model))
    engine = start(model)
    follows(engine, plain)
    raised = []
    once(monkeypatch, residency, "recount", lambda: raised.append(in_thread(lambda: engine(batch()))))
    calls.books.open = True
    engine(batch())
    assert len(raised) == 1 and refused(raised[0]), raised
    follows(engine, plain)


def test_a_thread_that_ends_an_interrupted_call_keeps_others_out_before_its_next(start, monkeypatch):
    model = mlp()
    plain = Plain(copy.deepcopy(model))
    engine = start(model)
    follows(engine, plain)
    handle = model[2].register_forward_pre_hook(Strike())
    with pytest.raises(KeyboardInterrupt):
        model(batch())
    handle.remove()
    assert calls.here.stack.calls, "the interrupt went past torch's hooks"
    raised = []
    once(monkeypatch, guard.Guard, "_begin", lambda: raised.append(in_thread(lambda: engine(batch()))))
    model(batch())
    assert len(raised) == 1 and refused(raised[0]), raised
    follows(engine, plain)


def test_another_thread_may_not_close_an_engine_inside_a_call(start):
    """Its memory is in use, by the core's count as well. A closed engine may be closed again at any time."""
    model, other = mlp(), mlp()
    plain = Plain(copy.deepcopy(model))
    engine, closed = start(model), start(other)
    closed.close()
    raised = []

    def meanwhile(*_):
        raised.append(in_thread(engine.close))
        raised.append(in_thread(closed.close))

    handle = model[1].register_forward_hook(meanwhile)
    loss = loss_of(engine, batch())
    handle.remove()
    assert refused(raised[0]) and raised[1] is None, raised
    loss.backward()
    engine.zero_grad()
    follows(engine, plain)
    assert in_thread(engine.close) is None
    with pytest.raises(RuntimeError, match="closed"):
        engine(batch())


def test_a_gathered_block_that_has_ended_keeps_no_engine(config):
    def use():
        model = mlp()
        engine = overspill.initialize(model, config())[0]
        with engine.gathered(model.parameters()):
            pass
        return weakref.ref(engine)

    reference = use()
    gc.collect()
    assert reference() is None


def test_a_second_gathered_block_keeps_others_out_while_it_fetches(start, monkeypatch):
    model = mlp()
    engine = start(model)
    with engine.gathered(model[0].weight):
        pass
    raised = []
    once(monkeypatch, showing, "show", lambda: raised.append(in_thread(lambda: engine(batch()))))
    with engine.gathered(model[0].weight):
        pass
    assert len(raised) == 1 and refused(raised[0]), raised


@pytest.fixture
def eager_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


READS = [
    ("read_weight", lambda engine, saved, states: engine.weight(engine.module[0].weight)),
    ("read_weight", lambda engine, saved, states: engine.state_dict()),
    ("read_weight", lambda engine, saved, states: engine.module.state_dict()),
    ("read_weight", lambda engine, saved, states: copy.deepcopy(engine.module)),
    ("read_weight", lambda engine, saved, states: pickle.dumps(engine.module[2].weight)),
    ("read_state", lambda engine, saved, states: engine.optimizer_state(engine.module[0].weight)),
    ("read_whole_gradient", lambda engine, saved, states: engine.grad(engine.module[0].weight)),
]


@pytest.mark.parametrize(
    "name, call",
    [
        ("step", lambda engine, saved, states: engine.optimizer.step()),
        ("load", lambda engine, saved, states: engine.load_checkpoint(saved)),
        ("save", lambda engine, saved, states: engine.save_checkpoint(saved / "again")),
        ("clear_gradients", lambda engine, saved, states: engine.zero_grad()),
        ("clear_gradients", lambda engine, saved, states: engine.optimizer.zero_grad()),
        ("clear_gradients", lambda engine, saved, states: engine.module.zero_grad()),
        ("clip_grad_norm", lambda engine, saved, states: engine.clip_grad_norm_(1.0)),
        (
            "clip_grad_norm",
            lambda engine, saved, states: nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0),
        ),
        ("read_state", lambda engine, saved, states: engine.optimizer.state_dict()),
        ("write_state", lambda engine, saved, states: engine.optimizer.load_state_dict(states)),
        ("synchronize", lambda engine, saved, states: engine.synchronize()),
        ("read_whole_gradient", lambda engine, saved, states: engine.grad(engine.module[0].weight)),
        ("has_gradient", lambda engine, saved, states: engine.module[0].weight.grad),
        ("read_gradient", lambda engine, saved, states: engine.module[0].weight.grad),
        ("replace_gradient", lambda engine, saved, states: setattr(engine.module[0].weight, "grad", None)),
        ("zero_gradients", lambda engine, saved, states: engine.zero_grad(set_to_none=False)),
        *READS,
    ],
)
def test_another_threads_forward_is_refused_until_the_call_of_the_core_is_over(start, tmp_path, name, call):
    model = mlp()
    engine = start(model)
    loss_of(engine, batch()).backward()
    engine.step()
    engine.save_checkpoint(tmp_path / "saved")
    states = engine.optimizer.state_dict()
    loss_of(engine, batch()).backward()
    core, raised = engine._residency.core, []
    instead = Meanwhile(core, name, lambda: raised.append(in_thread(lambda: engine(batch()))))
    users = (engine._residency, engine._residency.gradients, *engine._residency.units)
    for each in users:
        each.core = instead
    call(engine, tmp_path / "saved", states)
    for each in users:
        each.core = core
    assert raised and all(map(refused, raised)), raised
    assert calls.here.stack.claimed is None and not calls.books.owner, "a frame would keep the engine"
    assert in_thread(lambda: engine(batch())) is None


@pytest.mark.parametrize(("name", "call"), READS)
def test_another_threads_read_is_refused_inside_a_call_and_the_threads_own_is_not(start, name, call):
    model = mlp()
    engine = start(model, placement="nvme")
    loss_of(engine, batch()).backward()
    engine.step()
    loss_of(engine, batch()).backward()
    raised = []

    def meanwhile(*_):
        raised.append(in_thread(lambda: call(engine, None, None)))
        raised.append(engine.stats() and in_thread(engine.stats))
        call(engine, None, None)

    handle = model[1].register_forward_hook(meanwhile)
    engine(batch())
    handle.remove()
    assert refused(raised[0]) and raised[1:] == [None], raised
    with engine.gathered(model.parameters()):
        call(engine, None, None)
    assert in_thread(lambda: call(engine, None, None)) is None
    assert calls.here.stack.claimed is None and not calls.books.owner, "a frame would keep the engine"


def test_a_state_dict_of_the_engine_is_of_one_moment(start):
    model = mlp()
    engine = start(model, placement="nvme")
    loss_of(engine, batch()).backward()
    before, raised = engine.state_dict(), []
    handle = model[0].register_state_dict_post_hook(lambda *_: raised.append(in_thread(engine.step)))
    found = engine.state_dict()
    handle.remove()
    assert len(raised) == 1 and refused(raised[0]), raised
    assert all(torch.equal(value, before[name]) for name, value in found.items())


def test_threads_that_read_while_one_edits_get_right_weights_or_an_error(start, eager_switches):
    """All of them go through one buffer of the core."""
    model = mlp()
    engine = start(model, placement="nvme")
    expected = {name: value.clone() for name, value in engine.state_dict().items()}
    wrong, reads, over = [], [], threading.Event()

    def read():
        while not over.is_set():
            try:
                found = engine.state_dict()
                reads.append(torch.equal(found["2.weight"], expected["2.weight"]))
            except RuntimeError as error:
                if "one thread at a time" not in str(error):
                    wrong.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    edits, first = 0, time.monotonic()
    while time.monotonic() < first + (3 if edits and reads else 60):  # one of each comes when it comes
        block = engine.gathered(model[0].bias)
        try:
            block.__enter__()
        except RuntimeError as error:
            assert "one thread at a time" in str(error)
            continue
        model[0].bias.data[3] += 1.0
        edits += 1
        block.__exit__()  # it has begun: it is never refused
    over.set()
    for thread in threads:
        thread.join(60)
    assert not wrong, wrong[:3]
    assert edits and reads and all(reads)
    found = engine.state_dict()
    for _ in range(edits):  # each is rounded
        expected["0.bias"][3] += 1.0
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_a_block_that_ends_while_another_thread_works_is_released_by_what_works_next(start):
    """What it wrote is kept, and what autograd saved before is out of date, as if its thread had released it."""
    model = mlp()
    plain = Plain(copy.deepcopy(model))
    engine, weight = start(model), model[2].weight
    unit = segments.registry[id(weight)].unit
    loss = loss_of(model, batch())
    with torch.no_grad():
        plain.model[2].weight.mul_(2)
    block, raised = engine.gathered([weight]), []
    block.__enter__()
    weight.data.mul_(2)
    core = engine._core
    engine._residency.core = Meanwhile(core, "read_weight", lambda: raised.append(in_thread(block.__exit__)))
    engine.weight(model[0].weight)
    engine._residency.core = core
    assert raised == [None] and unit.pins == 1, raised
    with pytest.raises(RuntimeError, match=r"2\.weight was saved for backward and has been updated"):
        loss.backward()
    engine.zero_grad()
    assert not unit.pins and not calls.books.blocks
    follows(engine, plain)


def test_the_frames_of_a_thread_are_found_while_it_starts_others(eager_switches):
    """A thread that has not begun bears the number of the one that starts it."""
    mine, frame, over, wrong = calls.here.stack, sys._getframe(), threading.Event(), []

    def look():
        for _ in range(3000):
            found = mine.frames([None, frame])
            wrong.extend([found] if found != [frame] else [])
        over.set()

    threading.Thread(target=look, daemon=True).start()
    while not over.is_set():
        threading.Thread(target=lambda: None).start()
    assert not wrong


def test_close_is_refused_while_another_thread_reads(start):
    model = mlp()
    engine = start(model, placement="nvme")
    core, raised = engine._core, []

    def close():
        with pytest.raises(RuntimeError, match="one thread at a time"):
            engine.close()
        raised.append("refused")

    engine._residency.core = Meanwhile(core, "read_weight", lambda: in_thread(close))
    engine.weight(model[0].weight)
    engine._residency.core = core
    assert raised == ["refused"]
    engine.weight(model[0].weight)


@pytest.mark.parametrize("vertical", [False, True])
def test_another_thread_is_refused_between_the_micro_batches_of_one_step(config, vertical):
    model = mlp()
    settings = config(accumulation=2) | {"vertical_accumulation": vertical}
    engine, raised = overspill.initialize(model, settings)[0], []

    def plain(x):
        return loss_of(model, x)

    def loss(x):
        raised.append(in_thread(lambda: engine(batch())))
        found = plain(x)
        raised.append(in_thread(lambda: engine.train_batch([batch()] * 2, plain)))
        return found

    engine.train_batch([batch(0), batch(1)], loss)
    assert len(raised) == 4 and all(map(refused, raised)), raised
    assert engine.micro_steps == 2
    assert calls.here.stack.alone is None and not calls.books.owner, "a frame would keep the engine"
    assert in_thread(lambda: engine.train_batch([batch()] * 2, plain)) is None
    engine.close()


def test_many_threads_at_once_are_right_or_refused(start, eager_switches):
    model = mlp()
    plain = Plain(copy.deepcopy(model))
    engine = start(model, placement="nvme")
    expected = plain.model(batch()).detach()
    outcomes, begin = [], threading.Barrier(4)

    def work():
        torch.set_num_threads(1)  # torch keeps it for each thread
        begin.wait()
        for _ in range(50):
            try:
                with torch.no_grad():
                    outcomes.append(torch.equal(model(batch()), expected))
            except RuntimeError as error:
                outcomes.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(outcomes) == 4 * 50
    wrong = [o for o in outcomes if o is not True and "one thread at a time" not in str(o)]
    assert not wrong, wrong[:3]
    assert True in outcomes
    follows(engine, plain)
