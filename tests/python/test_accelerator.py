"""The engine under PyTorch on an accelerator, the one that is made for tests: in processes of their own, as torch
starts autograd's thread for a device only if it knows it before the first backward."""

import subprocess
import sys

import pytest
from launch import HERE, environment

PARTS = {
    "fp32": "bit_equal and fp32",
    "bf16": "bit_equal and bf16",
    "rest": "not bit_equal",
}


@pytest.mark.parametrize("part", PARTS)
def test_on_the_accelerator_for_tests(part):
    if not list(HERE.parents[1].glob("build/release/tests/bindings/_torch_accelerator*.so")):
        pytest.skip("tests/bindings/torch_accelerator.cc was not built")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(HERE / "on_accelerator.py"),
    ]
    ended = subprocess.run(
        [*command, "-k", PARTS[part]],
        env=environment(OVERSPILL_DEVICE="simulated"),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
    assert " passed" in ended.stdout and " skipped" not in ended.stdout
