"""What a build asks for and says, by CMake's configuration alone: nothing is compiled."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("ninja") is None, reason="needs cmake and ninja"
)


def configure(folder, *definitions):
    """CMake's output, and the files that the build's target `_core` compiles."""
    pybind11 = subprocess.check_output([sys.executable, "-m", "pybind11", "--cmakedir"], text=True).strip()
    query = folder / ".cmake/api/v1/query"
    query.mkdir(parents=True)
    (query / "codemodel-v2").touch()
    command = ["cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja"]
    command += [f"-Dpybind11_DIR={pybind11}", f"-DPython_EXECUTABLE={sys.executable}"]
    done = subprocess.run([*command, *(f"-D{d}" for d in definitions)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reply = folder / ".cmake/api/v1/reply"
    (index,) = reply.glob("codemodel-v2-*.json")
    targets = json.loads(index.read_text())["configurations"][0]["targets"]
    return done.stdout + done.stderr, {
        t["name"]: json.loads((reply / t["jsonFile"]).read_text()) for t in targets
    }


def test_by_default_a_build_is_the_extension_and_what_it_links(tmp_path):
    _, targets = configure(tmp_path, "CMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON")
    libraries = {f"overspill_{name}" for name in ("engine", "inference", "io", "optim", "kernels", "cuda")}
    assert targets.keys() == {"_core", *libraries}
    flags = [
        f["fragment"]
        for t in targets.values()
        for g in t["compileGroups"]
        for f in g["compileCommandFragments"]
    ]
    assert flags and not any("-Werror" in flag for flag in flags)


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_machine_with_a_gpu_and_no_toolkit_is_told_what_to_install(tmp_path, gpus):
    (tmp_path / "driver/gpus").mkdir(parents=True)
    if gpus:
        (tmp_path / "driver/gpus/0000:01:00.0").mkdir()
    said, _ = configure(
        tmp_path / "build",
        "CMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON",
        f"OVERSPILL_NVIDIA_PROC={tmp_path / 'driver'}",
        "OVERSPILL_NVIDIA_SMI=FALSE",
    )
    words = " ".join(said.split())
    told = "This machine has an NVIDIA GPU, and this build of Overspill cannot use it" in words
    assert told == bool(gpus)
    if told:
        assert "Install the CUDA toolkit, 12 or newer" in words
    else:
        assert "no CUDA toolkit 12 or newer was found" in words
