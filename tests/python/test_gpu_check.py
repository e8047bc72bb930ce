"""tools/gpu/check.py: no row is ok that has not been shown; what a call has shown is kept, whatever ends it. On a
machine without a GPU every row that needs one says so."""

import importlib.util
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def module(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tools/gpu/{name}.py")
    found = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(found)
    return found


rows, tasks, check = module("rows"), module("tasks"), module("check")

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
    row = rows.judge_gtest("row", code, text)
    assert row.status == status
    assert reason in row.reason


def test_a_benchmark_is_ok_only_with_a_result():
    assert rows.judge_bench("row", 0, 'x\nRESULT {"a": 1}\n').result == {"a": 1}
    assert rows.judge_bench("row", 0, "nothing").status == "failed"
    assert rows.judge_bench("row", 1, 'RESULT {"a": 1}').status == "failed"
    row = rows.judge_bench("row", 3, "bench_cuda_copy: no CUDA device")
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
    row = rows.judge_pytest("row", code, text)
    assert row.status == status
    assert reason in row.reason


def test_what_was_measured_is_kept_beside_what_failed():
    text = 'RESULT {"rows": [1]}\nRESULT {"rows": [1, 2], "failures": {"7b default": "out of memory"}}\n'
    row = rows.judge_bench("row", 1, text)
    assert (row.status, row.reason, row.result["rows"]) == ("failed", "7b default: out of memory", [1, 2])
    row = rows.judge_bench("row", 124, 'RESULT {"rows": [1], "failures": {}}\nstep\nended after 9 s')
    assert row.status == "failed" and "ended after 9 s" in row.reason and row.result["rows"] == [1]


def test_a_sanitizer_that_is_kept_from_the_device_has_not_run():
    text = "========= Error: Device not supported. Please refer to the documentation\n"
    assert rows.judge_sanitizer("row", 1, text).status == "not run"
    assert rows.judge_sanitizer("row", 1, "========= Invalid __global__ write").status == "failed"
    assert rows.judge_sanitizer("row", 0, PASSED).status == "ok"


def test_an_update_is_judged_by_the_best_of_its_rounds():
    asked = ["go 2 1", "limit 64 2 1", "limit 1024 2 1", "go 4 1", "limit 64 4 1", "limit 1024 4 1"]
    seconds = [1.0, 0.9, 0.7, 0.6, 0.5, 0.4, 0.8, 0.9, 0.9, 0.5, 0.6, 0.6]
    text = '{"isa":"avx512"}\n' + "\n".join(json.dumps({"seconds": each}) for each in seconds)
    found = rows.judge_update("row", 0, text, asked, 100).result["updates"]
    assert found == [
        {"threads": 2, "bytes_per_second": 3250, "limit_bytes_per_second": 3714, "of_the_limit": 0.875},
        {"threads": 4, "bytes_per_second": 5200, "limit_bytes_per_second": 6500, "of_the_limit": 0.8},
    ]
    assert rows.judge_update("row", 1, text, asked, 100).status == "failed"
    assert rows.judge_update("row", 0, text.rpartition("\n")[0], asked, 100).status == "failed"


def test_copies_lie_under_compute_or_the_row_has_failed():
    def judged(overlap, code=0):
        text = "RESULT " + json.dumps({"overlap": overlap})
        return rows.judge_overlap("row", rows.judge_bench("bench", code, text))

    assert judged({"1b 4096": {"up_under_compute": 0.9}}).status == "ok"
    assert judged({"1b 4096": {"up_under_compute": 0.0}}).status == "failed"
    assert judged({}).status == "failed"
    no_gpu = rows.judge_bench("bench", 3, "no GPU")
    assert rows.judge_overlap("row", no_gpu).status == "not run"


def arguments(tmp_path, *more):
    build = ROOT / "build/release"
    if not (build / "tests/kernels/kernels_cuda_test").is_file():
        pytest.skip("build/release has no kernels_cuda_test")
    out = tmp_path / "gpu.json"
    return out, [
        "--no-build",
        "--build",
        str(build),
        "--out",
        str(out),
        "--bundle",
        str(tmp_path / "none"),
        *more,
    ]


@pytest.fixture
def with_cuda():
    if not (ROOT / "build/release/bench/bench_cuda_copy").is_file():
        pytest.skip("build/release was made without the CUDA toolkit, so it has no bench_cuda_copy")


def test_without_a_gpu_every_row_that_needs_one_says_so(with_cuda, tmp_path):
    if subprocess.run(["bash", "-c", "nvidia-smi -L | grep -q GPU"], capture_output=True).returncode == 0:
        pytest.skip("there is a GPU")
    out, given = arguments(tmp_path)
    assert check.main(given) == 0
    written = json.loads(out.read_text())
    assert written["machine"]["gpus"] == []
    found = {row["name"]: row for row in written["rows"]}
    assert list(found) == [task.name for task in check.TASKS[1:]]
    without = {"programs find their libraries", "smoke on the CPU"}
    assert {name for name, row in found.items() if row["status"] == "ok"} == without
    assert {row["status"] for name, row in found.items() if name not in without} == {"not run"}
    assert all(row["reason"] for row in found.values())
    assert "CUDA" in found["device conformance"]["reason"]
    # One row again: the others stay.
    assert check.main([*given, "--only", "Kernels"]) == 0
    again = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(again) == list(found)
    assert [again[n] == found[n] for n in found if "kernels" not in n] == [True] * (len(found) - 1)


def test_a_call_has_its_rows_and_ends_within_its_minutes(with_cuda, tmp_path, monkeypatch):
    out, given = arguments(tmp_path, "--call", "1")
    assert check.main(given) == 0
    before = json.loads(out.read_text())["rows"]
    assert {row["name"] for row in before} == {task.name for task in check.TASKS if task.call == 1}
    # All minutes are over from the first row on: none is begun, and what there was stays.
    monkeypatch.setattr(check, "RESERVE_S", 3600)
    assert check.main([*given, "--minutes", "9"]) == 0
    assert json.loads(out.read_text())["rows"] == before
    fresh = tmp_path / "fresh.json"
    assert check.main([*given, "--minutes", "9", "--out", str(fresh)]) == 0
    reasons = {row["reason"] for row in json.loads(fresh.read_text())["rows"]}
    assert reasons == {"the 9 minutes were over"}


def test_a_program_does_not_outlast_the_minutes(tmp_path):
    _, given = arguments(tmp_path)
    made = check.Check(check.parsed([*given, "--minutes", "0.27"]))  # 15 s are kept for the end
    # Nor does what it has started, which holds the other end of its pipe.
    code, text = made.run(["bash", "-c", "echo begun; sleep 60 & sleep 60"], 300)
    assert code == 124 and "begun" in text and "ended after 1 s" in text


def test_rows_that_measure_nothing_run_beside_each_other(tmp_path, monkeypatch):
    out, given = arguments(tmp_path)
    both = threading.Barrier(2, timeout=30)

    def meets(self, task):
        both.wait()
        return check.Row(task.name, "ok")

    def alone(self, task):
        assert both.n_waiting == 0 and self.rows.keys() == {"first", "second"}
        return check.Row(task.name, "ok")

    both_tasks = [check.Task(name, 1, meets, beside=True) for name in ("first", "second")]
    monkeypatch.setattr(check, "TASKS", (*both_tasks, check.Task("third", 1, alone)))
    assert check.main([*given, "--at-once", "2"]) == 0
    # In the order of the tasks, whichever ended first.
    assert [row["name"] for row in json.loads(out.read_text())["rows"]] == ["first", "second", "third"]


def test_all_that_programs_said_is_kept(tmp_path):
    out, given = arguments(tmp_path)
    out.parent.mkdir(exist_ok=True)
    made = check.Check(check.parsed(given))
    made.run(["bash", "-c", "echo a line; echo $MORE; exit 7"], 300, MORE="from the environment")
    text = out.with_suffix(".log").read_text()
    assert "a line\nfrom the environment\n\nexit status 7\n" in text


def test_each_row_is_written_when_it_is_there(tmp_path, monkeypatch):
    out, given = arguments(tmp_path, "--call", "2")

    def strike(self, task):
        raise KeyboardInterrupt

    first, second, *_ = [task for task in check.TASKS if task.call == 2]
    monkeypatch.setattr(check, "TASKS", (first, check.Task(second.name, 2, strike)))
    with pytest.raises(KeyboardInterrupt):
        check.main(given)
    assert [row["name"] for row in json.loads(out.read_text())["rows"]] == [first.name]


def test_what_a_call_brings_back_is_kept(tmp_path, capsys):
    brought, bundle, out = tmp_path / "brought", tmp_path / "bundle", tmp_path / "results/gpu.json"
    (brought / "core").mkdir(parents=True)
    bundle.mkdir()
    (brought / "core/digest").write_text("abc\n")
    first = {"name": "a", "status": "ok", "reason": "", "seconds": 1.0, "result": None}
    given = ["--take", str(brought), "--bundle", str(bundle), "--out", str(out)]
    with pytest.raises(SystemExit, match=r"has no gpu\.json"):
        check.main(given)
    for name in ("a", "b"):
        (brought / "gpu.json").write_text(
            json.dumps({"machine": {"gpus": ["H"]}, "rows": [first | {"name": name}]})
        )
        assert check.main(given) == 0
    assert [row["name"] for row in json.loads(out.read_text())["rows"]] == ["a", "b"]
    assert (bundle / "core/digest").read_text() == "abc\n"
    assert "1 rows" in capsys.readouterr().out


def test_core_of_other_sources_is_not_used(tmp_path, monkeypatch):
    _, given = arguments(tmp_path)
    (tmp_path / "none/core").mkdir(parents=True)
    (tmp_path / "none/core/_core.so").write_text("")
    made = check.Check(check.parsed([*given, "--build", str(tmp_path / "build")]))
    ran = []
    monkeypatch.setattr(made, "run", lambda command, timeout: ran.append(command) or (1, "no cmake"))
    (tmp_path / "none/core/digest").write_text("other\n")
    assert check.build(made, check.TASKS[0]).status == "failed" and ran
    ran.clear()
    (tmp_path / "none/core/digest").write_text(tasks.digest_of_sources())
    assert check.build(made, check.TASKS[0]).status == "ok" and not ran
    assert (tmp_path / "build/bindings/_core.so").is_file()


def test_the_calls_are_listed_with_what_they_need(capsys):
    assert check.main(["--calls"]) == 0
    text = capsys.readouterr().out
    for call in range(1, 5):
        assert f"tools/gpu-check --call {call} --minutes 9 --out $OUT/gpu.json" in text
    assert all(task.name in text for task in check.TASKS)
