"""What benchmarks share: contenders that are processes and take turns.

`Child` is the end of the one who asks; `serve` that of a contender in Python. Both ends speak in lines: a contender
prints a line of JSON when it is ready, and one for each line it reads; it ends when its input does.
"""

import contextlib
import ctypes
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Failed(Exception):
    """A contender ended, or answered with an error; the message says how."""


class Child:
    """A contender; `hello` is what it said when it was ready. Ctrl-C reaches only the one who asks.

    log:   gets what it writes to stderr; the last error there explains a failure
    rests: it is stopped (SIGSTOP) between its turns, threads and all, so that work left for later stands still and is
    charged to its own next turn
    alone: False where it is ready only when others are: then whoever starts them all reads the first line of each
    """

    def __init__(
        self,
        command: list[str],
        env: dict[str, str] | None = None,
        log: Path | None = None,
        rests: bool = False,
        alone: bool = True,
    ):
        self.log, self.rests = log, rests
        with contextlib.ExitStack() as stack:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stack.enter_context(log.open("w")) if log else None,
                text=True,
                env=env,
                start_new_session=True,
            )
        try:
            self.hello = self.answer() if alone else {}
        except BaseException:  # Ctrl-C while it starts
            self.process.kill()
            self.process.wait()
            raise

    def ask(self, line: str = "", **request: Any) -> dict[str, Any]:
        """One turn, asked for by a line, or by keywords as JSON. Raises Failed."""
        self.send(line or json.dumps(request))
        return self.answer()

    def send(self, line: str) -> None:
        """Lets it go on, and asks. Raises Failed."""
        self.resume()
        try:
            print(line, file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise Failed(self._how()) from None

    def answer(self) -> dict[str, Any]:
        """Its next line, after which it rests. Raises Failed."""
        found = self.read()
        self.rest()
        return found

    def read(self) -> dict[str, Any]:
        """Its next line. Raises Failed."""
        line = self.process.stdout.readline()
        if not line:
            raise Failed(self._how())
        return json.loads(line)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def rest(self) -> None:
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """Ends it, however far it is; it removes its files."""
        self.resume()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _how(self) -> str:
        code = self.process.wait()
        why = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        if self.log is None:
            return f"{self.process.args[0]} {why}"
        lines = [line for line in self.log.read_text().splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line]  # a plan's table may follow it
        return f"{why}: {(errors or lines)[-1][:200]}" if lines else why

    def _signal(self, number: int) -> None:
        if self.rests:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)


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
    """A contender's end: `ready()` returns what to say and what can be asked for; requests are {"do": name, …}.

    Where memory runs out the kernel is told to take this process first; and to end it, stopped or not, when the one who
    asks dies."""
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


def in_turn(names: list, turn: int) -> list:
    """Who begins changes from turn to turn."""
    first = turn % max(1, len(names))
    return names[first:] + names[:first]


def quartiles(values: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return values * 3 if len(values) == 1 else statistics.quantiles(values, n=4, method="inclusive")


def tell(result: dict[str, Any]) -> None:
    """A line for each figure, and the last line, RESULT {json}."""
    width = max(map(len, result))
    for key, value in result.items():
        print(f"  {key:<{width}} {value:,}" if isinstance(value, int) else f"  {key:<{width}} {value}")
    print("RESULT " + json.dumps(result))


def machine() -> str:
    """Processor, cores, kernel."""
    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().split("\n")
        if "model name" in line
    ]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}"
