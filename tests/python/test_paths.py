"""Paths of every kind: relative ones, bytes that are no UTF-8, and names of jobs that no other container has."""

import itertools
import os

import pytest
import torch
from torch import nn

from overspill import Config, _core, config, initialize


def settings(nvme, **engine):
    return {
        "budget": {"host": "64MiB", "nvme": [str(nvme)]},
        "engine": {"placement": "nvme", **engine},
    }


def trained(engine, steps=1):
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
    engine.synchronize()


def test_a_relative_path_stays_what_it_was_when_the_process_goes_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    monkeypatch.chdir(tmp_path)
    engine = initialize(model=nn.Linear(4, 4), config=settings("disk"))[0]
    monkeypatch.chdir("/")
    trained(engine)
    engine.save_checkpoint(tmp_path / "checkpoint")
    engine.load_checkpoint(tmp_path / "checkpoint")
    engine.close()
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_path_that_is_no_utf8_works_and_is_named_in_errors(tmp_path):
    odd = tmp_path / os.fsdecode(b"odd \xff")
    odd.mkdir()
    with pytest.raises(_core.StoreError, match=r"odd \\xff/missing"):
        initialize(model=nn.Linear(4, 4), config=settings(odd / "missing"))
    engine = initialize(model=nn.Linear(4, 4), config=settings(odd))[0]
    trained(engine)
    assert engine.stats()["paths"][0]["path"].endswith("odd \\xff")
    engine.save_checkpoint(odd / "checkpoint")
    with pytest.raises(_core.CheckpointError, match=r"odd \\xff/checkpoint exists already"):
        engine.save_checkpoint(odd / "checkpoint")
    engine.load_checkpoint(odd / "checkpoint")
    engine.close()


def test_two_containers_with_one_process_number_have_two_jobs(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 1)
    jobs = set()
    for _ in range(2):
        monkeypatch.setattr(config, "_engines", itertools.count())
        jobs.add(Config.read(settings(tmp_path)).to_core(_core).job)
    assert len(jobs) == 2
    assert all(job.startswith("1-0-") for job in jobs)
