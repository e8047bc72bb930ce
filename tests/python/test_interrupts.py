"""Ctrl-C at any moment leaves an engine that is right: the loop goes on and ends with the bits of one that nothing
interrupted."""

import contextlib
import functools
import gc
import os
import random

import pytest
import torch
import torch.nn.functional as F
from interrupts import OVERSPILL, TENSORS, Interrupter
from scene import is_released
from torch import nn
from torch.utils.checkpoint import checkpoint

import overspill
from overspill import calls, leases, residency, segments

DRAWS = 50
LONG_DRAWS = 1000
STEPS = 3


OF_RESIDENCY = "residency", "segments", "leases", "lending", "showing"  # what ends with an engine


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """Calls, checkpointing, a weight used outside its module, a weight edited in forward."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 16, bias=False)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x):
        with torch.no_grad():
            self.scale.clamp_(0.9, 1.005)
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if i == 1 else block(x)
        return F.linear(self.head(x) * self.scale, self.head.weight.t()).square().mean()


def batch(i):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(i))


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], v) for k, v in theirs.items())


def clean():
    gc.collect()
    assert torch._C._len_torch_function_stack() == 0 and torch._C._is_torch_function_enabled()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not calls.here.stack.calls and not calls.books.blocks and not calls.books.stacks
    units = [s.unit for s in segments.registry.values()]
    assert not [u.name for u in units if u.flat is not None or u.pins or u.shown]
    assert leases.lingering() == 0
    assert is_released(*(s.parameter for s in segments.registry.values()))


class Loop:
    """Trains one engine beside another one that only evaluates. `run` ends with what must never differ."""

    def __init__(self, config, folder, direct):
        torch.manual_seed(0)
        self.model, self.other = Net(), Net()
        self.engine = overspill.initialize(self.model, config())[0]
        self.watcher = overspill.initialize(self.other, config())[0]
        self.call = self.model if direct else self.engine
        folder.mkdir(parents=True)
        self.folder, self.saves, self.losses, self.others = folder, 0, {}, {}

    def iteration(self, i):
        self.model.blocks[0].up.bias.data.clamp_(-0.1, 0.1)
        loss = self.call(batch(i)) + 0.01 * self.model.head.weight.square().sum()
        self.engine.backward(loss) if i % 2 else loss.backward()
        self.losses[i] = loss.item()
        with torch.no_grad():
            self.others[i] = self.other(batch(i)).item(), self.call(batch(i)).item()
        with self.engine.gathered(self.model.head.weight):
            self.others[i] += (self.model.head.weight.sum().item(),)
        self.others[i] += (self.model.head.weight.norm().item(), self.model.scale.data.sum().item())
        if i == 1:
            self.model.load_state_dict(self.model.state_dict())
            self.saves += 1
            self.engine.save_checkpoint(self.folder / f"{self.saves}")
            self.saved = self.folder / f"{self.saves}"
        self.engine.step()

    def updates(self):
        return self.engine.stats()["step"] + self.engine.stats()["skipped_steps"]

    def run(self, interrupter=None, at_step=None):
        for i in range(STEPS):
            if i == at_step:
                try:
                    with interrupter.armed():
                        self.iteration(i)
                except KeyboardInterrupt:
                    torch.set_grad_enabled(
                        True
                    )  # torch's own no_grad does not outlive an interrupt in its __exit__
                    self.engine.zero_grad()
                if self.updates() > i:
                    continue
            self.iteration(i)
        clean()
        final = self.engine.state_dict()
        self.engine.load_checkpoint(self.saved)
        return self.losses, self.others, final, self.engine.state_dict()

    def close(self):
        self.engine.close()
        self.watcher.close()


def draws(count):
    seed = int(os.environ.get("OVERSPILL_SEED", random.SystemRandom().randrange(2**32)))
    print(f"OVERSPILL_SEED={seed}")
    return random.Random(seed), count


def check_draws(config, folder, count):
    rng, count = draws(count)
    expected, places = {}, {}
    for direct in (True, False):
        loop = Loop(config, folder / f"expected-{direct}", direct)
        expected[direct] = loop.run()
        loop.close()
        for step in range(STEPS):
            counting = Interrupter()
            loop = Loop(config, folder / f"counted-{direct}-{step}", direct)
            loop.run(counting, step)
            loop.close()
            places[direct, step] = counting.count
    assert min(places.values()) > 1000, places
    struck = set()
    for number in range(count):
        direct, step = rng.random() < 0.5, rng.randrange(STEPS)
        interrupter = Interrupter(rng.randrange(places[direct, step]))
        loop = Loop(config, folder / str(number), direct)
        try:
            losses, others, final, loaded = loop.run(interrupter, step)
            assert losses == expected[direct][0] and others == expected[direct][1]
            assert same(final, expected[direct][2]) and same(loaded, expected[direct][3])
        except BaseException as error:
            what = (
                f"draw {number}: direct={direct} step={step} at={interrupter.at} struck {interrupter.place}"
            )
            raise AssertionError(what) from error
        finally:
            loop.close()
        assert interrupter.place is not None
        struck.add(interrupter.place)
    print(f"{count} interrupts at {len(struck)} places")


def test_interrupts_at_random_moments(config, tmp_path):
    check_draws(config, tmp_path, DRAWS)


@pytest.mark.long
def test_interrupts_at_a_thousand_random_moments(config, tmp_path):
    check_draws(config, tmp_path, LONG_DRAWS)


class OfHooks(Interrupter):
    """Strikes where torch's checkpoint in the model's forward puts its hooks of saved tensors on or takes them away."""

    def _strike(self, frame):
        if frame.f_code.co_name in ("enter_saved_tensors_hooks", "__exit__"):
            super()._strike(frame)


@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_an_interrupt_leaves_no_hooks_of_saved_tensors(recompute, config, tmp_path):
    files = (f"{OVERSPILL}/patches.py", TENSORS)
    settings = functools.partial(config, recompute=recompute)
    counting = OfHooks(folders=files)
    loop = Loop(settings, tmp_path / "counted", True)
    expected = loop.run(counting, 1)
    loop.close()
    assert counting.count > 10
    for at in range(counting.count):
        struck = OfHooks(at, files)
        loop = Loop(settings, tmp_path / str(at), at % 2 == 0)
        try:
            losses, *_, loaded = loop.run(struck, 1)
            assert losses == expected[0] and same(loaded, expected[3]), struck.place
        except BaseException as error:
            raise AssertionError(struck.place) from error
        finally:
            loop.close()


@pytest.mark.parametrize("before", [True, False], ids=["before_the_engine", "beside_the_engine"])
def test_hooks_around_an_interrupted_call_stay(before, config):
    packed, interrupted = [], []

    class Struck(nn.Module):
        def forward(self, x):
            if not interrupted:
                interrupted.append(torch.autograd.graph.saved_tensors_hooks(str, str))
                interrupted[0].__enter__()  # as if Ctrl-C had struck before the `with` could leave it
                raise KeyboardInterrupt
            return x

    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), Struck(), nn.Linear(16, 16))
    engine = None if before else overspill.initialize(model, config())[0]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
        engine = engine or overspill.initialize(model, config())[0]
        with contextlib.suppress(KeyboardInterrupt):
            model(batch(0))
        packed.clear()
        loss = model(batch(0)).square().sum()
        assert len(packed) > 3
        loss.backward()
    clean()
    engine.close()


def test_hooks_that_the_engine_took_away_are_not_left_for_others(config):
    """A script leaves them late, say by an ExitStack of its own: torch takes away what is on top then."""
    packed, struck, late = [], [], contextlib.ExitStack()

    class Struck(nn.Module):
        def forward(self, x):
            if not struck:
                struck.append(True)
                late.enter_context(torch.autograd.graph.saved_tensors_hooks(str, str))
                raise KeyboardInterrupt
            return x

    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), Struck(), nn.Linear(16, 16))
    engine, *_ = overspill.initialize(model, config())
    with contextlib.suppress(KeyboardInterrupt):
        model(batch(0))
    model(batch(0)).square().sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
        late.close()
        model(batch(0)).square().sum().backward()
        assert len(packed) > 3
    engine.close()


# ---- the beginning and the end of an engine


TORCH = {
    "_engine_run_backward": (torch.autograd.graph, "_engine_run_backward"),
    "zero_grad": (nn.Module, "zero_grad"),
    "_apply": (nn.Module, "_apply"),
    "clip_grad_norm_": (nn.utils, "clip_grad_norm_"),
    "hooks of compiled modules": (torch._dynamo.config, "skip_nnmodule_hook_guards"),
}


def of_torch():
    """What an engine changes of torch while it lives."""
    found = {name: getattr(place, attribute) for name, (place, attribute) in TORCH.items()}
    return found | {name: vars(nn.Parameter).get(name) for name in ("data", "grad", "__deepcopy__")}


def two_steps(config):
    """A small model's losses and weights, by calls that reach the engine through what it changed of torch."""
    torch.manual_seed(0)
    model = Block()
    engine = overspill.initialize(model, config())[0]
    losses = []
    for i in range(2):
        loss = model(batch(i)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        engine.optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
    found = losses, [value.sum().item() for value in engine.state_dict().values()]
    engine.close()
    return found


def test_an_interrupt_while_an_engine_begins_leaves_torch_to_the_next_one(config, monkeypatch):
    """At each place of what changes torch, and of the class that ends what could not be made."""
    files = tuple(f"{OVERSPILL}/{name}.py" for name in ("patches", "ending"))
    monkeypatch.setattr(torch._dynamo, "reset", lambda: None)  # it takes long
    plain, expected = of_torch(), two_steps(config)

    def strike():
        raise KeyboardInterrupt("on purpose")

    def begin(at=None):
        struck = Interrupter(at, files)
        with contextlib.suppress(KeyboardInterrupt), struck.armed():
            made = overspill.initialize(Block(), config())  # kept, so that nothing ends inside
        made = None  # noqa: F841
        if at is None:
            gc.collect()
        return struck

    count = begin().count
    assert count > 30 and of_torch() == plain
    for at in range(count):
        place = begin(at).place
        assert of_torch() == plain, place
        if place.startswith("patches.py") and at % 3 == 0:
            assert two_steps(config) == expected, place
        assert not segments.registry, place
    # Torch is changed, and nothing else knows the engine:
    with pytest.raises(KeyboardInterrupt, match="on purpose"):
        monkeypatch.setattr(overspill.engine, "Life", strike)
        overspill.initialize(Block(), config())
    assert of_torch() == plain


def test_an_interrupt_while_an_engine_ends_is_finished_by_the_next_call(config):
    files = tuple(f"{OVERSPILL}/{name}.py" for name in ("patches", "engine", "ending", *OF_RESIDENCY))
    plain = of_torch()

    def end(at=None):
        model = Block()
        engine = overspill.initialize(model, config("nvme", job="one"))[0]
        loss = model(batch(0)).sum()  # so that there is more to let go
        struck = Interrupter(at, files)
        with contextlib.suppress(KeyboardInterrupt), struck.armed():
            engine.close()
        engine.close()
        del loss
        assert engine._residency.closed and not segments.registry, struck.place
        assert of_torch() == plain, struck.place
        assert not [u.name for u in engine._residency.units if u.flat is not None], struck.place
        with pytest.raises(ValueError, match="closed"):
            engine._core.synchronize()
        return struck

    count = end().count
    assert count > 50
    for at in range(count):
        end(at)  # the next engine has the same job's folder: this one has let it go


def test_an_interrupt_of_close_is_finished_when_the_engine_is_collected(config, monkeypatch):
    plain, close = of_torch(), residency.Residency.close

    def struck(owner):
        monkeypatch.undo()
        raise KeyboardInterrupt

    engine = overspill.initialize(Block(), config())[0]
    monkeypatch.setattr(residency.Residency, "close", struck)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert residency.Residency.close is close and segments.registry
    del engine
    gc.collect()
    assert of_torch() == plain and not segments.registry


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ctrl-C, in a finalizer
def test_an_interrupt_while_a_collected_engine_ends_keeps_nothing_from_ending(config):
    """Nobody has it to close it again."""
    files = tuple(f"{OVERSPILL}/{name}.py" for name in ("patches", "ending", *OF_RESIDENCY))
    plain = of_torch()

    def collected(at=None):
        model = Block()
        engine = overspill.initialize(model, config("nvme", job="one"))[0]
        end, core = engine._end, engine._core
        loss = model(batch(0)).sum()  # so that there is more to let go
        struck = Interrupter(at, files)
        with contextlib.suppress(KeyboardInterrupt), struck.armed():
            del engine, model
            gc.collect()
        del loss
        assert end.over and not segments.registry, struck.place
        assert of_torch() == plain, struck.place
        with pytest.raises(ValueError, match="closed"):
            core.synchronize()
        return struck

    count = collected().count
    assert count > 50
    # Not where `collected` is entered: Python has not called it yet. Of the others every third, by chance.
    for at in range(1 + random.randrange(3), count, 3):
        collected(at)


# ---- a Trainer of Hugging Face, and generate


class Trained:
    """A Trainer whose optimizer is the engine's, started anew from one checkpoint again and again."""

    def __init__(self, config, folder):
        from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=29, max_position_embeddings=32, **sizes))
        generator = torch.Generator().manual_seed(1)
        rows = [torch.randint(0, 29, (8,), generator=generator) for _ in range(8)]
        arguments = TrainingArguments(
            output_dir=str(folder / "trainer"),
            max_steps=2,
            per_device_train_batch_size=2,
            lr_scheduler_type="constant",
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        self.trainer = Trainer(model, arguments, train_dataset=[{"input_ids": r, "labels": r} for r in rows])
        engine, self.trainer.optimizer, *_ = overspill.initialize(
            model, config(), self.trainer.create_optimizer()
        )
        self.engine, self.model, self.start, self.prompt = engine, model, folder / "start", rows[0][None, :4]
        engine.save_checkpoint(self.start)

    def train(self):
        self.engine.load_checkpoint(self.start)
        self.engine.zero_grad()
        self.trainer.train()
        return {k: v.clone() for k, v in self.engine.state_dict().items()}

    def generate(self):
        return self.model.generate(self.prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)


@pytest.fixture
def trained(config, tmp_path, no_group):
    state = pytest.importorskip("accelerate.state", reason="accelerate is not installed")
    if torch.distributed.is_initialized():  # another test's, and Accelerate would wrap the model for it
        torch.distributed.destroy_process_group()
    state.AcceleratorState._reset_state(reset_partial_state=True)
    made = Trained(config, tmp_path)
    yield made
    made.engine.close()


def check_trainer(trained, count):
    rng, count = draws(count)
    places = {}
    for what in (trained.train, trained.generate):
        expected = trained.train()
        words = trained.generate()  # both as before each draw: what follows depends on it
        counting = Interrupter(folders=(OVERSPILL,))
        with counting.armed():
            what()
        places[what.__name__] = counting.count
    for number in range(count):
        name = rng.choice(list(places))
        interrupter = Interrupter(rng.randrange(places[name]), (OVERSPILL,))
        what = f"draw {number}: {name} at={interrupter.at}"
        with pytest.raises(KeyboardInterrupt), interrupter.armed():
            getattr(trained, name)()
        torch.set_grad_enabled(True)  # as in Loop.run
        assert interrupter.place is not None, what
        assert same(trained.train(), expected), f"{what} struck {interrupter.place}"
        assert torch.equal(trained.generate(), words), f"{what} struck {interrupter.place}"
        clean()


def test_interrupts_of_a_trainer_and_of_generate(trained):
    check_trainer(trained, 6)


@pytest.mark.long
def test_interrupts_of_a_trainer_and_of_generate_at_many_moments(trained):
    check_trainer(trained, 100)
