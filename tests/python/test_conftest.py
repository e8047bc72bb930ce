"""What conftest.py gives every test."""

import os
import subprocess
import sys
from pathlib import Path

LEAK = """
import torch

def test_leaves_it_off():
    torch.set_grad_enabled(False)

def test_next():
    assert torch.is_grad_enabled()
"""


def test_the_test_that_leaves_the_grad_mode_off_is_named_and_no_other_suffers(tmp_path):
    (tmp_path / "test_leak.py").write_text(LEAK)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "test_leak.py"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert "ERROR test_leak.py::test_leaves_it_off" in done.stdout, done.stdout + done.stderr
    assert "left torch's grad mode off" in done.stdout and "2 passed, 1 error" in done.stdout
