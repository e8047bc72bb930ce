"""What the disk does without a checkpoint: fio over the same files, or, where there is no fio, a reader of our own with
O_DIRECT and as many requests in flight."""

import concurrent.futures
import json
import mmap
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import NamedTuple

BLOCK, DEPTH = 4 << 20, 32
THREADS = 16  # of the plain reader


class Moved(NamedTuple):
    """Bytes read, bytes written, and the seconds of both together."""

    read: int
    written: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return (self.read + self.written) / self.seconds


def name() -> str:
    return "fio" if shutil.which("fio") else "a plain reader with O_DIRECT (there is no fio)"


def read(files: list[Path]) -> Moved:
    """All of these files, from the disk."""
    return _fio(files, None, 0) if shutil.which("fio") else _plain(files, None, 0)


def read_into_new_memory(files: list[Path]) -> Moved:
    """The same, each byte into memory that the kernel has yet to give, as a restore does: fio with as many requests in
    flight as the files have blocks."""
    if not shutil.which("fio"):
        return _plain(files, None, 0, _NewBuffers())
    return _fio(files, None, 0, sum(-(-path.stat().st_size // BLOCK) for path in files))


def read_and_write(files: list[Path], target: Path) -> Moved:
    """Reads these files and writes as many bytes into `target`, durably, both at once."""
    size = sum(path.stat().st_size for path in files) // BLOCK * BLOCK or BLOCK
    try:
        return _fio(files, target, size) if shutil.which("fio") else _plain(files, target, size)
    finally:
        target.unlink(missing_ok=True)


def _fio(files: list[Path], target: Path | None, size: int, depth: int = DEPTH) -> Moved:
    names = ":".join(str(path).replace(":", "\\:") for path in files if path.stat().st_size >= 4096)
    command = ["fio", "--direct=1", "--ioengine=io_uring", f"--bs={BLOCK}", f"--iodepth={depth}"]
    command += [
        "--scramble_buffers=0",
        "--mem=mmap",
        "--output-format=json",
        "--name=read",
        "--rw=read",
        f"--filename={names}",
    ]
    command += ["--blockalign=4096"]
    if target is not None:
        command += ["--name=write", "--rw=write", f"--filename={target}", f"--size={size}", "--end_fsync=1"]
    done = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    jobs = json.loads(done[done.index("{") :])["jobs"]
    seconds = max(max(job["read"]["runtime"], job["write"]["runtime"]) for job in jobs) * 1e-3
    return Moved(
        sum(job["read"]["io_bytes"] for job in jobs), sum(job["write"]["io_bytes"] for job in jobs), seconds
    )


class _Buffers(threading.local):
    """One for each thread, on a page's boundary, which O_DIRECT asks for."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, BLOCK)

    def take(self) -> mmap.mmap:
        return self._memory


class _NewBuffers:
    """A new one for each request. All are kept, so that none is an old one's memory."""

    def __init__(self) -> None:
        self._taken: list[mmap.mmap] = []

    def take(self) -> mmap.mmap:
        self._taken.append(mmap.mmap(-1, BLOCK))
        return self._taken[-1]


def _plain(
    files: list[Path], target: Path | None, size: int, buffers: _Buffers | _NewBuffers | None = None
) -> Moved:
    """Each thread has one request in flight."""
    buffers = buffers or _Buffers()

    def move(job: tuple[int, int, bool]) -> int:
        file, offset, writes = job
        call = os.pwritev if writes else os.preadv
        return call(file, [buffers.take()], offset)

    opened = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in files]
    try:
        reads = [(file, at, False) for file in opened for at in range(0, os.fstat(file).st_size, BLOCK)]
        writes = []
        if target is not None:
            opened.append(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600))
            writes = [(opened[-1], at, True) for at in range(0, size, BLOCK)]
        jobs = [job for pair in zip(reads, writes, strict=False) for job in pair]
        jobs += reads[len(writes) :] + writes[len(reads) :]
        began = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            moved = list(pool.map(move, jobs))
        if writes:
            os.fsync(opened[-1])
        seconds = time.perf_counter() - began
    finally:
        for file in opened:
            os.close(file)
    written = sum(count for job, count in zip(jobs, moved, strict=True) if job[2])
    return Moved(sum(moved) - written, written, seconds)
