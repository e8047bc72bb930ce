"""`overspill top`: what it says of a run that trains, stands still, was killed or has ended, drawn and as JSON."""

import json
import math
import os
import pty
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import tiny

from overspill.cli import display, main, run_lock
from overspill.cli.common import CliError
from overspill.cli.run_lock import Holder, RunLock
from overspill.cli.run_watch import POINTS, STALL_SECONDS, Curve, LogTail, RunWatch
from overspill.cli.top_frame import curve, duration, frame, whole

STEPS = 6


@pytest.fixture(scope="module")
def ended(on_disk):
    out = on_disk.root / "watched"
    assert main([str(a) for a in on_disk.run(out, steps=STEPS, save_every=4, eval_batches=1)]) == 0
    return out


@pytest.fixture
def run(ended, tmp_path):
    """A run that has ended, as its log has it: tests change the files, and take the lock."""
    out = tmp_path / "run"
    out.mkdir()
    for name in ("run.json", "log.jsonl", "lock"):
        shutil.copy(ended / name, out)
    return out


@pytest.fixture
def locked(run):
    lock = RunLock(run)
    yield run
    lock.close()


def change(run, records):
    (run / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def figures(run, later=1.0):
    """So many seconds after the last step."""
    return RunWatch(run, now=lambda: tiny.log(run)[-1]["ended"] + later).figures()


def going_on(run, steps):
    """The process that has the lock makes steps now: the log ends after so many."""
    records = tiny.log(run)[:steps]
    records[-1]["ended"] = time.time() + 1
    change(run, records)


def drawn(found, width=80):
    return frame(found, width).plain.splitlines()


# ---- what it says


def test_figures_are_those_of_the_log(ended, capsys):
    capsys.readouterr()
    assert main(["top", str(ended), "--json"]) == 0
    found, last = json.loads(capsys.readouterr().out), tiny.log(ended)[-1]
    assert found["state"] == "ended" and found["step"] == found["steps"] == STEPS
    for name in ("loss", "lr", "norm", "tokens_per_s", "seconds", "rss_bytes", "wait_by_cause", "ranks"):
        assert found[name] == last[name], name
    assert found["losses"] == pytest.approx(list(tiny.losses(ended).values()))
    assert found["tiers"]["host"]["of_bytes"] == last["host_budget_bytes"] == 64 << 20
    assert found["tiers"]["nvme"]["held_bytes"] == last["nvme_allocated_bytes"] > 0
    assert found["tiers"]["nvme"]["of_bytes"] == last["nvme_reserved_bytes"] >= last["nvme_allocated_bytes"]
    (disk,) = found["disks"]
    paths = [record["nvme_paths"][disk["path"]] for record in tiny.log(ended)]
    assert disk["written_bytes"] == sum(path["written_bytes"] for path in paths) > 0
    assert disk["written_bytes_per_s"] == paths[-1]["written_bytes"] / last["seconds"]
    assert found["checkpoints"]["count"] == 1 and found["checkpoints"]["newest"] == f"step-{STEPS:06}"
    assert found["heldout"].keys() == {"0", str(STEPS)}


@pytest.mark.parametrize("width", [40, 60, 80, 132])
def test_no_line_is_wider_than_the_terminal(ended, width):
    lines = drawn(RunWatch(ended).figures(), width)
    assert max(map(len, lines)) <= width and len(lines) < 40
    assert any(line.startswith(f"step {STEPS}/{STEPS}") for line in lines)


def test_the_words_are_those_of_the_progress_line(ended):
    found, last = RunWatch(ended).figures(), tiny.log(ended)[-1]
    text, line = "\n".join(drawn(found)), display._figures(last)
    words = re.findall(r"(?:^|  )([a-z]+)(?= [0-9.]+)| ([a-z]+/s)", line)
    for word in [a or b for a, b in words]:
        assert re.search(rf"(^|\s){word}\b", text, re.M), word
    assert len(words) >= 9 and f"loss {last['loss']:.4f}" in text and f"loss {last['loss']:.4f}" in line


def test_once_and_no_terminal_print_one_frame_without_commands_for_a_terminal(ended, capsys):
    for arguments in (["--once"], []):
        capsys.readouterr()
        assert main(["top", str(ended), *arguments]) == 0
        out = capsys.readouterr().out
        assert f"step {STEPS}/{STEPS}" in out and "\x1b" not in out


def test_a_terminal_of_ascii_gets_ascii(ended):
    found = RunWatch(ended).figures()
    body = "\n".join(frame(found, 80, ascii_only=True).plain.splitlines()[1:])
    assert body.isascii() and "###" in body


# ---- states


def test_a_run_trains_and_then_stands_still(locked):
    going_on(locked, 4)
    found = figures(locked)
    assert (found["state"], found["stalled_seconds"], found["step"]) == ("training", None, 4)
    durations = [record["seconds"] + record["save_seconds"] for record in tiny.log(locked)]
    assert found["left_seconds"] == pytest.approx(2 * sum(durations) / 4)
    assert "the last step 1 s ago" in drawn(found)[0] and " left" in drawn(found)[1]
    found = figures(locked, later=STALL_SECONDS * 10)
    assert found["stalled_seconds"] == pytest.approx(STALL_SECONDS * 10)
    assert "no step for 1 min 40 s" in drawn(found)[0]


def test_slow_steps_are_no_stall(locked):
    records = [record | {"seconds": 60.0} for record in tiny.log(locked)[:3]]
    records[-1]["ended"] = time.time() + 1
    change(locked, records)
    assert figures(locked, later=200)["stalled_seconds"] is None
    assert figures(locked, later=400)["stalled_seconds"] == pytest.approx(400)


def test_a_run_that_goes_on_is_starting_until_its_first_step(locked):
    records = [record | {"ended": record["ended"] - 86400} for record in tiny.log(locked)[:4]]
    change(locked, records)
    found = RunWatch(locked).figures()
    assert (found["state"], found["stalled_seconds"], found["step"]) == ("starting", None, 4)


def test_a_run_that_begins_has_a_lock_alone(tmp_path):
    lock = RunLock(tmp_path)
    found = RunWatch(tmp_path).figures()
    lock.close()
    assert found["state"] == "starting" and found["loss"] is None
    assert "no step has ended yet" in drawn(found)


def test_the_last_save_is_the_end_of_a_run(locked):
    going_on(locked, STEPS)
    assert figures(locked)["state"] == "finishing"


def test_a_run_that_was_stopped_or_killed(run, monkeypatch):
    change(run, tiny.log(run)[:4])
    assert figures(run)["state"] == "stopped" and "stopped at step 4" in drawn(figures(run))[0]
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()  # its number is free
    (run / "lock").write_text(f"process {process.pid} on {socket.gethostname()}\n{Holder.here().boot}\n")
    assert figures(run, later=3600)["state"] == "killed"
    (run / "lock").write_text(f"process {process.pid} on elsewhere\nanother-boot\n")
    assert figures(run, later=3600)["state"] != "killed", "nobody here knows"


@pytest.mark.parametrize(
    "text", ["", "process x on y\n", "something else", "process 99999999999999999999 on y\n"]
)
def test_odd_locks_are_no_process(run, text):
    boot = Holder.here().boot
    (run / "lock").write_text(text + (boot if text else ""))
    assert figures(run, later=3600)["state"] == "ended"


def test_looking_keeps_no_process_out(locked, monkeypatch):
    monkeypatch.setattr(run_lock.fcntl, "flock", lambda *_: pytest.fail("took the lock"))
    before = (locked / "lock").read_bytes()
    RunWatch(locked).figures()
    assert (locked / "lock").read_bytes() == before


# ---- what is no run, or is damaged


def test_what_is_no_run_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    for name, said in (
        ("file", "is a file"),
        ("none", "does not exist"),
        ("other", "holds no run (no run.json)"),
    ):
        assert main(["top", str(tmp_path / name)]) == 1
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "change_of",
    [
        {"step": "x"},
        {"loss": "x"},
        {"nvme_paths": 3},
        {"nvme_paths": {"a": {}}},
        {"wait_by_cause": {"reads": "x"}},
        {"ended": []},
        {"steps": True},
        {"tokens_per_s": None},
    ],
)
def test_a_damaged_line_is_named(run, change_of):
    records = tiny.log(run)
    change(run, [records[0], records[1] | change_of, records[2]])
    with pytest.raises(CliError, match=r"log.jsonl:2 is damaged: "):
        RunWatch(run).figures()


def test_a_log_of_an_earlier_version_is_shown_as_far_as_it_goes(run):
    new = (
        "steps",
        "ranks",
        "ended",
        "host_budget_bytes",
        "device_bytes",
        "nvme_reserved_bytes",
        "wait_by_cause",
    )
    change(run, [{k: v for k, v in record.items() if k not in new} for record in tiny.log(run)])
    found = RunWatch(run).figures()
    assert found["state"] == "ended" and found["tiers"]["host"]["of_bytes"] is None
    assert any("waited" in line for line in drawn(found))


def test_figures_that_are_not_finite_are_drawn_and_are_null_in_json(run, capsys):
    odd = {"loss": math.nan, "norm": math.inf, "skipped": True, "seconds": math.inf}
    change(run, [record | odd for record in tiny.log(run)])
    assert "SKIPPED" in "\n".join(drawn(RunWatch(run).figures()))
    capsys.readouterr()
    assert main(["top", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["loss"] is None and found["losses"] == [None] * STEPS


def test_a_text_in_the_log_commands_no_terminal(run):
    records = tiny.log(run)
    moved = {"read_bytes": 1, "written_bytes": 1}
    change(
        run,
        [r | {"nvme_paths": {"\x1b[31m[red]/x": moved}, "wait_by_cause": {"\x1b[2J": 9.0}} for r in records],
    )
    text = "\n".join(drawn(RunWatch(run).figures()))
    assert "\x1b" not in text and "[red]/x" in text


# ---- parts


def test_the_log_is_read_as_it_grows(run):
    lines = (run / "log.jsonl").read_bytes().splitlines(keepends=True)
    log = run / "log.jsonl"
    log.write_bytes(lines[0])
    tail = LogTail(log)
    tail.read()
    assert tail.last["step"] == 1
    with log.open("ab") as file:
        file.write(lines[1] + lines[2][:40])
    tail.read()
    assert tail.last["step"] == 2
    with log.open("ab") as file:
        file.write(lines[2][40:])
    tail.read()
    assert tail.last["step"] == 3 and len(tail.losses.values()) == 3
    other = log.with_name("other")
    other.write_bytes(lines[0] + lines[1])
    other.replace(log)  # as a rewind does
    tail.read()
    assert tail.last["step"] == 2 and len(tail.losses.values()) == 2
    other.write_bytes(b"".join(lines[1:]))
    other.replace(log)  # longer than what was read
    tail.read()
    assert tail.last["step"] == STEPS and len(tail.losses.values()) == STEPS - 1
    log.unlink()
    tail.read()
    assert tail.last["step"] == STEPS


@pytest.mark.parametrize("count", [0, 1, POINTS - 1, POINTS, POINTS + 1, 5 * POINTS + 3])
def test_a_curve_of_any_length_has_few_points_and_keeps_its_mean(count):
    made = Curve()
    for value in range(count):
        made.add(float(value))
    values = made.values()
    assert len(values) <= POINTS and values == sorted(values)
    assert not values or 0 <= values[0] <= values[-1] <= count - 1


def test_signs_of_a_curve():
    assert (
        curve([3, 2, 1], 10, "abc") == "cba" and curve([], 5, "abc") == "" and curve([2, 2], 5, "abc") == "aa"
    )
    assert curve([1, math.nan, 3], 3, "abc") == "a c" and curve([math.nan], 3, "abc") == " "
    assert curve([1, 1, 2, 2, 3, 3], 3, "abc") == "abc"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0.00 s"), (0.0123, "12.3 ms"), (0.48, "0.48 s"), (59.6, "1 min"), (133, "2 min 13 s"), (11100, "3 h 5 min"),
     (200000, "2 d 7 h"), (3600, "1 h"), (math.nan, "unknown"), (math.inf, "unknown"), (None, "unknown")],
)  # fmt: skip
def test_durations(seconds, said):
    assert duration(seconds) == said


def test_durations_that_nobody_measured_to_parts_of_a_second():
    assert [whole(s) for s in (-1, 0.4, 3.2, 133)] == ["0 s", "0 s", "3 s", "2 min 13 s"]


# ---- on a terminal


def output_of(terminal, until, seconds=120):
    """What comes until it has `until`."""
    got, end = b"", time.monotonic() + seconds
    while until not in got and time.monotonic() < end:
        if select.select([terminal], [], [], 1)[0]:
            try:
                got += os.read(terminal, 65536)
            except OSError:  # the process has closed it
                break
    assert until in got, got[-500:]
    return got


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_the_terminal_as_it_was(locked, on_disk, number, code):
    going_on(locked, 4)
    terminal, other = pty.openpty()
    command = [sys.executable, "-m", "overspill.cli", "top", str(locked)]
    env = on_disk.env | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "40"}
    process = subprocess.Popen(
        command, stdin=other, stdout=other, stderr=other, env=env, start_new_session=True
    )
    os.close(other)
    try:
        shown = output_of(terminal, b"checkpoint")
        assert b"\x1b[?1049h" in shown and b"\x1b[?1049l" not in shown
        process.send_signal(number)
        left = output_of(terminal, b"\x1b[?1049l")
        assert left.rfind(b"\x1b[?1049h") < left.rfind(b"\x1b[?1049l")
        if number == signal.SIGINT:  # the last frame stays, and nobody says that the run was stopped
            after = left.partition(b"\x1b[?1049l")[2]
            after += b"" if b"checkpoint" in after else output_of(terminal, b"checkpoint")
            assert b"step 4/6" in after and b"stopped" not in after
        assert process.wait(60) == code and b"Traceback" not in left
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
