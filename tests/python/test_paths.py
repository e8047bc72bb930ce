"""Paths of every kind: relative ones, bytes that are no UTF-8, and names of jobs that no other container has."""

import itertools
import os

import pytest
import torch
from torch import nn

from overspill import Config, ConfigError, Init, _core, config, initialize


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


@pytest.mark.parametrize("where", ["initialize", "Init"])
@pytest.mark.parametrize("kind", ["missing", "file", "closed"])
def test_a_folder_that_is_none_is_named_while_everything_fits(where, kind, tmp_path, monkeypatch):
    """Else it would show when the first state is spilled, in the middle of a run."""
    (tmp_path / "file").touch()
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    words = {"missing": "does not exist", "file": "is a file, not a folder", "closed": "is not writable"}[
        kind
    ]
    budget = {"budget": {"host": "64MiB", "nvme": [str(tmp_path / kind)]}}
    with pytest.raises(_core.StoreError, match=rf"^budget\.nvme: {tmp_path}/{kind} {words}"):
        Init(budget) if where == "Init" else initialize(model=nn.Linear(4, 4), config=budget)


@pytest.mark.parametrize("job", ["a/b", "", "..", "x\n", "x" * 201])
def test_a_job_that_can_be_no_file_is_refused_while_everything_fits(job, tmp_path):
    with pytest.raises(ConfigError, match=r"engine\.job = .*: a name has up to 200 letters.*--job"):
        Config.read({"budget": {"host": 1}, "engine": {"job": job}})


@pytest.mark.parametrize("path", ["a\0b", "\ud800"])
def test_a_text_that_can_be_no_path_is_named(path):
    with pytest.raises(ConfigError, match=r"budget\.nvme\.0 = .*has characters that no path can have"):
        Config.read({"budget": {"host": 1, "nvme": [path]}})


def test_two_containers_with_one_process_number_have_two_jobs(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 1)
    jobs = set()
    for _ in range(2):
        monkeypatch.setattr(config, "_engines", itertools.count())
        jobs.add(Config.read(settings(tmp_path)).to_core(_core).job)
    assert len(jobs) == 2
    assert all(job.startswith("1-0-") for job in jobs)
