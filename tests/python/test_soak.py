"""Long runs of random calls, in the order that a seed gives: steps, evaluation, edits, checkpoints saved, deleted
and loaded. After each the engine equals the plain loop bit for bit, and nothing grows."""

import copy
import random
import shutil

import pytest
import torch
from test_zoo import assert_nothing_held, assert_same, compare, seed
from zoo import build

import overspill
from overspill import memory
from plain import Plain

ACTIONS = 400
GROWTH_BYTES = 64 << 20  # of the process between the first third and the end


class Soak:
    """One engine and the plain loop that it must equal; `saved` maps a checkpoint to the plain loop as it was then."""

    def __init__(self, name, dtype, config, folder, number):
        model, self.batch = build(name, dtype)
        self.plain, self.folder, self.rng = Plain(build(name, dtype)[0]), folder, random.Random(number)
        self.engine, *_ = overspill.initialize(model, config)
        self.saved, self.count = {}, 0

    def forward(self, i, model):
        seed(i)
        return model(*self.batch(i))

    def step(self):
        i = self.rng.randrange(1000)
        ours = self.forward(i, self.engine)
        self.engine.backward(ours)
        self.engine.step()
        theirs = self.forward(i, self.plain.model)
        self.plain.backward(theirs)
        assert_same("loss", ours, theirs)
        self.plain.step(self.engine.last_step.clip)

    def evaluate(self):
        i = self.rng.randrange(1000)
        self.engine.eval(), self.plain.model.eval()
        with torch.no_grad():
            assert_same("evaluation", self.forward(i, self.engine), self.forward(i, self.plain.model))
        self.engine.train(), self.plain.model.train()

    def abandon(self):
        """A backward whose gradients are thrown away."""
        i = self.rng.randrange(1000)
        self.engine.backward(self.forward(i, self.engine))
        self.engine.zero_grad()
        self.forward(i, self.plain.model)  # buffers and random states move alike

    def edit(self):
        name, theirs = self.rng.choice(list(self.plain.model.named_parameters()))
        ours = dict(self.engine.module.named_parameters())[name]
        with torch.no_grad(), self.engine.gathered([ours]):
            ours.mul_(0.5)
        with torch.no_grad():
            theirs.mul_(0.5)
        for state in self.plain.states:
            if state.parameter is theirs:
                state.notice_edits()
                state.rest()

    def copy_of(self, plain):
        """Copied parameters count their versions anew."""
        copied = copy.deepcopy(plain)
        for state in copied.states:
            state.rest()
        return copied

    def save(self):
        self.count += 1
        path = self.folder / f"checkpoint-{self.count}"
        self.engine.save_checkpoint(path)
        self.saved[path] = self.copy_of(self.plain)
        if len(self.saved) > 2:
            oldest = next(iter(self.saved))
            shutil.rmtree(oldest)
            del self.saved[oldest]

    def load(self):
        if self.saved:
            path = self.rng.choice(list(self.saved))
            self.engine.load_checkpoint(path)
            self.plain = self.copy_of(self.saved[path])

    def act(self):
        kinds = [self.step, self.evaluate, self.abandon, self.edit, self.save, self.load]
        self.rng.choices(kinds, weights=[12, 3, 2, 2, 2, 1])[0]()


@pytest.mark.long
@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("placement", ["half", "nvme"])
@pytest.mark.parametrize("name", ["llama", "skips_layers"])
def test_soak(name, placement, number, config, tmp_path):
    guessing = number % 2 == 1  # most steps are not clipped then
    settings = config(placement, clipping=4.0 if guessing else 0.5, threads=2, speculate=guessing)
    soak = Soak(name, torch.bfloat16, settings, tmp_path, number)
    rss = reserved = 0
    try:
        for i in range(ACTIONS):
            soak.act()
            stats = soak.engine.stats()
            assert stats["host_used_bytes"] <= stats["host_budget_bytes"]
            if i % 20 == 0:
                compare(soak.engine, soak.plain)
                assert_nothing_held(soak.engine)
            if i == ACTIONS // 3:
                rss, reserved = memory.rss_bytes(), stats["nvme_reserved_bytes"]
        compare(soak.engine, soak.plain)
        assert memory.rss_bytes() - rss < GROWTH_BYTES
        stats = soak.engine.stats()
        assert stats["nvme_reserved_bytes"] <= 2 * reserved
        assert (stats["guesses_taken"] > 0) == guessing
    finally:
        soak.engine.close()
