"""Each habit of habits_of_*.py, plain and under an engine, with everything in memory and with everything on disk: the
same to the bit, or an error that says the way out."""

from functools import partial

import habits_of_changed_gradients  # noqa: F401
import habits_of_clipping  # noqa: F401
import habits_of_gradients  # noqa: F401
import habits_of_groups  # noqa: F401
import habits_of_losses  # noqa: F401
import habits_of_optimizers  # noqa: F401
import habits_of_reading  # noqa: F401
import habits_of_several  # noqa: F401
import habits_of_states  # noqa: F401
import habits_of_writing  # noqa: F401
import numpy as np
import pytest
import torch
from habits import HABITS
from torch import nn

import overspill
from overspill import files


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))


class Maker:
    """Gives models and their optimizers to a habit; with a configuration, under an engine each."""

    def __init__(self, config=None):
        self.config, self.models, self.engines = config, [], []

    def __call__(self, model=None, seed=0, kind=torch.optim.SGD, **options):
        torch.manual_seed(seed)
        model = network(seed) if model is None else model
        if kind is torch.optim.SGD and not options:
            options = {"lr": 0.1, "momentum": 0.9}
        return self.hand_over(model, kind(model.parameters(), **options))

    def hand_over(self, model, optimizer):
        if self.config is not None:
            engine, optimizer, *_ = overspill.initialize(model, self.config, optimizer)
            self.engines.append(engine)
        self.models.append(model)
        return model, optimizer

    def state(self):
        return [dict(model.state_dict()) for model in self.models]


def same(a, b, close=False):
    if isinstance(a, torch.Tensor):
        # Adam divides by the root of v: what CPUs round otherwise came to 1.4e-5 after eight steps.
        equal = partial(torch.allclose, rtol=3e-5, atol=1e-7) if close else torch.equal
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k], close) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y, close) for x, y in zip(a, b))
    return a == (pytest.approx(b, rel=1e-5) if close and isinstance(b, float) else b)


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.name)
def test_a_habit(habit, placement, config, monkeypatch):
    monkeypatch.setattr(files, "FROM", 1)  # on NVMe what is the script's lies in files, however small
    check(habit, placement, config)


ALLOWED = [habit for habit in HABITS if not (habit.refused and habit.run.__module__ == "habits_of_states")]


@pytest.mark.parametrize("habit", ALLOWED, ids=lambda habit: habit.name)
def test_a_habit_in_float64(habit, config):
    torch.set_default_dtype(torch.float64)
    try:
        check(habit, "nvme", config)
    finally:
        torch.set_default_dtype(torch.float32)


def check(habit, placement, config):
    settings = {k: v for k, v in config(placement).items() if k != "optimizer"}
    torch.manual_seed(0)
    plain = Maker()
    try:
        expected = None if habit.refused else habit.run(plain)
    except KeyError as error:  # before 2.12 Adagrad makes its states once
        if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12):
            raise
        pytest.skip(f"PyTorch {torch.__version__} itself raises KeyError {error} here")
    torch.manual_seed(0)
    under = Maker(settings)
    try:
        if habit.refused is not None:
            with pytest.raises(Exception, match=habit.refused) as error:
                habit.run(under)
            assert "overspill" in str(error.value)
            return
        got = habit.run(under)
        assert same(got, expected, habit.close), (got, expected)
        assert same(under.state(), plain.state(), habit.close)
        assert all(engine.stats()["skipped_steps"] == 0 for engine in under.engines)
    finally:
        for engine in under.engines:
            engine.close()
