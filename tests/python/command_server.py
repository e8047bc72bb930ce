"""Commands in processes of their own, whose output goes to files."""

import subprocess
import sys
from pathlib import Path

import warm


class Command:
    """One that was started; its output is in a file."""

    def __init__(self, process: subprocess.Popen, output: Path):
        self._process, self._output = process, output
        self.pid = process.pid

    def ended(self) -> bool:
        return self._process.poll() is not None

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        """The exit code, negative for a signal."""
        return self._process.wait()

    @property
    def output(self) -> str:
        """stdout and stderr."""
        return self._output.read_text()


class Server:
    def __init__(self, folder: Path, env: dict[str, str]):
        self._env = env | warm.ONE_THREAD | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        self._folder, self._count = folder, 0

    def start(self, *arguments) -> Command:
        self._count += 1
        output = self._folder / f"command-{self._count}.txt"
        with output.open("wb") as file:
            process = warm.Popen(
                [sys.executable, "-m", "overspill.cli", *map(str, arguments)],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        return Command(process, output)
