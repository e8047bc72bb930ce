"""The engine under PyTorch on an accelerator, the one that is made for tests: in processes of their own, as torch
starts autograd's thread for a device only if it knows it before the first backward."""

import json
import re
import subprocess
import sys

import launch
import pytest
import torch
from launch import HERE, environment

ROOT = HERE.parents[1]


@pytest.fixture(autouse=True)
def is_built_for_this_torch():
    """It is compiled against one PyTorch, whose C++ interface others do not keep."""
    if not list(ROOT.glob("build/release/tests/bindings/_torch_accelerator*.so")):
        pytest.skip("tests/bindings/torch_accelerator.cc was not built")
    pinned = re.search(r"^torch==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)[1]
    if torch.__version__.partition("+")[0] != pinned:
        pytest.skip(
            f"tests/bindings/torch_accelerator.cc was built for torch {pinned}, this is {torch.__version__}"
        )


PARTS = {
    "fp32": ("on_accelerator.py", "bit_equal and fp32"),
    "bf16": ("on_accelerator.py", "bit_equal and bf16"),
    "rest": ("on_accelerator.py", "not bit_equal"),
    "plans": ("on_accelerator_plans.py", ""),
    "fp16": ("on_accelerator_fp16.py", ""),
}


@pytest.mark.parametrize(
    "part", ["fp32", "rest", "plans", "fp16", pytest.param("bf16", marks=pytest.mark.long)]
)
def test_on_the_accelerator_for_tests(part):
    file, chosen = PARTS[part]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / file)]
    ended = subprocess.run(
        [*command, "-k", chosen],
        env=environment(OVERSPILL_DEVICE="simulated"),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
    assert " passed" in ended.stdout and " skipped" not in ended.stdout


def test_ranks_with_an_accelerator_each(tmp_path):
    """Two ranks: the same weights on both, and the same losses at every stage."""
    by_stage = {}
    for stage, accumulation in [(3, 1), (2, 1), (1, 1), (3, 2), (2, 2)]:
        ended = launch.run(2, "accelerator_ranks_job.py", tmp_path, stage, accumulation)
        said = [json.loads(process.out.splitlines()[-1]) for process in ended]
        assert said[0]["weights"] == said[1]["weights"] and said[0]["norm"] == said[1]["norm"]
        assert said[0]["losses"] != said[1]["losses"], "each has rows of its own"
        by_stage.setdefault(accumulation, []).append(said)
    for same in by_stage.values():
        assert all(said == same[0] for said in same)
