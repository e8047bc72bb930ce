"""What `make large` runs: a model larger than memory, from construction to a merged checkpoint, in a memory cgroup.

A Llama with random weights is built inside overspill.Init, handed over, trained for a few steps with gradient
checkpointing (AdamW, clipping; weights, states and gradients on disk), saved, merged into bf16 safetensors, and
compared with what the engine held. All of it is one process (tools/large_run.py) that is started inside a memory
cgroup, so torch, the page cache and everything else count; the peak is the kernel's (memory.max_usage_in_bytes).

The disk needs 16 bytes a parameter: states and gradients 14, and 2 for what the model is built on, later for the
merged file. The checkpoint is links. Free space is looked at first, and everything is removed at the end.
Needs root and the memory controller of cgroup v1. Last line: RESULT {json}.

    tools/large_job.py                               3.0 B parameters in 6 GiB, 3 steps; 48 GB of disk
    tools/large_job.py --size 160 --limit 2GiB --host-budget 300MiB
                                                     a small one first: a minute, 3 GB
    tools/large_job.py --folder /mnt/nvme/large      on another disk
"""

import argparse
import contextlib
import ctypes
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench/shared"))

from turns import machine

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bindings"))

MEMORY = Path("/sys/fs/cgroup/memory")
DISK_BYTES = 16  # a parameter
DISK_SPARE = 1 << 30  # ring and staging on their way, manifests, what else the disk is used for
VOCAB = 32000
SHAPES = {  # by millions of parameters: hidden, intermediate, layers, heads, heads of keys and values
    "160": (768, 2048, 17, 12, 4),
    "690": (1536, 4096, 24, 12, 4),
    "1500": (2048, 5632, 32, 16, 4),
    "3000": (3072, 8192, 28, 24, 8),
}


def count(shape: tuple[int, ...]) -> int:
    """Parameters of the Llama."""
    hidden, wide, layers, heads, pairs = shape
    attention = 2 * hidden * hidden + 2 * hidden * (hidden // heads * pairs)
    return layers * (attention + 3 * hidden * wide + 2 * hidden) + 2 * VOCAB * hidden + hidden


@contextlib.contextmanager
def limited(limit: int) -> Iterator[Path]:
    """A memory cgroup of its own. Raises SystemExit where none can be made."""
    group = MEMORY / f"overspill-large-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        raise SystemExit(
            f"large: no memory cgroup can be made at {group}: {error.strerror}; this needs root and the memory "
            "controller of cgroup v1"
        ) from None
    try:
        yield group
    finally:
        group.rmdir()


def check_disk(folder: Path, parameters: int) -> None:
    """Raises SystemExit unless there is room."""
    free = shutil.disk_usage(folder).free
    needed = DISK_BYTES * parameters + DISK_SPARE
    print(f"disk: {needed / 1e9:.1f} GB needed at most, {free / 1e9:.1f} GB free at {folder}", flush=True)
    if free < needed:
        raise SystemExit(
            f"large: {(needed - free) / 1e9:.1f} GB too few; another --folder, or a smaller --size"
        )


def run(job: argparse.Namespace, group: Path) -> dict[str, Any]:
    """The process inside the cgroup, start to end; what it found. Its output is shown as it comes."""

    def inside() -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it does not outlive us
        (group / "cgroup.procs").write_text(str(os.getpid()))

    command = [sys.executable, str(ROOT / "tools/large_run.py"), json.dumps(job.child)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=inside, start_new_session=True
    )
    found: dict[str, Any] = {}
    try:
        for line in process.stdout:
            if line.startswith("FOUND "):
                found = json.loads(line.removeprefix("FOUND "))
            else:
                print(line, end="", flush=True)
        code = process.wait()
    finally:
        process.kill()
        process.wait()
    if code:
        why = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        raise SystemExit(f"large: the process {why}; {usage(group)}")
    return found


def usage(group: Path) -> dict[str, int]:
    """The kernel's counts of the cgroup."""
    keys = ("memory.max_usage_in_bytes", "memory.limit_in_bytes", "memory.failcnt")
    return {key: int((group / key).read_text()) for key in keys}


def options() -> argparse.Namespace:
    from overspill.config import parse_size as size_in_bytes

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=list(SHAPES), default="3000", help="millions of parameters")
    parser.add_argument("--limit", type=size_in_bytes, default="6GiB", help="of the cgroup")
    parser.add_argument("--host-budget", type=size_in_bytes, default="2GiB", help="of the engine")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "large", help="replaced, then removed")
    return parser.parse_args()


def main() -> int:
    job = options()
    shape = SHAPES[job.size]
    parameters = count(shape)
    print(f"machine: {machine()}; {datetime.date.today().isoformat()}")
    print(
        f"model: Llama, {parameters / 1e6:.0f} M parameters (hidden {shape[0]}, {shape[2]} layers), states "
        f"{12 * parameters / 1e9:.1f} GB, B = {job.batch}, T = {job.length}, gradient checkpointing",
        flush=True,
    )
    shutil.rmtree(job.folder, ignore_errors=True)
    job.folder.mkdir(parents=True)
    try:
        check_disk(job.folder, parameters)
        job.child = {
            "shape": shape,
            "vocabulary": VOCAB,
            "parameters": parameters,
            "host_budget": job.host_budget,
            "folder": str(job.folder),
            **{key: getattr(job, key) for key in ("steps", "batch", "length")},
        }
        with limited(job.limit) as group:
            print(f"cgroup: memory.limit_in_bytes {job.limit}, page cache included", flush=True)
            found = run(job, group)
            counts = usage(group)
    finally:
        shutil.rmtree(job.folder, ignore_errors=True)
    print("kernel: " + ", ".join(f"{key} {value}" for key, value in counts.items()))
    result = {"job": "large", "date": datetime.date.today().isoformat(), "machine": machine()}
    result |= {"parameters": parameters, "states_bytes": 12 * parameters, **counts, **found}
    print(f"RESULT {json.dumps(result)}")
    return 0


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("large: stopped; what it made is removed", file=sys.stderr)
        sys.exit(130)
