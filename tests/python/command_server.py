"""Commands in processes of their own, without the seconds that importing torch takes: one process imports everything
and forks, before any library has threads, a child for each command. `Server` is the tests' end of it."""

import json
import os
import subprocess
import sys
from pathlib import Path


class Command:
    """One that was started; its output is in a file."""

    def __init__(self, server: "Server", pid: int, output: Path):
        self._server, self.pid, self._output = server, pid, output
        self._code: int | None = None

    def ended(self) -> bool:
        if self._code is None:
            self._code = self._server.ask("poll", self.pid)
        return self._code is not None

    def signal(self, number: int) -> None:
        """The process is a zombie at worst until `ended` has been seen, so its id is still its own."""
        if self._code is None:
            os.kill(self.pid, number)

    def wait(self) -> int:
        """The exit code, negative for a signal."""
        if self._code is None:
            self._code = self._server.ask("wait", self.pid)
        return self._code

    @property
    def output(self) -> str:
        """stdout and stderr; nothing of a process that was killed before it had opened the file."""
        return self._output.read_text() if self._output.exists() else ""


class Server:
    def __init__(self, folder: Path, env: dict[str, str]):
        self._folder, self._count = folder, 0
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=env | single | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.ask("threads", 0) == 1, "a child of a process with threads may hang"

    def ask(self, what: str, value) -> int | None:
        self._process.stdin.write(json.dumps([what, value]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the command server ended with {self._process.wait()}"
        return json.loads(answer)

    def start(self, *arguments) -> Command:
        self._count += 1
        output = self._folder / f"command-{self._count}.txt"
        pid = self.ask("start", [str(output), [str(a) for a in arguments]])
        return Command(self, pid, output)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def _run(output: str, arguments: list[str]) -> None:
    """In the child; does not return."""
    code = 70
    try:
        handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        from overspill.cli import main

        code = main(arguments)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pid: int, options: int) -> int | None:
    found, status = os.waitpid(pid, options)
    return os.waitstatus_to_exitcode(status) if found else None


def _serve() -> None:
    import matplotlib.pyplot  # noqa: F401
    import torch  # noqa: F401
    from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: F401

    import overspill.cli.generate
    import overspill.cli.loop
    import overspill.cli.merge
    import overspill.cli.plot
    import overspill.data  # noqa: F401
    from overspill.cli import parser

    parser()
    for line in sys.stdin:
        what, value = json.loads(line)
        if what == "threads":
            answer = len(os.listdir("/proc/self/task"))
        elif what == "start":
            answer = os.fork()
            if answer == 0:
                _run(*value)
        else:
            answer = _wait(value, os.WNOHANG if what == "poll" else 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
