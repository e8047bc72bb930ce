"""What conftest.py gives every test."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LEAK = """
import torch

def test_leaves_it():
    {leaves}

def test_next():
    assert torch.is_grad_enabled()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch._C._len_torch_function_stack() == 0
"""


@pytest.mark.parametrize(
    "leaves, said",
    [
        ("torch.set_grad_enabled(False)", "left torch's grad mode off"),
        (
            "torch.autograd.graph.saved_tensors_hooks(str, float).__enter__()",
            "left the hook of saved tensors <class 'str'> on",
        ),
        (
            "torch.overrides.BaseTorchFunctionMode().__enter__()",
            "left the function mode BaseTorchFunctionMode on",
        ),
    ],
)
def test_the_test_that_leaves_torch_changed_is_named_and_no_other_suffers(leaves, said, tmp_path):
    (tmp_path / "test_leak.py").write_text(LEAK.format(leaves=leaves))
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "test_leak.py"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert "ERROR test_leak.py::test_leaves_it" in done.stdout, done.stdout + done.stderr
    assert said in done.stdout and "2 passed, 1 error" in done.stdout
