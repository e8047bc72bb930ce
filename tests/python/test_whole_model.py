"""What scripts do with all parameters at once, of a model that does not fit in memory."""

import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from disks import lies_in_a_file
from test_cgroup import limited
from tiny import BINDINGS
from torch import nn

import overspill
from overspill import files

JOB = Path(__file__).with_name("whole_model_job.py")
# Of which the budget takes 64 and torch's work some 60; weights, gradients, the average and the state dict have 256
# each.
BESIDE_TORCH = 224 << 20
# In bytes: larger tensors lie outside of the C library's heap. That heap keeps 20 to 200 MiB of what was freed, more
# with more threads.
HEAP_TAKES = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


def of_torch() -> int:
    """Anonymous bytes of a process that has imported the engine: 154 MiB with PyTorch for CPUs, 290 with CUDA's."""
    program = "import overspill.optim, pathlib; print(pathlib.Path('/proc/self/status').read_text())"
    environment = {**os.environ, "PYTHONPATH": str(BINDINGS)}
    said = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    return int(re.search(r"RssAnon:\s+(\d+) kB", said.stdout)[1]) << 10


def test_in_less_memory_than_the_model_has(tmp_path):
    with limited(of_torch() + BESIDE_TORCH) as join:
        job = subprocess.run(
            [sys.executable, "-W", "error", JOB, tmp_path],
            env={**os.environ, "PYTHONPATH": str(BINDINGS), "PYTHONUNBUFFERED": "1", **HEAP_TAKES},
            capture_output=True,
            text=True,
            preexec_fn=join,
        )
    done = job.stdout.splitlines()
    assert job.returncode == 0, (done, job.returncode, job.stderr)
    assert len(done) == 7, done


def test_copies_in_files_are_memory_as_any_other(config):
    model = nn.Linear(512, 512)
    engine, *_ = overspill.initialize(model, config("nvme"))
    try:
        copied, state = copy.deepcopy(model), model.state_dict()
        for weight in (copied.weight, state["weight"]):
            assert lies_in_a_file(weight) and torch.equal(weight, model.weight)
            assert not weight.is_shared()
        assert not lies_in_a_file(state["bias"])
        assert not lies_in_a_file(copy.deepcopy(copied).weight)
        another, *_ = overspill.initialize(copied, config("nvme", job="another"))
        assert torch.equal(copied.weight, model.weight)
        another.close()
        copied = copy.deepcopy(model).share_memory()
        assert copied.weight.is_shared() and torch.equal(copied.weight, model.weight)
    finally:
        engine.close()


@pytest.fixture
def full(monkeypatch):
    """Files find no room."""

    def tensor(shape, stride, dtype, folder, what, way_out):
        raise OSError(28, f"overspill: {what}: No space left on device; {way_out}", folder)

    monkeypatch.setattr(files, "FROM", 1)
    monkeypatch.setattr(files, "tensor", tensor)


def test_a_full_disk_leaves_them_in_memory(config, full):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    plain = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    plain.load_state_dict(model.state_dict())
    engine, optimizer, *_ = overspill.initialize(
        model, config("nvme"), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)

    def step(model, optimizer):
        (model(torch.ones(2, 16)).sum() + sum(p.square().sum() for p in model.parameters())).backward()
        optimizer.step()
        return model.state_dict()

    try:
        with pytest.warns(
            UserWarning, match=r"a part of the gradient of \S+ waits for the rest: No space left"
        ):
            found = step(model, optimizer)
        for name, value in step(plain, theirs).items():
            assert torch.equal(found[name], value), name
    finally:
        engine.close()


def test_a_full_disk_is_told_once(config, full):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    engine, *_ = overspill.initialize(model, config("nvme"))
    try:
        with pytest.warns(UserWarning, match="No space left") as told:
            state = model.state_dict()
            copied = copy.deepcopy(model)
        assert len(told) == 1 and len(state) == 4
        assert all(torch.equal(value, state[name]) for name, value in copied.state_dict().items())
    finally:
        engine.close()
