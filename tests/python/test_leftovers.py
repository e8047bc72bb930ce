"""Token caches that a killed start left unfinished."""

import fcntl
import os
import subprocess
import sys
import time

import pytest
import tiny

from overspill.cli import leftovers
from overspill.cli.leftovers import remove_unfinished

DIGEST = "0123456789abcdef" * 2
PART = f"{DIGEST}-sealed.u32.part-0123abcd"

KILLED = """
import os, signal, sys
from pathlib import Path
from overspill import token_cache
with token_cache.new(Path(sys.argv[1])) as out:
    print("writes", flush=True)
    sys.stdin.read()
"""


def age(path) -> None:
    """As of an hour ago."""
    os.utime(path, (time.time() - 3600,) * 2)


def made(cache, name):
    cache.mkdir(exist_ok=True)
    (cache / name).write_bytes(bytes(4096))
    age(cache / name)
    return cache / name


@pytest.fixture
def on_one_machine(monkeypatch):
    """Whatever the file system of the tests is."""
    monkeypatch.setattr(leftovers, "is_of_one_machine", lambda file: True)


def test_what_a_kill_leaves_is_removed_and_what_is_written_stays(on_one_machine, tmp_path, capfd):
    cache = tmp_path / "cache"
    writer = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(cache / f"{DIGEST}-sealed.u32")],
        env={**os.environ, "PYTHONPATH": str(tiny.BINDINGS)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout.readline() == "writes\n"
    (part,) = cache.iterdir()
    age(part)
    remove_unfinished(cache)
    assert part.exists(), "its lock is held"
    writer.kill()
    writer.communicate()
    remove_unfinished(cache)
    assert not list(cache.iterdir()) and capfd.readouterr().err == ""


@pytest.mark.parametrize("why", ["shared", "no locks", "earlier"])
def test_what_may_be_in_use_is_named_and_stays(why, tmp_path, capsys, monkeypatch):
    path = made(tmp_path / "cache", PART if why != "earlier" else PART.replace("-sealed", "-utf8"))
    if why == "shared":
        monkeypatch.setattr(leftovers, "is_of_one_machine", lambda file: False)
    if why == "no locks":

        def refused(*_):
            raise OSError(37, os.strerror(37))

        monkeypatch.setattr(fcntl, "flock", refused)
    remove_unfinished(path.parent)
    said = capsys.readouterr().err
    assert path.exists() and f"{path}: left by a start that was killed" in said and "4.0 KiB" in said


def test_nothing_else_is_touched(tmp_path, capsys):
    cache = tmp_path / "cache"
    others = [made(cache, name) for name in ("thesis.u32.part-0123abcd", f"{DIGEST}-sealed.u32", "a.part")]
    (cache / PART).symlink_to(others[0])
    new = cache / PART.replace("0123abcd", "4567cdef")
    new.touch()  # made, and not yet locked
    before = sorted(cache.iterdir())
    remove_unfinished(cache)
    remove_unfinished(tmp_path / "absent")
    assert sorted(cache.iterdir()) == before and capsys.readouterr().err == ""


def test_a_start_removes_them(on_one_machine, on_disk, tmp_path, capsys):
    part = made(tmp_path / "cache", PART)
    on_disk.ok(capsys, *on_disk.run(tmp_path / "out", steps=1, cache=part.parent))
    assert not part.exists()
