"""Signals to a run, also to one that hangs with its disk: it saves, or ends at once, and says which."""

import contextlib
import os
import re
import signal
import subprocess
import sys

import pytest
import tiny

pytest_plugins = "command_scene"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_go_on(number, bench, spilling, finished, capsys, tmp_path):
    out = tmp_path / "out"
    process = bench.start(bench.train_args(out, accumulate=2, clip=0.5, **spilling))
    tiny.wait_for_step(process, out, 2)
    process.send_signal(number)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 128 + number, err
    assert f"go on with: overspill train --out {out} --resume (" in err and "Traceback" not in err
    assert re.search(r"--resume \(going on with --resume needs no more of the disk: .* [\d.]+ MiB ", err), err
    assert 2 <= len(tiny.log(out)) < 8, "the signal came too late to show anything"
    bench.ok(capsys, "train", "--out", out, "--resume")
    assert tiny.losses(out) == tiny.losses(finished)


def test_vertical_accumulation_goes_on_bit_equal_after_a_signal(bench, spilling, capsys, tmp_path):
    options = {"accumulate": 3, "vertical": True, "steps": 4, "eval_batches": 0} | spilling
    straight, out = tmp_path / "straight", tmp_path / "out"
    bench.ok(capsys, *bench.train_args(straight, **options))
    process = bench.start(bench.train_args(out, **options))
    tiny.wait_for_step(process, out, 1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGINT, err
    assert "Traceback" not in err
    bench.ok(capsys, "train", "--out", out, "--resume")
    assert tiny.losses(out) == tiny.losses(straight)


HANGING = """
import ctypes, sys
from overspill.cli.loop import Stop

libc = ctypes.CDLL(None)
lock = ctypes.create_string_buffer(64)
with Stop(lambda: HANGS).listening():
    print("listening", flush=True)
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)  # without the GIL, for ever, whatever signals come: as a disk that hangs
"""


def _hanging(bench, hangs: str, stderr: int = subprocess.PIPE) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING.replace("HANGS", repr(hangs))],
        env=bench.env,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )
    assert process.stdout.readline() == "listening\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_ends_a_run_on_a_disk_that_is_known_to_hang(bench, number):
    process = _hanging(bench, "/mnt/a has not answered for 12 s")
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "/mnt/a has not answered for 12 s" in err and "checkpoints are as they were" in err


COMMAND_THAT_HANGS = """
import ctypes, sys
from overspill import _core
from overspill.cli import parser, train

def hang(loop):
    print("hanging", flush=True)
    lock = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(lock)

_core.Engine.stall = lambda engine: "/mnt/a has not answered for 12 s"
train.train(parser().parse_args(sys.argv[1:]), hang)
"""


def test_one_signal_ends_the_command_where_its_store_says_that_a_disk_hangs(bench, spilling, tmp_path):
    """The tests above have a Stop of their own: whether the command gives its own one the store's word is here."""
    arguments = bench.train_args(tmp_path / "out", eval_batches=0, **spilling)
    process = bench.start(arguments, ["-c", COMMAND_THAT_HANGS])
    try:
        assert "hanging\n" in process.stdout
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "/mnt/a has not answered for 12 s; checkpoints are as they were" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_run_that_hangs(number, bench):
    process = _hanging(bench, "")
    process.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1.5)  # the first asks, and the step in hand is finished
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "a second signal stops at once" in err and "stopped while waiting" in err


@pytest.mark.parametrize("hangs", ["", "/mnt/a has not answered for 12 s"])
def test_a_stderr_that_takes_nothing_keeps_no_run_that_hangs(hangs, bench):
    """As a pipe whose reader stands still, or a terminal after Ctrl-S."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"." * 4096)
    os.set_blocking(writer, True)
    process = _hanging(bench, hangs, writer)
    try:
        process.send_signal(signal.SIGINT)
        if not hangs:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=1.5)
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 128 + signal.SIGINT
    finally:
        process.kill()
        process.communicate()
        os.close(reader)
        os.close(writer)


def test_sigterm_sent_twice_at_once_is_one_request(bench, spilling, tmp_path):
    """As launchers do, to the process and to its group: the step in hand is still finished and saved."""
    process = bench.start(bench.train_args(tmp_path / "out", accumulate=2, steps=50, **spilling))
    tiny.wait_for_step(process, tmp_path / "out", 1)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGTERM and "; saved " in err, err
