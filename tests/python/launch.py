"""Ranks in processes of their own: `python` with the variables that torchrun sets, or torchrun itself."""

import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
BINDINGS = HERE.parents[1] / "bindings"


@dataclass
class Ended:
    """One process: its exit code and what it printed."""

    code: int
    out: str
    err: str


def environment(**variables) -> dict[str, str]:
    paths = os.pathsep.join((str(BINDINGS), str(HERE)))
    single = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return {**os.environ, **single, "PYTHONPATH": paths, **{k: str(v) for k, v in variables.items()}}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(world: int, script: str, *arguments) -> list[subprocess.Popen]:
    """One process a rank; the store is rank 0's. `script` lies beside the tests."""
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, str(HERE / script), *map(str, arguments)],
            env=environment(RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]


def finish(processes: list[subprocess.Popen], timeout: float = 120.0) -> list[Ended]:
    """Waits for all of them; one that does not end is killed, and fails the test."""
    ended = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=timeout)
            ended.append(Ended(process.returncode, out, err))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return ended


def run(world: int, script: str, *arguments, timeout: float = 120.0) -> list[Ended]:
    """All ranks have to end well."""
    ended = finish(start(world, script, *arguments), timeout)
    for rank, process in enumerate(ended):
        assert process.code == 0, f"rank {rank} of {world}:\n{process.out}\n{process.err}"
    return ended


def torchrun(world: int, script, *arguments, folder=None) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={world}"]
    command += ["--standalone", "--local-addr=127.0.0.1"]  # else ranks look for this host's name, which may not resolve
    return subprocess.Popen(
        [*command, str(script), *map(str, arguments)],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ranks_of(agent: subprocess.Popen, world: int) -> dict[int, int]:
    """Process ids by rank, once each of them has printed that it "calls"."""
    calling: set[int] = set()
    while len(calling) < world:
        line = agent.stdout.readline()
        assert line or agent.poll() is None, agent.communicate()
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
