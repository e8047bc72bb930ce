"""What an editor and a type checker see: stubs are those of the module, and the public surface, the examples and the
README's scripts pass mypy in strict mode."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_documents import blocks

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))


def checked(*arguments) -> str:
    """What mypy says, "" where it is content."""
    pytest.importorskip("mypy", reason="mypy is not installed: requirements-dev.txt has it")
    command = [sys.executable, "-m", "mypy", *map(str, arguments)]
    env = {**os.environ, "MYPYPATH": str(ROOT / "bindings")}
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    return "" if ended.returncode == 0 else ended.stdout + ended.stderr


def test_the_stubs_are_those_of_the_module(tmp_path, monkeypatch):
    import stubs

    pytest.importorskip(
        "pybind11_stubgen", reason="pybind11-stubgen is not installed: requirements-dev.txt has it"
    )
    made = stubs.made()
    assert {path.name: path.read_text() for path in stubs.STUBS.glob("*.pyi")} == made
    assert "def merge(" in made["__init__.pyi"] and "class Executor" in made["optim.pyi"]
    monkeypatch.setattr(stubs, "STUBS", tmp_path)  # where they are missing, so that they drift
    monkeypatch.setattr(sys, "argv", ["stubs.py", "--check"])
    assert stubs.main() == 1


def test_the_package_says_that_it_has_types():
    assert (ROOT / "bindings/overspill/py.typed").exists()


def test_the_public_surface_the_examples_and_the_readmes_scripts_are_strict(tmp_path):
    """One test, since mypy's first run reads all of torch and transformers, and those after it its cache."""
    options = ("--config-file", "tools/mypy.ini", "--cache-dir", tmp_path / "cache")
    said = checked(*options)
    assert not said, said
    scripts = []
    for number, block in enumerate(blocks("README.md", "python")):
        scripts.append(tmp_path / f"block_{number}.py")
        scripts[-1].write_text(block.replace("data = ...", "import typing\ndata: typing.Any = ..."))
    said = checked(*options, *scripts)
    assert scripts and not said, said
    scripts[0].write_text(scripts[0].read_text() + "\nengine.plan.units[0].no_such_name\n")
    assert '"Unit" has no attribute "no_such_name"' in checked(*options, *scripts)
