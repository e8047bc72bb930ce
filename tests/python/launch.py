"""Ranks in processes of their own: `python` with the variables that torchrun sets, or torchrun itself."""

import contextlib
import gc
import os
import random
import re
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import torch
import warm

HERE = Path(__file__).resolve().parent
BINDINGS = HERE.parents[1] / "bindings"
GLOO = "[Gloo]"
HANGS = 300.0  # seconds after which a process counts as hanging, on the slowest machine


@dataclass
class Ended:
    """One process: its exit code and what it printed."""

    code: int
    out: str
    err: str

    def __str__(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


def environment(**variables) -> dict[str, str]:
    paths = os.pathsep.join((str(BINDINGS), str(HERE)))
    single = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return {**os.environ, **single, "PYTHONPATH": paths, **{k: str(v) for k, v in variables.items()}}


def free_port() -> int:
    """Below those that the kernel gives to whoever asks for any: nobody takes it before the ranks do."""
    for port in random.SystemRandom().sample(range(15000, 32000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port of a hundred is free")


def end_group() -> None:
    """Ends the default process group, in a job whose plain half wrapped its model in DistributedDataParallel.

    The wrapper has to go first. If it holds the group's last reference, torch 2.13 ends the group with the GIL held
    and joins the group's thread, which may wait for the GIL to free a tensor: the rank hangs for ever.
    """
    gc.collect()
    torch.distributed.destroy_process_group()


def start(world: int, script: str, *arguments, popen=warm.Popen) -> list[subprocess.Popen]:
    """One process a rank; the store is rank 0's. `script` lies beside the tests."""
    port = free_port()
    return [
        popen(
            [sys.executable, str(HERE / script), *map(str, arguments)],
            env=environment(RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]


def finish(processes: list[subprocess.Popen], timeout: float = HANGS) -> list[Ended]:
    """Waits for all of them. Where one does not end, all are killed, and the test fails with what they printed."""
    hung = threading.Event()

    def end_all() -> None:
        hung.set()
        for process in processes:
            process.kill()

    with _later(timeout, end_all):
        printed = [process.communicate() for process in processes]
    ended = [Ended(p.returncode, _own(out), err) for p, (out, err) in zip(processes, printed, strict=True)]
    assert not hung.is_set(), f"not ended within {timeout:g} s\n{told(ended)}"
    return ended


def _own(out: str) -> str:
    """Without what gloo says there: that of torch 2.9 tells when it has connected."""
    return "".join(line for line in out.splitlines(keepends=True) if not line.startswith(GLOO))


def own_line(process: subprocess.Popen) -> str:
    """The next line of a rank's stdout; empty at its end."""
    while (line := process.stdout.readline()).startswith(GLOO):
        pass
    return line


def told(ended: list[Ended]) -> str:
    """All that they printed."""
    return "\n".join(f"=== process {number}: {process}" for number, process in enumerate(ended))


def run(world: int, script: str, *arguments, timeout: float = HANGS, popen=warm.Popen) -> list[Ended]:
    """All ranks have to end well."""
    ended = finish(start(world, script, *arguments, popen=popen), timeout)
    assert all(process.code == 0 for process in ended), f"{world} ranks\n{told(ended)}"
    return ended


@contextlib.contextmanager
def _later(seconds: float, action):
    """`action` after that time, unless the block has ended."""
    timer = threading.Timer(seconds, action)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def torchrun(world: int, script, *arguments, folder=None, popen=warm.Popen) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={world}"]
    command += [
        "--standalone",
        "--local-addr=127.0.0.1",
    ]  # else ranks look for this host's name, which may not resolve
    return popen(
        [*command, str(script), *map(str, arguments)],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ranks_of(agent: subprocess.Popen, world: int) -> dict[int, int]:
    """Process ids by rank, once each of them has printed that it "calls". `agent` is one of `subprocess`."""
    calling: set[int] = set()
    with _later(HANGS, agent.kill):
        while len(calling) < world:
            line = agent.stdout.readline()
            if not line:
                out, err = agent.communicate()
                raise AssertionError(f"only {calling} have begun\n{Ended(agent.returncode, out, err)}")
            calling |= {int(rank) for rank in re.findall(r"rank (\d+) calls", line)}
    ids = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and _parent(entry) == agent.pid:
            with open(f"/proc/{entry}/environ", "rb") as file:  # noqa: PTH123
                variables = dict(v.split(b"=", 1) for v in file.read().split(b"\0") if b"=" in v)
            if b"RANK" in variables:
                ids[int(variables[b"RANK"])] = int(entry)
    assert len(ids) == world
    return ids


def _parent(process: str) -> int:
    try:
        with open(f"/proc/{process}/stat") as file:  # noqa: PTH123
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return -1
