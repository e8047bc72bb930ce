"""Steps that something interrupts, or that call the engine again: counts, schedulers and gradients are those of whole
steps."""

import contextlib
import itertools
import signal
import warnings
from pathlib import Path

import pytest
import torch
from interrupts import OVERSPILL, Interrupter
from scene import Meanwhile, batch, in_thread, loss_of, mlp, refused
from torch import nn

import overspill

SCHEDULERS = str(Path(torch.optim.__file__).parent)


OTHER_CALLS = {
    "backward": lambda engine, folder: engine.backward(torch.ones((), requires_grad=True)),
    "step": lambda engine, folder: engine.step(),
    "train_batch": lambda engine, folder: engine.train_batch([0, 0], lambda _: engine.module.bias.sum()),
    "zero_grad": lambda engine, folder: engine.zero_grad(),
    "save_checkpoint": lambda engine, folder: engine.save_checkpoint(folder / "other"),
    "load_checkpoint": lambda engine, folder: engine.load_checkpoint(folder / "saved"),
    "close": lambda engine, folder: engine.close(),
}


class TestScheduledSteps:
    """An update, its counts and its scheduler are one, wherever Ctrl-C strikes."""

    def start(self, config):
        model = nn.Linear(3, 1)
        settings = config(optimizer={"lr": 1.0}, accumulation=2)
        engine = overspill.initialize(model, settings)[0]
        engine.lr_scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.5)
        return engine

    def update(self, engine, by):
        if by == "train_batch":
            engine.train_batch([torch.ones(2, 3)] * 2, lambda x: engine(x).sum())
            return
        while True:
            before = engine.micro_steps
            engine.backward(engine(torch.ones(2, 3)).sum())
            engine.step()
            if before % 2:
                return

    def check(self, engine, updates):
        """What the core has made is what was counted and scheduled."""
        assert engine.stats()["step"] == updates
        found = engine.global_steps, engine.lr_scheduler.last_epoch, engine.micro_steps
        assert found == (updates, updates, 2 * updates)
        assert engine.optimizer.param_groups[0]["lr"] == engine.lr_scheduler.get_last_lr()[0] == 0.5**updates
        assert (engine.last_step.step if engine.last_step else 0) == updates

    @pytest.mark.parametrize("by", ["step", "train_batch"])
    def test_an_interrupted_update_is_counted_and_scheduled_once_or_not_at_all(self, config, by):
        made, first = set(), 300 if by == "step" else 0  # of its two micro-batches, the second one
        for at in itertools.count(first, 3):
            engine, interrupter = self.start(config), Interrupter(at, (OVERSPILL, SCHEDULERS))
            try:
                with contextlib.suppress(KeyboardInterrupt), interrupter.armed():
                    self.update(engine, by)
                if interrupter.place is None:  # it has fewer
                    break
                torch.set_grad_enabled(True)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of a step that begins anew
                    engine.zero_grad()
                updates = engine.stats()["step"]
                made.add(updates)
                self.check(engine, updates)
                self.update(engine, by)
                self.check(engine, updates + 1)
            except BaseException as error:
                raise AssertionError(f"at={at} struck {interrupter.place}") from error
            finally:
                engine.close()
        assert made == {0, 1} and at > first + 300

    def test_ctrl_c_while_the_core_steps_loses_neither_counts_nor_scheduler(self, config):
        """The signal arrives inside the core, so Python raises where its call returns."""
        engine = self.start(config)
        self.update(engine, "step")
        core = engine._core
        engine._residency.core = Meanwhile(
            core, "step", lambda: signal.raise_signal(signal.SIGINT), after=True
        )
        with pytest.raises(KeyboardInterrupt):
            self.update(engine, "step")
        engine._residency.core = core
        assert (engine.global_steps, engine.lr_scheduler.last_epoch, engine.micro_steps) == (2, 2, 4)
        engine.close()

    def test_a_scheduler_may_look_at_its_engine(self, config):
        engine, seen = self.start(config), []

        class Looking:
            def step(self):
                seen.append((engine.stats()["step"], engine.global_steps))

        engine.lr_scheduler = Looking()
        self.update(engine, "step")
        self.update(engine, "train_batch")
        assert seen == [(1, 1), (2, 2)]
        engine.close()

    @pytest.mark.parametrize("by", ["step", "train_batch"])
    @pytest.mark.parametrize("thread", ["the same", "another"])
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_who_looks_at_the_engine_during_an_update_does_not_end_it(self, config, by, thread, when):
        engine, seen = self.start(config), []

        def look():
            seen.append((engine.stats()["step"], engine.report(), engine._core.stall()))

        def meanwhile(*_):
            assert thread == "the same" or in_thread(look) is None
            if thread == "the same":
                look()
                if engine.micro_steps % 2 and engine.stats()["step"] == engine.global_steps:
                    with pytest.raises(RuntimeError, match="save_checkpoint in the middle of a step"):
                        engine.save_checkpoint("never")

        engine.optimizer.register_step_pre_hook(meanwhile)
        engine._residency.core = Meanwhile(engine._core, "step", meanwhile, after=when == "after")
        for updates in (1, 2):
            self.update(engine, by)
            self.check(engine, updates)
        assert [step for step, *_ in seen] == ([0, 0, 1, 1] if when == "before" else [0, 1, 1, 2])
        engine.close()

    @pytest.mark.parametrize("name", OTHER_CALLS)
    @pytest.mark.parametrize("when", ["at its beginning", "before the core", "after the core", "scheduling"])
    def test_a_thread_that_is_refused_during_an_update_does_not_end_it(self, config, tmp_path, name, when):
        engine, raised = self.start(config), []
        engine.save_checkpoint(tmp_path / "saved")

        def meanwhile(*_):
            raised.append(in_thread(lambda: OTHER_CALLS[name](engine, tmp_path)))

        if when == "at its beginning":
            engine.optimizer.register_step_pre_hook(meanwhile)
        elif when == "scheduling":
            step = engine.lr_scheduler.step
            engine.lr_scheduler.step = lambda: (meanwhile(), step())
        else:
            core = Meanwhile(engine._core, "step", meanwhile, after=when == "after the core")
            engine._residency.core = core
        for updates in (1, 2):
            self.update(engine, "step")
            self.check(engine, updates)
        assert len(raised) == 2 and all(map(refused, raised)), raised
        engine.close()

    def test_a_save_by_a_handler_of_a_signal_has_the_counts_of_what_the_core_has_made(self, config, tmp_path):
        engine, counts = self.start(config), []
        self.update(engine, "step")

        def save(*_):
            engine.save_checkpoint(tmp_path / f"{len(counts)}")
            counts.append((engine.stats()["step"], engine.global_steps))

        before = signal.signal(signal.SIGUSR1, save)
        try:
            core = engine._core
            engine._residency.core = Meanwhile(
                core, "step", lambda: signal.raise_signal(signal.SIGUSR1), after=True
            )
            self.update(engine, "step")
            engine._residency.core = core
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert counts == [(2, 2)]
        self.check(engine, 2)
        self.update(engine, "step")
        engine.load_checkpoint(tmp_path / "0")
        assert (engine.global_steps, engine.lr_scheduler.last_epoch, engine.micro_steps) == (2, 2, 4)
        engine.close()

    def test_a_step_inside_a_step_is_refused_by_name(self, config):
        engine = self.start(config)
        handle = engine.optimizer.register_step_pre_hook(lambda *_: engine.step())
        with pytest.raises(RuntimeError, match=r"engine\.step or train_batch inside an update"):
            self.update(engine, "step")
        handle.remove()
        with pytest.warns(UserWarning, match="in the middle of a step"):
            engine.zero_grad()
        self.update(engine, "step")
        self.check(engine, 1)
        engine.close()

    def test_a_scheduler_that_refuses_is_told_once_and_its_update_counts(self, config):
        engine = self.start(config)

        class Ended:
            def step(self):
                raise ValueError("no step is left")

        engine.lr_scheduler = Ended()
        for updates in (1, 2):
            with pytest.raises(ValueError, match="no step is left"):
                self.update(engine, "train_batch")
            engine.zero_grad()
            assert (engine.global_steps, engine.micro_steps) == (updates, 2 * updates)
        engine.close()


@pytest.mark.parametrize("then", ["train_batch", "the module's own call", "step of the optimizer"])
def test_a_second_interrupt_anywhere_in_leaving_train_batch_leaves_no_gradient_for_the_next(config, then):
    """The first one strikes in the second micro-batch, when the first one's gradients are there."""
    batches, files = (
        [batch(0), batch(1)],
        tuple(f"{OVERSPILL}/{n}.py" for n in ("engine", "stepping", "boundary", "calls")),
    )

    def goes_on(engine):
        model = engine.module
        if then == "train_batch":
            engine.train_batch(batches, lambda x: loss_of(model, x))
        elif then == "the module's own call":
            for x in batches:
                (loss_of(model, x) / 2).backward()
            engine.optimizer.step()
        else:
            engine.optimizer.step()
        return engine.state_dict(), engine.last_step.norm

    def broken(at):
        engine = overspill.initialize(mlp(), config(accumulation=2))[0]
        second, begun = Interrupter(at, files), []

        def loss(x):
            begun.append(second.count)
            if len(begun) == 2:
                raise KeyboardInterrupt("the first")
            return loss_of(engine.module, x)

        if at is not None:
            with pytest.raises(KeyboardInterrupt), second.armed():
                engine.train_batch(batches, loss)
            torch.set_grad_enabled(True)
            assert at <= 0 or engine.micro_steps == 0
        found = goes_on(engine)
        engine.close()
        return found, begun, second

    expected, *_ = broken(None)
    _, begun, whole = broken(-1)
    assert whole.count - begun[1] > 10
    for at in range(begun[1], whole.count):
        (weights, norm), _, second = broken(at)
        assert norm == expected[1], second.place
        assert all(torch.equal(value, expected[0][name]) for name, value in weights.items()), second.place
