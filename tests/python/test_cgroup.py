"""Training, and running a model, inside a memory limit of the kernel under which the same in RAM alone is killed."""

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
import tiny

MEMORY = Path("/sys/fs/cgroup/memory")
LIMIT = 900 << 20
HIDDEN, LAYERS = 768, 10  # about 57 M parameters: 14 bytes each are 800 MB


@contextlib.contextmanager
def limited(limit: int):
    """A function that moves the calling process under `limit` bytes (cgroup v1)."""
    if os.geteuid() != 0 or not (MEMORY / "memory.limit_in_bytes").exists():
        pytest.skip("needs root and the memory controller of cgroup v1 at /sys/fs/cgroup/memory")
    group = MEMORY / f"overspill-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        yield lambda: (group / "cgroup.procs").write_text(str(os.getpid()))
    finally:
        group.rmdir()


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    made = tiny.Bench(tmp_path_factory.mktemp("cgroup"))
    made.model = tiny.make_model(made.root / "large", made.texts, hidden=HIDDEN, layers=LAYERS, dropout=0.0)
    return made


def alone(join) -> dict:
    """For Bench.start: a process in the group, all of whose memory is its own."""
    return {"popen": subprocess.Popen, "preexec_fn": join}


def test_trains_where_ram_alone_is_killed(bench, tmp_path):
    options = {"steps": 2, "batch": 1, "eval_batches": 0}
    with limited(LIMIT) as join:
        in_ram = bench.train_args(tmp_path / "ram", host_budget="8GiB", nvme=None, **options)
        process = bench.start(in_ram, **alone(join))
        out, err = process.communicate(timeout=240)
        assert process.returncode == -signal.SIGKILL, f"{process.returncode}\n{out}\n{err}"

        process = bench.start(
            bench.train_args(tmp_path / "disk", host_budget="250MiB", **options), **alone(join)
        )
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, f"{process.returncode}\n{out}\n{err}"
    records = tiny.log(tmp_path / "disk")
    assert len(records) == 2 and records[-1]["nvme_written_bytes"] > 100 << 20


BUDGET = 420 << 20  # of a whole process, of which the interpreter, torch and transformers have more than half
BESIDE = 64 << 20  # what a process may take beside its budget


def test_a_model_is_run_within_its_budget(tmp_path):
    """A model of about 300 MB."""
    bench = tiny.Bench(tmp_path)
    folder = tiny.make_model(tmp_path / "large", bench.texts, hidden=1024, layers=16, dropout=0.0)
    weights = (folder / "model.safetensors").stat().st_size
    command = ["generate", "--model", folder, "--prompt", "the bird", "--max-new-tokens", "3"]
    process = bench.start(command)
    wanted, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    with limited(BUDGET + BESIDE) as join:
        process = bench.start(command, **alone(join))
        out, err = process.communicate(timeout=240)
        assert process.returncode == -signal.SIGKILL, f"{process.returncode}\n{out}\n{err}"

        process = bench.start([*command, "--budget", str(BUDGET)], **alone(join))
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, f"{process.returncode}\n{out}\n{err}"
    assert out == wanted and "tokens a second are expected" in err
    stay = re.search(r"overspill: ([\d.]+) MiB of the weights stay in memory, ([\d.]+) MiB are read", err)
    assert 0 < float(stay[1]) * 2**20 < weights and float(stay[2]) > 0, err
