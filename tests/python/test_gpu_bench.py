"""bench/gpu: what it measures on a GPU works elsewhere too, on a model that is small."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launch import environment

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "bench/gpu/run.py"
spec = importlib.util.spec_from_file_location("overlap", ROOT / "bench/gpu/overlap.py")
overlap = importlib.util.module_from_spec(spec)
spec.loader.exec_module(overlap)


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(RUN), *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_on_the_cpu(tmp_path):
    options = [
        "--device",
        "host",
        "--models",
        "tiny",
        "--tokens",
        "64",
        "128",
        "--rounds",
        "2",
        "--steps",
        "2",
    ]
    ended = run(*options, "--host-budget", "1GiB", "--trace", tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(ended.stdout.splitlines()[-1].removeprefix("RESULT "))
    counts = [len(json.loads(r)["rows"]) for r in re.findall(r"^RESULT (.+)", ended.stdout, re.MULTILINE)]
    assert counts == [*range(1, 11), 10], "each row is told when it is there"
    rows = {(row["mode"], row["tokens"]): row for row in result["rows"]}
    modes = ("clipped", "clipped-24", "largest-24", "speculative", "default")
    assert set(rows) == {(mode, tokens) for mode in modes for tokens in (64, 128)}
    for row in rows.values():
        assert row["of_the_ceiling"] == pytest.approx(
            row["plain_seconds"] / row["seconds"], rel=0.05, abs=0.005
        )
        assert row["largest_bound"] in row["bounds_seconds"]
    assert result["failures"] == {}
    assert list(result["left_out"]) == ["deepspeed"], "this environment has none"
    assert list(tmp_path.glob("tiny-clipped-128.json"))


def test_when_its_minutes_are_over_it_begins_nothing():
    ended = run(
        "--device", "host", "--models", "tiny", "--tokens", 64, "--modes", "clipped", "--minutes", 1e-9
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(ended.stdout.splitlines()[-1].removeprefix("RESULT "))
    assert result["rows"] == [] and "minutes were over" in result["left_out"]["tiny"]


def test_without_a_gpu_it_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    ended = run()
    assert ended.returncode == 3
    assert "sees no GPU" in ended.stderr


def test_overlap_is_what_lies_under_compute(tmp_path):
    tracks = {1: "device: copies up", 2: "device: copies down", 3: "device: computes (0)", 4: "caller"}
    spans = [(1, 0, 10), (1, 20, 10), (2, 5, 5), (3, 5, 20), (3, 20, 2), (4, 0, 100)]
    events = [{"ph": "M", "tid": t, "args": {"name": name}} for t, name in tracks.items()]
    events += [{"ph": "X", "tid": t, "ts": ts * 1e6, "dur": dur * 1e6} for t, ts, dur in spans]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert overlap.overlap(path) == {
        "up_seconds": 20,
        "down_seconds": 5,
        "compute_seconds": 20,
        "up_under_compute": 0.5,
        "down_under_compute": 1.0,
    }


def test_the_table_of_what_may_be_reached_is_what_the_planner_says():
    ended = subprocess.run(
        [sys.executable, str(ROOT / "bench/gpu/ceiling.py")],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    table = [line for line in ended.stdout.splitlines() if line.startswith("|")]
    assert len(table) == 10 and "\n".join(table) in (ROOT / "docs/gpus.md").read_text()
    rows = json.loads(ended.stdout.splitlines()[-1].removeprefix("RESULT "))["rows"]
    assert all(0 < row["of_the_ceiling"] < 1 for row in rows)
