"""DeepSpeed's asynchronous I/O as a contender of bench/io/run.py: reads lines of JSON, answers with lines of JSON.

    bench/io/deepspeed_aio.py FOLDER MIB CONSUMER        {"pattern": "moved", "block_mib": 4, "queue_depth": 32, …}

"read" and "write": one tensor of MIB, one call. "moved": for shards of 1 to 64 MiB the tensors lo, m and v, a file
each, are read while as many are written, in memory that DeepSpeed pinned itself; waited for shard by shard, as its
optimizer swapper does, or once at the end. "mixed": as its pipelined swapper does, the next shard is read and the
one before written while one is updated, by CONSUMER, the shared library of bench/io/consumer.cc.
"""

import ctypes
import json
import os
import resource
import sys
import time
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
REPLIES = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # DeepSpeed and its compiler talk on stdout

import torch  # noqa: E402
from deepspeed.ops.op_builder import AsyncIOBuilder  # noqa: E402

MIB = 1 << 20
SHARDS = [MIB << power for power in range(7)]


class Tensors:
    """Pinned tensors, each with the file it belongs to."""

    def __init__(self, handle, folder: Path, name: str, sizes: list[int], ordinary: bool = False):
        self.buffers = [
            handle.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8)) for size in sizes
        ]
        self.files = [str(folder / f"{name}-{i}.bin") for i in range(len(sizes))]
        for buffer, file in zip(self.buffers, self.files):
            buffer.random_(0, 256)
            if ordinary:
                buffer.view(torch.int32).bitwise_and_(0x007FFFFF).bitwise_or_(0x3A000000)
            handle.sync_pwrite(buffer, file)

    def read(self, handle, begin: int = 0, end: int | None = None) -> None:
        """Submits reads."""
        for buffer, file in zip(self.buffers[begin:end], self.files[begin:end]):
            handle.async_pread(buffer, file)

    def write(self, handle, begin: int = 0, end: int | None = None) -> None:
        """Submits writes."""
        for buffer, file in zip(self.buffers[begin:end], self.files[begin:end]):
            handle.async_pwrite(buffer, file)

    def bytes(self) -> int:
        """Of all tensors."""
        return sum(buffer.numel() for buffer in self.buffers)


class Contender:
    """Files, buffers, and a pair of handles for each setting asked for."""

    def __init__(self, folder: Path, mib: int, consumer: str):
        self.consume = ctypes.CDLL(consumer).overspill_consume
        self.consume.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 2
        self.module = AsyncIOBuilder().load(verbose=False)
        self.pairs: dict = {}
        first = self.pair(4, 32, False, True, 1)[0]
        sizes = [size for shard in SHARDS for size in (shard // 2, shard, shard)]
        self.sequential = Tensors(first, folder, "sequential", [mib * MIB])
        self.old = Tensors(first, folder, "old", sizes)
        self.new = Tensors(first, folder, "new", sizes)
        # Small positive numbers, as states and weights are, in what is updated.
        self.updated = Tensors(first, folder, "updated", sizes, ordinary=True)
        self.written = [str(folder / f"written-{i}.bin") for i in range(len(sizes))]
        for buffer, file in zip(self.updated.buffers, self.written):
            first.sync_pwrite(buffer, file)
        elements = sum(SHARDS) // 4
        self.hi, self.gradient = (torch.full((elements,), 5e-4, dtype=torch.bfloat16) for _ in range(2))

    def pair(
        self, block_mib: int, queue_depth: int, single_submit: bool, overlap_events: bool, parallel: int
    ):
        """One handle to read and one to write with: each works on one request after the other."""
        key = (block_mib * MIB, queue_depth, single_submit, overlap_events, parallel)
        if key not in self.pairs:
            self.pairs[key] = (self.module.aio_handle(*key), self.module.aio_handle(*key))
        return self.pairs[key]

    def run(self, pattern: str, pair, wait: str) -> int:
        """One turn; the bytes it moved."""
        reader, writer = pair
        if pattern == "read":
            self.sequential.read(reader)
            reader.wait()
            return self.sequential.bytes()
        if pattern == "write":
            self.sequential.write(writer)
            writer.wait()
            return self.sequential.bytes()
        if pattern == "mixed":
            self.update(reader, writer)
            return 2 * self.updated.bytes()
        step = 3 if wait == "shard" else 3 * len(SHARDS)
        for begin in range(0, 3 * len(SHARDS), step):
            self.old.read(reader, begin, begin + step)
            self.new.write(writer, begin, begin + step)
            reader.wait()
            writer.wait()
        return self.old.bytes() + self.new.bytes()

    def update(self, reader, writer) -> None:
        """Every shard is read, updated and written."""
        ends = range(3, 3 * len(SHARDS) + 1, 3)
        element = 0
        self.updated.read(reader, 0, 3)
        for end in ends:
            reader.wait()
            if end < 3 * len(SHARDS):
                self.updated.read(reader, end, end + 3)
            states = self.updated.buffers[end - 3 : end]
            hi, gradient = (tensor.data_ptr() + 2 * element for tensor in (self.hi, self.gradient))
            count = states[1].numel() // 4
            self.consume(hi, *(state.data_ptr() for state in states), gradient, 0, count)
            element += count
            if end > 3:
                writer.wait()
            for state, file in zip(states, self.written[end - 3 : end]):
                writer.async_pwrite(state, file)
        writer.wait()

    def turn(self, pattern: str, wait: str = "shard", **setting) -> dict:
        """One turn, timed."""
        pair = self.pair(**setting)
        before = resource.getrusage(resource.RUSAGE_SELF)
        start = time.perf_counter()
        count = self.run(pattern, pair, wait)
        seconds = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "bytes": count,
            "seconds": seconds,
            "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            "switches": after.ru_nvcsw + after.ru_nivcsw - before.ru_nvcsw - before.ru_nivcsw,
        }


def main() -> None:
    torch.set_num_threads(1)
    contender = Contender(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    print(json.dumps({"backend": "libaio"}), file=REPLIES)
    for line in sys.stdin:
        print(json.dumps(contender.turn(**json.loads(line))), file=REPLIES)


if __name__ == "__main__":
    main()
