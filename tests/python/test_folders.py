"""tools/folders.py: folders of the engine that include one another in a circle are named."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools/folders.py"


@pytest.fixture
def run(tmp_path):
    def run(*root):
        return subprocess.run(
            [sys.executable, TOOL, "--root", *(root or [tmp_path])], capture_output=True, text=True
        )

    def write(name, *includes):
        path = tmp_path / "engine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f'#include "{include}"\n' for include in includes))

    run.write = write
    return run


def test_the_engine_has_no_cycle(run):
    found = run(ROOT)
    assert found.returncode == 0 and "no cycle" in found.stdout


def test_a_cycle_is_named_along_its_way(run):
    run.write("a/one.h", "engine/b/two.h", "engine/a/other.h", "io/store.h")
    run.write("b/two.cc", "engine/c/three.h")
    assert run().returncode == 0
    run.write("c/three.h", "engine/a/one.h")
    found = run()
    assert found.returncode == 1
    assert "engine/a -> engine/b -> engine/c -> engine/a" in found.stdout
