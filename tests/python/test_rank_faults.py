"""One rank fails: in construction, load, save, step or close; by a full disk, its budget, an exception, or SIGKILL. The
others end soon, with an error that names it and says why, though they would wait for it for half an hour."""

import contextlib
import itertools
import os
import re
import subprocess

import launch
import pytest
from rank_fault_job import PLACES, REASON

HANGS = 30.0 * max(
    1.0, os.getloadavg()[0] / os.cpu_count()
)  # seconds after the failure, in which all have ended
CONSTRUCTION = [
    "script",
    "config",
    "model",
    "partition",
    "broadcast",
    "materialise",
    "weights",
    "hooks",
    "states",
]
CONSTRUCTION += ["scheduler", "loader"]
POINTS = {
    "construction": CONSTRUCTION,
    "load": ["load", "loaded"],
    "save": ["save", "saved"],
    "step": ["step"],
    "close": ["close"],
}
WAYS = ("disk", "budget", "exception", "kill")
ROWS = [
    ("construction", "disk"),
    ("save", "disk"),
    ("construction", "budget"),
    ("step", "budget"),
    *((place, way) for places in POINTS.values() for place in places for way in ("exception", "kill")),
]
NOBODY = "nobody is connected yet: whoever started the ranks ends them, or the others wait their time"
LEFT_OUT = {
    ("load", "disk"): "what a load writes was reserved in construction",
    ("step", "disk"): "what a step writes was reserved in construction; failing writes: rank_failure_test.cc",
    ("close", "disk"): "close() writes nothing",
    ("load", "budget"): "a load takes no memory that construction has not taken",
    ("save", "budget"): "a save takes no memory that construction has not taken",
    ("close", "budget"): "close() takes no memory",
    ("script", "kill"): NOBODY,
    ("config", "kill"): NOBODY,
}
ROWS = [row for row in ROWS if row not in LEFT_OUT]
WORLDS = [(2, 1), (2, 0), (4, 2)]  # ranks, and the one that fails; rank 0 has the store
QUICK = [
    ("construction", "disk", 2, 1),
    ("construction", "budget", 2, 0),
    ("config", "exception", 2, 1),
    ("script", "exception", 2, 1),
    ("weights", "exception", 4, 2),
    ("broadcast", "kill", 2, 0),
    ("save", "disk", 2, 1),
    ("load", "exception", 2, 1),
    ("loaded", "exception", 2, 0),
    ("close", "kill", 2, 1),
]
SAYS = {
    ("construction", "disk"): "no space left",
    ("save", "disk"): "no space left",
    ("construction", "budget"): "budget",
    ("step", "budget"): "no room to gather",
}


@pytest.mark.parametrize("point, way", list(itertools.product(POINTS, WAYS)))
def test_every_combination_is_run_or_left_out_for_a_reason(point, way):
    ways = [(place, way) for place in (point, *POINTS[point])]
    assert any(row in ROWS for row in ways) != ((point, way) in LEFT_OUT)


@pytest.mark.parametrize("place", PLACES)
def test_what_fails_in_a_place_is_a_function_there(place):
    """Its row may be a long one, which few run: it would fail for its own sake and nobody would see it."""
    owner, name = PLACES[place]
    assert name in vars(owner)


@contextlib.contextmanager
def disk(folder, size: str):
    """A file system of `size` at `folder`; a folder alone where that is empty."""
    folder.mkdir()
    if not size:
        yield
        return
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def quick_or_long():
    for (point, way), (world, victim) in itertools.product(ROWS, WORLDS):
        row = (point, way, world, victim)
        yield pytest.param(*row, marks=[] if row in QUICK else [pytest.mark.long])


@pytest.mark.parametrize("point, way, world, victim", list(quick_or_long()))
def test_the_others_end_and_name_it(tmp_path, point, way, world, victim):
    odd, even = (
        ("1m", "64m") if way == "disk" else ("", "")
    )  # of the rank that fails; of the rest, and for saves
    with disk(tmp_path / "odd", odd), disk(tmp_path / "even", even):
        ended = fail(tmp_path, point, way, world, victim)
    everything = f"{point} {way}\n{launch.told(ended)}"
    reason = SAYS.get((point, way), REASON)
    assert ended[victim].code == (-9 if way == "kill" else 1), everything
    if way != "kill":
        assert reason in last_error(ended[victim]), f"not its own error\n{everything}"
    for rank in set(range(world)) - {victim}:
        assert ended[rank].code == 1, everything
        last = last_error(ended[rank])
        if (
            (point, way) == ("save", "disk")
            and f"saved.partial/rank{rank}" in last
            and reason in last.lower()
        ):
            continue  # the disk was full for this rank too, at the same moment
        named = [f"rank {other}" for other in range(world) if f"rank {other}" in last]
        assert named == [f"rank {victim}"], f"rank {rank} names {named}\n{everything}"
        assert "is gone" in last if way == "kill" else reason in last, everything


def last_error(process: launch.Ended) -> str:
    lines = process.err.splitlines()
    begin = [i for i, line in enumerate(lines) if re.match(r"(\[rank\d\]: )?[\w.]+(Error|Failed): ", line)]
    return "\n".join(lines[begin[-1] :]) if begin else ""


def fail(folder, point: str, way: str, world: int, victim: int) -> list[launch.Ended]:
    processes = launch.start(world, "rank_fault_job.py", point, way, victim, folder)
    while (line := launch.own_line(processes[victim])) != "now\n":
        assert line, f"it has not failed\n{launch.told(launch.finish(processes, HANGS))}"
    return launch.finish(processes, HANGS)
