"""DeepSpeed's own unit tests, on the CPU: with DeepSpeed, then with Overspill where DeepSpeed's name is asked for.

    python tools/deepspeed_tests CHECKOUT --out results/deepspeed-tests
    python tools/deepspeed_tests CHECKOUT --only unit/runtime/zero --side overspill

CHECKOUT has DeepSpeed's tests/ and docs/; this Python has DeepSpeed's package, its tests' requirements and what
Overspill needs. tools/deepspeed-tests makes both. The tests are not changed. DistributedTest starts ranks, of which
this machine has two (LOCAL_SIZE); a test of more is skipped by itself. With Overspill those tests run that passed with
DeepSpeed. Each has its own time limit. What a test gave is written when it ends, so a run that is broken off goes on.

A test that passed there passes here; or is refused (our error says "not supported", or is a RankError, and says what
to do instead); or uses what is private; or has failed. Private is decided by one rule: what is missing occurs nowhere
in DeepSpeed's documentation (docs/code-docs, docs/_pages, docs/_tutorials). A module, or a name in one, occurs by its
whole path, or as an example imports it; an attribute occurs after the name of an engine, of an optimizer, or of
anything where it is a parameter's or begins with an underscore. Where a test's isinstance asks for a class that
Overspill lacks, that class is what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from table import table

HERE = Path(__file__).resolve().parent
FOLDERS = ("unit/v1/zero", "unit/runtime", "unit/checkpoint")
SIDES = ("deepspeed", "overspill")
STARTS_IN = 400  # seconds until the first test begins
TRIES = 2  # of a process that begins no test


def results(path: Path) -> dict[str, dict[str, Any]]:
    """By test; a phase that failed counts over one that passed."""
    found: dict[str, dict[str, Any]] = {}
    for entry in entries(path):
        test = entry.get("test")
        if test and "outcome" in entry and found.get(test, {}).get("outcome") in (None, "passed"):
            found[test] = entry
    return found


def entries(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.endswith("}"):  # the last one may be half of one
                yield json.loads(line)


def append(path: Path, **entry: Any) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


class Side:
    """The tests of one side: where its results lie, and how its processes are started."""

    def __init__(self, name: str, tests: Path, out: Path, limit: float):
        self.name, self.tests, self.limit = name, tests, limit
        self.folder = out / name
        self.folder.mkdir(parents=True, exist_ok=True)
        ours = (HERE / "site", HERE.parent.parent / "bindings") if name == "overspill" else ()
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (HERE, *ours))),
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))),
            "DS_ACCELERATOR": "cpu",
            "LOCAL_SIZE": "2",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "DS_UNITTEST_TIMEOUT": str(int(limit)),
            "DS_DISABLE_REUSE_DIST_ENV": "1",
            **({"OVERSPILL_STANDS_IN": "1"} if ours else {}),
        }

    def path_of(self, file: str) -> Path:
        return self.folder / f"{file.replace('/', '.')}.jsonl"

    def results_of(self, file: str) -> dict[str, dict[str, Any]]:
        return results(self.path_of(file))

    def run(self, file: str, wanted: set[str] | None, worker: int) -> None:
        """The tests of one file that have no result yet; None: all. A process that says nothing for the time of a test
        is ended, its test has failed, and another goes on after it."""
        path, idle = self.path_of(file), 0
        while idle < TRIES:
            if wanted is None:
                wanted = next(
                    (set(entry["collected"]) for entry in entries(path) if "collected" in entry), None
                )
            left = None if wanted is None else wanted - self.results_of(file).keys()
            if left is not None and not left:
                return
            before = len(list(entries(path)))
            said = self._one(file, left, worker)
            fresh = list(entries(path))[before:]
            ended = {entry["test"] for entry in fresh if "test" in entry and "outcome" in entry}
            hung = [entry["test"] for entry in fresh if "begun" in entry and entry["test"] not in ended]
            for test in hung:
                append(path, test=test, outcome="failed", reason=f"no result in {self.limit:.0f} s")
            idle = 0 if hung or ended else idle + 1
        broken = [entry["reason"] for entry in entries(path) if "file" in entry]
        if broken and left:  # the file cannot be imported
            for test in left:
                append(path, test=test, outcome="failed", reason=broken[-1])
        else:
            print(f"{self.name} {file}: begins no test, and can be tried again: {said}", flush=True)

    def _one(self, file: str, left: set[str] | None, worker: int) -> str:
        """One process of pytest. Returns the end of what it said."""
        path, log = self.path_of(file), self.path_of(file).with_suffix(".log")
        chosen = path.with_suffix(".wanted")
        environment = self.environment | {
            "DEEPSPEED_TESTS_RESULTS": str(path),
            "PYTEST_XDIST_WORKER": f"gw{worker}",  # by which they choose a port
        }
        if left is not None:
            chosen.write_text(json.dumps(sorted(left)))
            environment["DEEPSPEED_TESTS_WANTED"] = str(chosen)
        temporary = self.folder / f"tmp-{os.getpid()}-{worker}"
        shutil.rmtree(temporary, ignore_errors=True)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "plugin",
            "-p",
            "no:cacheprovider",
            "--tb=short",
            file,
        ]
        command += ["--basetemp", str(temporary)]
        with log.open("wb") as said:
            process = subprocess.Popen(
                command, cwd=self.tests, env=environment, stdout=said, stderr=said, start_new_session=True
            )
            size, since, limit = 0, time.monotonic(), STARTS_IN
            while process.poll() is None:
                time.sleep(0.5)
                now = path.stat().st_size if path.exists() else 0
                if now != size:
                    size, since, limit = now, time.monotonic(), self.limit
                if time.monotonic() - since > limit + 5:
                    break
            end(process)
        shutil.rmtree(temporary, ignore_errors=True)
        lines = log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "pytest said nothing"


def end(process: subprocess.Popen[bytes]) -> None:
    """With all that it has started. A lock that one of them held on a compiled operator would stop all others."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    for lock in Path(os.environ.get("TORCH_EXTENSIONS_DIR", "/nonexistent")).glob("*/lock"):
        lock.unlink(missing_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results/deepspeed-tests"))
    parser.add_argument("--only", action="append", help="a file or folder below tests/")
    parser.add_argument("--side", choices=SIDES, help="one side alone")
    parser.add_argument("--limit", type=float, default=60, help="seconds that a test may take")
    parser.add_argument("--jobs", type=int, default=2, help="files at once")
    parser.add_argument("--again", action="store_true", help="run tests that failed before once more")
    parser.add_argument("--table", action="store_true", help="run nothing, and write the table")
    args = parser.parse_args()
    out = args.out.resolve()
    tests = out / "tests"
    if (
        not tests.exists()
    ):  # beside no folder deepspeed/, which its conftest.py would take instead of the package
        shutil.copytree(args.checkout / "tests", tests)
    sides = {name: Side(name, tests, out, args.limit) for name in SIDES}
    chosen = [tests / each for each in args.only or FOLDERS]
    files = [
        file for each in chosen for file in ([each] if each.is_file() else sorted(each.rglob("test_*.py")))
    ]
    found = [str(file.relative_to(tests)) for file in dict.fromkeys(files)]
    for name in () if args.table else SIDES if args.side is None else (args.side,):
        each_file(sides, name, found, args.jobs, args.again)
    table(sides, found, args.checkout / "docs", out)
    return 0


def each_file(sides: dict[str, Side], name: str, found: list[str], jobs: int, again: bool) -> None:
    files: Queue[str] = Queue()
    for file in found:
        files.put(file)

    def work(worker: int) -> None:
        while True:
            try:
                file = files.get_nowait()
            except Empty:
                return
            wanted = None
            if name != SIDES[0]:
                there = sides[SIDES[0]].results_of(file)
                wanted = {test for test, entry in there.items() if entry["outcome"] == "passed"}
            if again:
                forget(sides[name].path_of(file))
            sides[name].run(file, wanted, worker)
            counts: dict[str, int] = {}
            for entry in sides[name].results_of(file).values():
                counts[entry["outcome"]] = counts.get(entry["outcome"], 0) + 1
            print(f"{time.strftime('%H:%M:%S')} {name} {file}: {counts}", flush=True)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def forget(path: Path) -> None:
    """The results that are not a pass."""
    passed = {test for test, entry in results(path).items() if entry["outcome"] == "passed"}
    kept = [entry for entry in entries(path) if entry.get("test", "") in passed or "collected" in entry]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
