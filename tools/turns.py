"""What benchmarks share whose contenders are programs that take turns."""

import json
import os
import platform
import statistics
import subprocess
from pathlib import Path
from typing import Any


class Child:
    """A program that prints a line of JSON when it is ready, and one for each line it reads. It ends when its input
    does; Ctrl-C reaches only the one who asks."""

    def __init__(self, command: list[str], env: dict[str, str] | None = None):
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            start_new_session=True,
        )
        try:
            self.hello = self.answer()
        except BaseException:  # Ctrl-C while it starts
            self.process.kill()
            self.process.wait()
            raise

    def answer(self) -> dict[str, Any]:
        """The next line."""
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args[0]} ended with {self.process.wait()}")
        return json.loads(line)

    def reply(self, line: str) -> dict[str, Any]:
        """Asks."""
        print(line, file=self.process.stdin, flush=True)
        return self.answer()

    def close(self) -> None:
        """Ends it; it removes its files."""
        self.process.stdin.close()
        self.process.wait()


def in_turn(names: list, turn: int) -> list:
    """Who begins changes from turn to turn."""
    first = turn % max(1, len(names))
    return names[first:] + names[:first]


def quartiles(values: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return values * 3 if len(values) == 1 else statistics.quantiles(values, n=4, method="inclusive")


def machine() -> str:
    """Processor, cores, kernel."""
    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().split("\n")
        if "model name" in line
    ]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}"
