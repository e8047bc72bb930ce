"""A merge that was stopped or killed leaves nothing in the way of the next one."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from tiny import BINDINGS
from torch import nn

import overspill
from overspill import _core

STOPPED = """
import os, sys
from overspill import merging
from overspill.cli import main
merging._look_at_signals = lambda done, total: os.kill(os.getpid(), int(sys.argv[1]))
sys.exit(main(sys.argv[2:]))
"""
KILLED = """
import os, signal, sys
from overspill import _core
_core.merge(*sys.argv[1:], progress=lambda done, total: os.kill(os.getpid(), signal.SIGKILL))
"""


@pytest.fixture
def checkpoint(config, tmp_path):
    torch.manual_seed(0)
    settings = config("host")
    engine, *_ = overspill.initialize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), settings)
    engine.save_checkpoint(tmp_path / "saved")
    engine.close()
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text("{}")
    return tmp_path / "saved"


def run(script, *arguments):
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(BINDINGS)}, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_command(number, checkpoint, tmp_path):
    out = tmp_path / "out"
    arguments = ["merge", checkpoint, out, "--model", tmp_path / "hf"]
    process = run(STOPPED, int(number), *arguments)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number), process.stderr
    assert "Traceback" not in process.stderr
    left = sorted(p.name for p in tmp_path.iterdir())
    leftovers = [name for name in left if name.startswith("out.part-")]
    assert left == ["hf", *leftovers, "saved"] and len(leftovers) == (number == signal.SIGKILL)
    process = run(STOPPED, 0, *arguments)  # signal 0 does nothing
    assert process.returncode == 0, process.stderr
    assert all(f"{name} was left by a merge that was killed" in process.stderr for name in leftovers)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "out", *leftovers, "saved"]
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"]


def test_the_function(checkpoint, tmp_path):
    out = tmp_path / "out"
    assert run(KILLED, checkpoint, out).returncode == -signal.SIGKILL
    assert [p.name for p in out.iterdir()] == ["model.safetensors.tmp"]
    for name in ("model-00001-of-00002.safetensors.tmp", "model.safetensors.index.json.tmp"):
        (out / name).write_text("")
    _core.merge(str(checkpoint), str(out), "fp32")
    assert [p.name for p in out.iterdir()] == ["model.safetensors"]
    assert len(load_file(out / "model.safetensors")) == 4
    for name in ("notes.tmp", "model.safetensors", "optimizer.safetensors.tmp"):
        other = tmp_path / f"other-{name}"
        other.mkdir()
        (other / name).write_text("mine")
        with pytest.raises(overspill.CheckpointError, match="not empty"):
            _core.merge(str(checkpoint), str(other), "fp32")
        assert (other / name).read_text() == "mine"
