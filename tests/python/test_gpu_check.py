"""tools/gpu_check.py: no row is ok that has not been shown. On a machine without a GPU every row says why."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "tools/gpu_check.py")
gpu_check = importlib.util.module_from_spec(spec)
sys.modules["gpu_check"] = gpu_check  # dataclasses look their module up
spec.loader.exec_module(gpu_check)

PASSED = "[  PASSED  ] 2 tests.\n[==========] 2 tests from 1 test suite ran. (3 ms total)\n"
SKIPPED = """x.cc:49: Skipped
no CUDA device: no driver
[  SKIPPED ] Cuda.A (0 ms)
[==========] 2 tests from 1 test suite ran. (0 ms total)
[  PASSED  ] 1 test.
[  SKIPPED ] 1 test, listed below:
[  SKIPPED ] Cuda.A
"""


@pytest.mark.parametrize(
    ("code", "text", "status", "reason"),
    [
        (0, PASSED, "ok", "2 tests"),
        (0, SKIPPED, "not run", "1 of 2 tests were skipped: no CUDA device: no driver"),
        (1, PASSED, "failed", "2 tests from"),
        (0, "[==========] 0 tests from 0 test suites ran. (0 ms total)\n", "failed", "no test ran"),
        (0, "", "failed", "no test ran"),
        (124, "hung\nended after 5 s", "failed", "ended after 5 s"),
    ],
)
def test_a_row_is_ok_only_where_tests_ran_and_none_was_skipped(code, text, status, reason):
    row = gpu_check.judge_gtest("row", code, text)
    assert row.status == status
    assert reason in row.reason


def test_a_benchmark_is_ok_only_with_a_result():
    assert gpu_check.judge_bench("row", 0, 'x\nRESULT {"a": 1}\n').result == {"a": 1}
    assert gpu_check.judge_bench("row", 0, "nothing").status == "failed"
    assert gpu_check.judge_bench("row", 1, 'RESULT {"a": 1}').status == "failed"
    row = gpu_check.judge_bench("row", 3, "bench_cuda_copy: no CUDA device")
    assert (row.status, row.reason) == ("not run", "bench_cuda_copy: no CUDA device")


@pytest.mark.parametrize(
    ("code", "text", "status", "reason"),
    [
        (0, "24 passed, 1 warning in 7.07s", "ok", "24 tests"),
        (
            0,
            "SKIPPED [2] a.py:9: no transformers\n3 passed, 2 skipped in 1s",
            "not run",
            "2 of 5 tests were skipped: no tran",
        ),
        (1, "FAILED a.py::test_b - wrong\n1 failed, 3 passed in 1s", "failed", "FAILED a.py::test_b"),
        (0, "2 skipped in 1s", "failed", "2 skipped"),
        (5, "no tests ran in 0.01s", "failed", "no tests ran"),
        (124, "ended after 5 s", "failed", "ended after 5 s"),
    ],
)
def test_a_row_of_python_is_ok_only_where_tests_ran_and_none_was_skipped(code, text, status, reason):
    row = gpu_check.judge_pytest("row", code, text)
    assert row.status == status
    assert reason in row.reason


def test_copies_lie_under_compute_or_the_row_has_failed():
    def judged(overlap, code=0):
        return gpu_check.judge_overlap("row", code, "RESULT " + json.dumps({"overlap": overlap}))

    assert judged({"1b 4096": {"up_under_compute": 0.9}}).status == "ok"
    assert judged({"1b 4096": {"up_under_compute": 0.0}}).status == "failed"
    assert judged({}).status == "failed"
    assert judged({}, 3).status == "not run"


def test_without_a_gpu_every_row_says_why(tmp_path):
    if subprocess.run(["bash", "-c", "nvidia-smi -L | grep -q GPU"], capture_output=True).returncode == 0:
        pytest.skip("there is a GPU")
    build = ROOT / "build/release"
    if not (build / "tests/kernels/kernels_cuda_test").is_file():
        pytest.skip("build/release has no kernels_cuda_test")
    out = tmp_path / "gpu.json"
    assert gpu_check.main(["--no-build", "--build", str(build), "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert written["machine"]["gpus"] == []
    rows = {row["name"]: row for row in written["rows"]}
    assert len(rows) == len(written["rows"]) >= 13
    assert {row["status"] for row in rows.values()} == {"not run"}
    assert all(row["reason"] for row in rows.values())
    assert "CUDA" in rows["device conformance"]["reason"]
    # One row again: the others stay.
    arguments = ["--no-build", "--build", str(build), "--out", str(out), "--only", "Kernels"]
    assert gpu_check.main(arguments) == 0
    again = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in again] == list(rows)
    assert [row["seconds"] for row in again if "kernels" not in row["name"]] == [
        row["seconds"] for row in rows.values() if "kernels" not in row["name"]
    ]
