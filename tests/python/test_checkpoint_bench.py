"""bench/checkpoint: its parts work on a small model, and what it counts and reads is what is there."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launch import HANGS, environment

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench/checkpoint"))

import disk_speed
import places

RUN = Path(places.__file__).with_name("run.py")
SMALL = ["--size", "tiny", "--two-disks-size", "tiny", "--merge-sizes", "tiny", "--rounds", "1"]
SMALL += ["--copy-rounds", "1", "--merge-rounds", "1", "--steps", "3", "--every", "2"]


def start(folder, *arguments):
    command = [sys.executable, str(RUN), *SMALL, "--folder", str(folder), *arguments]
    return subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def result(folder, *arguments):
    process = start(folder, *arguments)
    out, err = process.communicate(timeout=2 * HANGS)
    assert process.returncode == 0, out + err
    assert not list(folder.iterdir()), "it leaves nothing"
    return json.loads(out.splitlines()[-1].removeprefix("RESULT "))


def test_training_goes_on_beside_saves(tmp_path):
    found = result(tmp_path, "--parts", "stall,copy")
    assert found["bytes_copied_same_disk"] == 0, "states on the checkpoint's own disk are linked"
    assert found["bytes_of_states"] >= 10 * found["parameters"]
    assert found["step_while_copying_to_memory_bytes"] >= found["bytes_of_states"]
    for key in ("stall_vs_step", "longest_without_saves_vs_step", "step_while_copying_to_memory_vs_step"):
        lower, upper = found[f"{key}_quartiles"]
        assert lower <= found[key] <= upper
    assert found["stall_vs_step"] <= found["stall_worst_vs_step"] + 0.001, "one has fewer digits"
    assert found["failed"] == {}


@pytest.mark.long
def test_files_are_restored_and_merged(tmp_path):
    found = result(tmp_path, "--parts", "restore,merge")
    assert found["restore_bytes"] >= 10 * found["parameters"]
    assert found["restore_vs_fio"] > 0 and found["restore_linked_vs_fio"] > 0
    assert found["restore_vs_fio_into_new_memory"] > 0
    assert found["merge_bytes"] == 2 * found["merge_parameters"]
    assert found["merge_largest_tensor_bytes"] == 50304 * 128 * 2, "the embedding in bf16"
    assert found["merge_peak_bytes"] > 0 and found["failed"] == {}


def test_others_saves_take_turns_and_what_is_missing_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PEERS_VENV", str(tmp_path / "none"))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    found = result(scratch, "--parts", "deepspeed,dcp")
    assert "DeepSpeed is not in" in found["skipped"]["merge_vs_zero_to_fp32"]
    assert found["save_vs_dcp"] > 0 and found["return_vs_dcp"] > 0
    assert found["dcp_bytes"] >= 12 * found["parameters"]


def test_ctrl_c_leaves_nothing(tmp_path):
    process = start(tmp_path, "--parts", "stall")
    while process.stdout.readline().strip() != "stall":
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=HANGS)
    assert process.returncode == 130 and "what it made is removed" in err
    assert not list(tmp_path.iterdir())


def test_an_unknown_part_is_refused(tmp_path):
    process = start(tmp_path, "--parts", "stall,stale")
    _, err = process.communicate(timeout=HANGS)
    assert process.returncode == 2 and "'stale' is none of two-disks,stall," in err


def test_copied_bytes_are_those_of_files_that_are_no_links(tmp_path):
    for name, size in (
        ("slab-0.bin", 9),
        ("extents-job-0.bin", 5),
        ("rank1-resident.bin", 3),
        ("index.bin", 7),
    ):
        (tmp_path / name).write_bytes(bytes(size))
    assert places.copied_bytes(tmp_path) == 8


def test_without_fio_a_reader_of_our_own_reads_all(tmp_path, monkeypatch):
    try:
        os.close(os.open(tmp_path / "probe", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"no O_DIRECT in the folder of tests: {error.strerror}")
    monkeypatch.setattr(disk_speed.shutil, "which", lambda name: None)
    sizes = [disk_speed.BLOCK * 2, disk_speed.BLOCK + 8192]
    files = [tmp_path / f"{number}.bin" for number in range(len(sizes))]
    for path, size in zip(files, sizes, strict=True):
        path.write_bytes(bytes(size))
    moved = disk_speed.read(files)
    assert (moved.read, moved.written) == (sum(sizes), 0) and moved.seconds > 0
    moved = disk_speed.read_and_write(files, tmp_path / "written")
    assert (moved.read, moved.written) == (sum(sizes), disk_speed.BLOCK * 3)
    assert not (tmp_path / "written").exists()
    assert "no fio" in disk_speed.name()
