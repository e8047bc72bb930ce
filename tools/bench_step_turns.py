"""Contenders of make bench-step that take turns: each a process that answers lines of JSON, stopped (SIGSTOP) between
its turns, threads and all, so that work left for later stands still and is charged to its own next turn.

Both ends are here: `Contender` for the coordinator, `serve` for the child.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Failed(Exception):
    """A contender ended, or answered with an error; the message says how."""


class Contender:
    """The coordinator's end."""

    def __init__(self, name: str, command: list[str], env: dict[str, str], log: Path):
        self.name, self.log = name, log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=env,
                start_new_session=True,  # Ctrl-C is the coordinator's
            )

    def start(self) -> dict[str, Any]:
        """What it says when it is ready; it is stopped from then on."""
        return self._answer()

    def ask(self, **request: Any) -> dict[str, Any]:
        """One turn."""
        self._signal(signal.SIGCONT)
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise Failed(self._how()) from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise Failed(self._how())
        self._signal(signal.SIGSTOP)
        return json.loads(line)

    def _how(self) -> str:
        code = self.process.wait()
        why = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        lines = [line for line in self.log.read_text().splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line]  # a plan's table may follow it
        return f"{why}: {(errors or lines)[-1][:200]}" if lines else why

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def close(self) -> None:
        """Ends it, however far it is."""
        self._signal(signal.SIGCONT)
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def moved_bytes() -> dict[str, int]:
    """Bytes that this process had read from and written to disks, as the kernel counts them."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {"read_bytes": int(counts["read_bytes"]), "written_bytes": int(counts["write_bytes"])}


def peak_rss_bytes() -> int:
    """Most resident bytes since the process started."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def serve(ready: Callable[[], tuple[dict[str, Any], dict[str, Callable[..., dict[str, Any]]]]]) -> None:
    """The child's end: `ready()` returns what to say and what can be asked for; requests are {"do": name, …}.

    Where memory runs out the kernel is told to take this process first; and to end it, stopped or not, when the
    coordinator dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("900")
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries talk on stdout
    said, known = ready()
    print(json.dumps(said), file=replies)
    for line in sys.stdin:
        request = json.loads(line)
        before, started = moved_bytes(), time.perf_counter()
        found = known[request.pop("do")](**request)
        seconds, after = time.perf_counter() - started, moved_bytes()
        moved = {key: after[key] - before[key] for key in after}
        print(
            json.dumps({"seconds": seconds, "peak_rss_bytes": peak_rss_bytes(), **moved, **found}),
            file=replies,
        )
