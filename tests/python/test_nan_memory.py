"""What released parameters lie over: reads as NaN, and a stray write into one changes no other's."""

import ctypes
from pathlib import Path

import pytest
import torch
from torch import nn

import overspill
from overspill import nan_memory


def raw(p):
    """The memory at the parameter's address, as C code sees it."""
    return (ctypes.c_float * p.numel()).from_address(p.data_ptr())


def is_nan(memory):
    return all(value != value for value in memory)


def test_a_stray_write_changes_no_other_parameter(config):
    models = [nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(2)]
    engines = [overspill.initialize(model, config(job=str(i)))[0] for i, model in enumerate(models)]
    parameters = [p for model in models for p in model.parameters()]
    for number, p in enumerate(parameters, 1):
        memory = raw(p)
        assert is_nan(memory)
        for i in range(len(memory)):
            memory[i] = 0.0
        assert all(is_nan(raw(q)) for q in parameters[number:])
    for engine in engines:
        assert torch.isfinite(engine(torch.ones(1, 64))).all()
        engine.close()


@pytest.mark.parametrize("why", ["full", "no address space"])
def test_others_share_memory_where_there_are_too_many(config, monkeypatch, why):
    if why == "full":
        monkeypatch.setattr(nan_memory, "_own", nan_memory._Own())
        monkeypatch.setattr(nan_memory, "MAPPINGS_MOST", 3)
    else:
        monkeypatch.setattr(nan_memory._Own, "make", lambda self, size: None)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    engine, *_ = overspill.initialize(model, config())
    assert len({p.data_ptr() for p in model.parameters()}) == 8 and all(
        is_nan(raw(p)) for p in model.parameters()
    )
    assert torch.isfinite(engine(torch.ones(1, 8))).all()
    engine.close()


def test_memory_that_is_freed_makes_room(monkeypatch):
    own = nan_memory._Own()
    monkeypatch.setattr(nan_memory, "MAPPINGS_MOST", 4)
    held = [own.make(64) for _ in range(4)]
    assert all(each is not None for each in held) and own.make(64) is None
    held.clear()
    own._refused = 0
    assert own.make(64) is not None


@pytest.mark.parametrize("size", [64, 5 << 20, 40 << 20, (2 << 30) + 64])
def test_no_more_mappings_than_were_counted(size):
    def mapped():
        return Path("/proc/self/maps").read_text().count("overspill-nan")

    own, before = nan_memory._Own(), mapped()
    memory = own.make(size)
    assert memory.numel() >= size and 0 < mapped() - before <= own._mappings
