"""What test_init_memory.py runs in a process of its own: weights that the C library's allocator would keep after they
are freed, made inside Init or handed over by initialize. Prints the MiB of anonymous memory that are left of them."""

import contextlib
import ctypes
import sys
from pathlib import Path

from torch import nn

import overspill

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LAYERS, WIDTH = 24, 2048  # 8 MiB each in bf16


def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) // 1024


how, folder = sys.argv[1:]
libc = ctypes.CDLL(None)
# As glibc does by itself after some large tensor was freed, but for sure: all lie in the heap.
assert libc.mallopt(M_MMAP_THRESHOLD, 1 << 30) and libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
config = {"budget": {"host": "64MiB", "nvme": [folder]}, "engine": {"placement": "nvme"}}
before = anonymous()
with overspill.Init(config) if how == "init" else contextlib.nullcontext():
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).bfloat16()
if how == "init":
    print(anonymous() - before)
engine, *_ = overspill.initialize(model, config)
print(anonymous() - before)
